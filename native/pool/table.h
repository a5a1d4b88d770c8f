// The broker's state: objects, the sessions that lease and pin them, the claims that keep them. Pure: no sockets, no clocks, no memory
// mapping; what the outside must do next is left in `effects`. One thread.
//
// An object is freed when it is sealed, no session pins it and nothing claims it. A claim binds objects to something that lives in some
// process: a Ray object (kToken), a task's return value (kReturn), or the session itself (kSelf). The owner of a return value is the
// process that called the task, which the claiming process cannot name; so the broker asks ("query") the sessions that listen, first the
// one that owned this session's last returns, then the rest, until one adopts the claim. A claim nobody answers for is an orphan: its
// objects stay while there is room, and are the only sealed objects that the pool ever drops by itself.
#pragma once
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "page_allocator.h"
#include "wire.h"

namespace mcr {

struct Location {
  uint32_t arena = 0;
  uint64_t offset = 0, size = 0;      // bytes
  const std::string* inlined = nullptr;  // valid until the next call
};

class Table {
 public:
  struct Limits {
    uint64_t capacity = 0;       // bytes over all arenas once they are fully populated
    uint64_t inline_budget = 0;  // bytes of objects kept in the broker's heap
  };
  struct Effects {
    std::vector<std::pair<SessionId, ClaimKey>> queries;  // ask this session who answers for that key
    std::vector<ObjectId> changed;                        // became readable, or ceased to exist
    bool freed = false;                                   // pages came back: waiting creates may succeed
  };
  struct Counters {
    uint64_t puts = 0, gets = 0, bytes_put = 0, reaped_sessions = 0, reaped_leases = 0, reaped_pins = 0, orphans_dropped = 0;
  };

  explicit Table(Limits limits) : limits_(limits) {}

  uint32_t add_arena() { return arenas_.emplace_back(), uint32_t(arenas_.size() - 1); }
  void extend(uint32_t arena, uint64_t bytes);  // that many more bytes of the arena are populated
  void stop_growing();                          // the machine gives no more than what is populated

  void open_session(SessionId s, int32_t pid, std::string label);
  void listen(SessionId s, bool on);  // whether it can be asked about claims
  void close_session(SessionId s);    // the process is gone: leases, pins, claims and its part in queries end here and only here
  bool holds_anything(SessionId s) const;  // a lease or a pin
  size_t session_count() const { return sessions_.size(); }

  Status create(SessionId s, ObjectId id, uint64_t size, Location* out);
  Status seal(SessionId s, ObjectId id, const ClaimKey& key, bool handover, const std::vector<ObjectId>& also);
  Status put_inline(SessionId s, ObjectId id, std::string_view bytes, const ClaimKey& key, bool handover);
  Status abort(SessionId s, ObjectId id);
  enum class Presence { kMissing, kLeased, kReadable };
  Presence presence(ObjectId id) const;
  Status get(SessionId s, ObjectId id, Location* out);  // pins, except an inlined object
  void release(SessionId s, ObjectId id);
  void remove(ObjectId id);

  void adopt(SessionId s, const ClaimKey& key);
  void disown(SessionId s, const ClaimKey& key, bool mine);
  void unclaim(SessionId s, const ClaimKey& key);

  Effects take_effects() { return std::exchange(effects_, {}); }
  const Counters& counters() const { return counters_; }
  uint64_t used_bytes() const { return used_; }
  uint64_t populated_bytes() const;
  const Limits& limits() const { return limits_; }
  std::string why_full(uint64_t size) const;
  std::string stats_json() const;

 private:
  struct Object {
    bool sealed = false, removed = false;
    SessionId creator = 0;
    uint32_t arena = 0;
    PageAllocator::Node node = PageAllocator::kNil;
    uint64_t offset = 0, size = 0, pages = 0;
    std::string inlined;
    uint64_t pins = 0, claims = 0;
    uint64_t birth = 0;  // tells it from an earlier object of the same id
  };
  struct Claim {
    std::vector<std::pair<ObjectId, uint64_t>> objects;  // and their births: one may have been removed, and its id used again
    SessionId owner = 0;    // who tells us when it ends; 0: being asked, or an orphan
    SessionId creator = 0;
    bool handover = false;  // survives its creator
    bool inherited = false;  // and did: from then on, whoever still refers to it has been asked
    std::set<SessionId> asked, waiting;
    std::optional<std::list<ClaimKey>::iterator> orphan;
  };
  struct Session {
    int32_t pid = 0;
    std::string label;
    bool listens = false;
    std::unordered_set<ObjectId> leases;
    std::unordered_map<ObjectId, uint64_t> pins;
    std::unordered_set<ClaimKey> claims;
    std::unordered_set<ClaimKey> queried;
    SessionId last_owner = 0;  // who adopted this session's last return
  };
  using ObjectIt = std::unordered_map<ObjectId, Object>::iterator;
  using ClaimIt = std::unordered_map<ClaimKey, Claim>::iterator;

  bool allocate(Object& o);
  void drop(ObjectIt it);
  void maybe_drop(ObjectId id);
  void unpin(ObjectId id, uint64_t n);
  void add_claim(SessionId s, const ClaimKey& key, bool handover, const std::vector<ObjectId>& ids);
  void end_claim(ClaimIt it);
  void ask(ClaimIt it, bool everyone);
  void answered(ClaimIt it, SessionId s);
  void set_owner(ClaimIt it, SessionId s);
  bool evict_one_orphan();
  Session* find(SessionId s);
  Object* find(const std::pair<ObjectId, uint64_t>& claimed);

  Limits limits_;
  Effects effects_;
  Counters counters_;
  std::vector<PageAllocator> arenas_;
  std::unordered_map<ObjectId, Object> objects_;
  std::unordered_map<ClaimKey, Claim> claims_;
  std::map<SessionId, Session> sessions_;
  std::list<ClaimKey> orphans_;  // oldest first
  uint64_t used_ = 0, inline_used_ = 0, births_ = 0;
  bool growing_ = true;
};

}  // namespace mcr
