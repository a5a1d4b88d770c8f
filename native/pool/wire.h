// The messages between a client and its broker: fixed structs over AF_UNIX SOCK_SEQPACKET, native byte order (one machine).
#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

namespace mcr {

constexpr uint32_t kProtocolVersion = 4;
constexpr size_t kMaxMessage = 64 << 10;   // bytes; a longer message is a protocol error
constexpr size_t kInlineMax = 8 << 10;     // bytes; objects up to this size travel inside the message
constexpr size_t kPageSize = 4096;         // allocation granule
constexpr uint64_t whole_pages(uint64_t bytes) { return (bytes + kPageSize - 1) / kPageSize * kPageSize; }
constexpr size_t kNoteMax = 256;           // bytes of an object's note: where it was put from

using SessionId = uint64_t;

struct ObjectId {
  uint64_t hi = 0;  // the session that created the object
  uint64_t lo = 0;  // that session's counter
  auto operator<=>(const ObjectId&) const = default;
  explicit operator bool() const { return hi | lo; }
};

// What an object's lifetime is bound to, beside the pins of its readers.
enum class ClaimKind : uint32_t {
  kNone = 0,
  kToken = 1,   // a Ray object owned by the claiming process; `bytes` is its ObjectID
  kReturn = 2,  // a return value, owned by the caller of a task; `bytes` is TaskID (24) + ordinal (4, from 1)
  kSelf = 3,    // the claiming session itself, until it frees the object; `bytes` is the object's id
  kReplica = 4, // nothing here: another pool has the object too. Dropped when the room is needed; `bytes` is the object's id
  kGone = 5,    // only in events: the object whose id is `bytes` ceased to exist
};

// Of an inquiry, in the event's kind beside that of its claim.
enum class Answer : uint32_t {
  kHeld = 0x100,   // a session of this broker answers for the claim
  kEnded = 0x200,  // one did, and the claim is over
  kNobody = 0x300, // none does
};

struct ClaimKey {
  uint32_t kind = 0;
  uint8_t bytes[28] = {};
  bool operator==(const ClaimKey& o) const { return kind == o.kind && !std::memcmp(bytes, o.bytes, sizeof bytes); }
};

enum class Op : uint16_t {
  kHello = 1,  // + pidfd by SCM_RIGHTS; `size` is the protocol version, `id` {the session to go on with after a broker's death or 0, its
               // next counter}, the body label '\0' group. The reply carries the session and the number of arenas
  kAttach,     // a further socket of the session `id`
  kArena,      // reply carries the descriptors, read-write and read-only, of the arena number `size`
  kGrow,       // let the pool have `size` bytes in all; never less than now
  kCreate,     // lease `size` bytes as `id`; waits in FIFO order for at most timeout_ns. The body is its note; key.kind the NUMA node + 1
  kSeal,       // make `id` (if not nil) readable, and claim it and the ids that follow for `key`
  kAbort,      // one-way: give the lease back
  kPutInline,  // `id` with the bytes that follow (<= kInlineMax), claimed for `key`
  kGet,        // pin `id`; waits for its seal for at most timeout_ns. kOnDisk: read it yourself, then release it
  kRelease,    // one-way: unpin the ids that follow
  kUnclaim,    // one-way: `key` is gone
  kDelete,     // one-way: free the ids that follow whatever claims them; their pins keep the bytes until released
  kAdopt,      // one-way: this session answers for `key`
  kDisown,     // one-way: this session does not; flag kMine: it did, and the key is gone
  kWatch,      // one-way: tell this session when one of the ids that follow ceases to exist
  kInquire,    // one-way: who of the others answers for `key`, a claim at another broker? Told by events (see Answer): kNobody, or kHeld and
               // in the end kEnded
  kWait,       // reply when `size` of the ids that follow are readable, or at the deadline
  kStats,      // reply carries JSON; flag kDetail: in a file, which the reply carries
  kBye,        // one-way: the client dropped every view and lease
  kLast = kBye
};

enum Flag : uint16_t {
  kMine = 1,      // with kDisown
  kHandover = 2,  // with kSeal, kToken: should this session die, ask the others who still refers to the key
  kEvents = 4,    // with kAttach: this socket only carries events, from the broker to the client
  kAskLast = 64,  // with kEvents: ask this session for claims that nobody else answers for
  kOneWay = 8,    // with kSeal: no reply. Whoever gets the object meanwhile waits for the seal
  kAfter = 16,    // with what has a reply: first deal with the one-way messages on the session's first socket
  kDetail = 32,   // with kStats
};

enum class Status : uint16_t {
  kOk = 0,
  kFull,
  kTooLarge,
  kExists,
  kMissing,
  kTimeout,
  kInline,
  kBad,
  kLost,     // it was of a broker that died, and was not on disk, or was freed before
  kDamaged,  // it is on disk, which does not give it back
  kOnDisk,   // it is in the spill file, whose descriptor the reply carries, at `offset`
  kQuota,    // no room for this session's group. In a reply: kFull
  kWait,     // not yet. Never in a reply
};

struct Request {
  uint16_t op = 0;
  uint16_t flags = 0;
  uint32_t count = 0;  // ids that follow, or bytes with kHello, kCreate and kPutInline
  ObjectId id;
  uint64_t size = 0;
  int64_t timeout_ns = 0;  // < 0: no deadline
  ClaimKey key;
};

struct Reply {
  uint16_t status = 0;
  uint16_t flags = 0;
  uint32_t count = 0;  // bytes, ids or fds that follow
  uint64_t arena = 0;
  uint64_t offset = 0;
  uint64_t size = 0;
  uint64_t aux = 0;
};

struct Event {  // broker -> client: who answers for this claim? With kGone: this is no more; with an Answer: what was asked by kInquire
  ClaimKey key;
};

static_assert(sizeof(Request) == 72 && sizeof(Reply) == 40 && sizeof(Event) == 32);
constexpr size_t kMaxIds = (kMaxMessage - sizeof(Request)) / sizeof(ObjectId);

}  // namespace mcr

template <>
struct std::hash<mcr::ObjectId> {
  size_t operator()(const mcr::ObjectId& i) const noexcept { return i.hi * 0x9E3779B97F4A7C15ull ^ i.lo * 0xC2B2AE3D27D4EB4Full; }
};
template <>
struct std::hash<mcr::ClaimKey> {
  size_t operator()(const mcr::ClaimKey& k) const noexcept {
    uint64_t h = k.kind * 0x9E3779B97F4A7C15ull, w;
    for (size_t i = 0; i + 8 <= sizeof k.bytes; i += 4) std::memcpy(&w, k.bytes + i, 8), h = (h ^ w) * 0xC2B2AE3D27D4EB4Full, h ^= h >> 29;
    return h;
  }
};
