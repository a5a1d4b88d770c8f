// What the tests of broker and clients share: objects with contents, put, got and looked at.
#pragma once
#include "harness.h"

using namespace mcr;
using harness::BrokerThread;
using harness::Child;
using harness::request;
using harness::say;
using harness::wait_for_go;
using harness::Wire;

namespace mcr {
inline std::ostream& operator<<(std::ostream& o, Status s) { return o << "status " << int(s); }
}  // namespace mcr

constexpr uint64_t kMiB = 1 << 20;
constexpr int64_t kSecond = 1'000'000'000;
using ClientPtr = std::shared_ptr<Client>;

inline ClaimKey key_of(ClaimKind kind, ObjectId id) {
  ClaimKey k;
  k.kind = uint32_t(kind);
  std::memcpy(k.bytes, &id, sizeof id);
  return k;
}
inline ClaimKey self(ObjectId id) { return key_of(ClaimKind::kSelf, id); }

inline std::byte pattern(ObjectId id, size_t i) { return std::byte((id.lo * 131 + i * 7 + (i >> 12)) & 0xff); }
inline void fill(std::byte* p, ObjectId id, size_t n) {
  for (size_t i = 0; i < n; ++i) p[i] = pattern(id, i);
}
inline bool intact(const View& v, ObjectId id, size_t n) {
  if (v.size() != n) return false;
  for (size_t i = 0; i < n; ++i)
    if (v.data()[i] != pattern(id, i)) return false;
  return true;
}

inline ObjectId put(Client& c, size_t bytes) {
  const ObjectId id = c.new_id();
  std::byte* where;
  const auto made = c.create(id, bytes, -1, &where);
  if (made.status != Status::kOk) check::fail(__FILE__, __LINE__, "no room: " + made.text);
  fill(where, id, bytes);
  CHECK_EQ(c.seal(id, self(id), false, {}), Status::kOk);
  CHECK(c.wait({id}, 1, -1) == "\1");  // the seal has arrived
  return id;
}
inline View get(Client& c, ObjectId id, bool writable = false) {
  View v;
  CHECK_EQ(c.get(id, -1, writable, &v), Status::kOk);
  return v;
}
inline bool is_missing(Client& c, ObjectId id) {
  View v;
  return c.get(id, 0, false, &v) == Status::kMissing;
}
inline uint64_t stat(Client& c, const char* name) { return check::number(c.stats(), name); }
inline void expect_empty(Client& c) {
  const std::string context = check::context;
  for (const char* what : {"leases", "pins", "claims", "orphans", "used_bytes", "inline_bytes", "objects", "removed_but_pinned"})
    UNTIL((check::context = context + " " + c.stats(), stat(c, what) == 0));
  check::context = context;
  const std::string stats = c.stats();  // of one moment: memory may still be on its way
  CHECK_EQ(check::number(stats, "free_pages") * kPageSize, check::number(stats, "populated_bytes"));
}
// All memory is there: what FULL means from now on does not depend on how fast the kernel clears pages.
inline void wait_populated(Client& c) { UNTIL(stat(c, "populated_bytes") == c.capacity()); }

template <class F>
bool throws_gone(F&& f) {
  try {
    f();
  } catch (const BrokerGone&) {
    return true;
  }
  return false;
}
