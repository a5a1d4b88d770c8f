// What the tests of the table share: keys, and how its enums print.
#pragma once
#include <cstring>
#include <ostream>

#include "check.h"
#include "pool/table.h"

namespace mcr {

inline std::ostream& operator<<(std::ostream& o, Status s) { return o << "status " << int(s); }
inline std::ostream& operator<<(std::ostream& o, Table::Presence p) { return o << "presence " << int(p); }
inline bool operator<(const ClaimKey& a, const ClaimKey& b) {
  return a.kind != b.kind ? a.kind < b.kind : std::memcmp(a.bytes, b.bytes, sizeof a.bytes) < 0;
}

constexpr auto kMissing = Table::Presence::kMissing, kLeased = Table::Presence::kLeased, kReadable = Table::Presence::kReadable;

inline ClaimKey key_of(ClaimKind kind, uint64_t n) {
  ClaimKey k;
  k.kind = uint32_t(kind);
  std::memcpy(k.bytes, &n, sizeof n);
  return k;
}
inline ClaimKey token(uint64_t n) { return key_of(ClaimKind::kToken, n); }
inline ClaimKey returned(uint64_t n) { return key_of(ClaimKind::kReturn, n); }
inline ClaimKey key_of(ClaimKind kind, ObjectId id) {
  ClaimKey k;
  k.kind = uint32_t(kind);
  std::memcpy(k.bytes, &id, sizeof id);
  return k;
}
inline ClaimKey self(ObjectId id) { return key_of(ClaimKind::kSelf, id); }
inline ClaimKey replica(ObjectId id) { return key_of(ClaimKind::kReplica, id); }

}  // namespace mcr
