// The broker's state: objects, the sessions that lease and pin them, the claims that keep them. Pure: no sockets, no clocks, no memory
// mapping, no files; what the outside must do next is left in `effects`. One thread.
//
// An object is freed when it is sealed, no session pins it and nothing claims it. A claim binds objects to something that lives in some
// process: a Ray object (kToken), a task's return value (kReturn), or the session itself (kSelf). The owner of a return value is the
// process that called the task, which the claiming process cannot name; so the broker asks ("query") the sessions that listen, first the
// one that owned this session's last returns, then the rest, until one adopts the claim. A claim nobody answers for is an orphan.
//
// The owner may be on another node. The session that knows other nodes is asked last; it has a session of its kind there inquire, which is
// the same as a claim that binds no object: the sessions are asked whose it is, and whoever adopts it says when it is over.
//
// Memory is bounded. Above the high watermark, and while a create waits, objects that nobody pins are written to disk, the least recently
// used first; they stay in memory as well ("clean") until somebody needs the room, which then costs nothing. A get of an object that is on
// disk only has it read back if there is room at once, and otherwise is sent to the disk itself: a get never waits for room. Where there
// is no disk, or it is full, orphans are the only sealed objects that the pool drops by itself, beside replicas: objects that only claims of
// that kind keep, as another pool has them too, count as clean, and are dropped instead of written.
#pragma once
#include <algorithm>
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
  uint64_t offset = 0, size = 0;         // bytes; the offset is in the spill file with Status::kOnDisk
  const std::string* inlined = nullptr;  // valid until the next call
};

// What a journal must hold so that the spilled objects of a dead broker come back with the claims on them.
struct SavedSession {
  SessionId id = 0;
  int32_t pid = 0;
  uint64_t born = 0;  // start time of the process, as the kernel gives it: tells it from a later one of the same pid
  std::string label, group;
};
struct SavedObject {
  ObjectId id;
  SessionId creator = 0;
  uint64_t size = 0, disk_page = 0;
  std::string group, note;
};
struct SavedClaim {
  ClaimKey key;
  SessionId owner = 0, creator = 0;
  bool handover = false, inherited = false;
  std::vector<ObjectId> objects;
};

class Table {
 public:
  struct Limits {
    uint64_t capacity = 0;        // bytes over all arenas once they are fully populated
    uint64_t inline_budget = 0;   // bytes of objects kept in the broker's heap
    uint64_t quota = 0;           // bytes that one group may have in memory; 0: as much as there is
    double high = 0.8, low = 0.65;  // watermarks, as parts of the capacity (or quota)
    uint64_t disk = 0;            // bytes of the spill file at most; 0: no spilling
    uint64_t read_ahead = 0;      // bytes read back before they are asked for, where objects are got in the order they were spilled
  };
  // Bytes to be written to the spill file, or read from it. Nothing else touches either place until `written` or `read_back`.
  struct Transfer {
    ObjectId id;
    uint32_t arena = 0;
    uint64_t offset = 0, disk = 0, bytes = 0;
  };
  struct Names {
    std::vector<SessionId> sessions;
    std::vector<ObjectId> objects;
    std::vector<ClaimKey> claims;
  };
  struct Effects {
    std::vector<std::pair<SessionId, ClaimKey>> queries;  // ask this session who answers for that key
    std::vector<std::pair<SessionId, ObjectId>> gone;     // tell this session, which watches it, that the object ceased to exist
    std::vector<std::pair<SessionId, ClaimKey>> answers;  // to inquiries; the kind has an Answer in it
    std::vector<ObjectId> changed;                        // became readable, or ceased to exist
    bool freed = false;                                   // pages came back: waiting creates may succeed
    std::vector<Transfer> writes, reads;
    std::vector<std::pair<uint64_t, uint64_t>> holes;     // offset and bytes of the spill file that are of no more use
    Names saved;                                          // what the journal says of them is out of date
  };
  struct Counters {
    uint64_t puts = 0, gets = 0, bytes_put = 0, reaped_sessions = 0, reaped_leases = 0, reaped_pins = 0, orphans_dropped = 0;
    uint64_t spill_written_bytes = 0, spill_read_bytes = 0, served_from_disk = 0;
  };

  explicit Table(Limits limits) : limits_(limits) { groups_.emplace_back(); }

  uint32_t add_arena(int place = 0) { return places_.push_back(place), arenas_.emplace_back(), uint32_t(arenas_.size() - 1); }
  void extend(uint32_t arena, uint64_t bytes);  // that many more bytes of the arena are populated
  void stop_growing();                          // the machine gives no more than what is populated
  void set_capacity(uint64_t bytes) { limits_.capacity = bytes, effects_.freed = true; }
  void tick(int64_t now_ns) { now_ = now_ns; }  // what is called next happens then

  void open_session(SessionId s, int32_t pid, std::string label, std::string_view group = {}, uint64_t born = 0);
  void listen(SessionId s, bool on, bool last = false);  // whether it can be asked about claims; after all others
  void close_session(SessionId s);    // the process is gone: leases, pins, claims and its part in queries end here and only here
  bool holds_anything(SessionId s) const;  // a lease or a pin
  bool owns_anything(SessionId s) const;   // a claim
  size_t session_count() const { return sessions_.size(); }
  uint32_t group(SessionId s) const { return sessions_.at(s).group; }

  // kFull and kQuota: nothing is taken, and it may be tried again. `place`: where it is read from most, if that is known.
  Status create(SessionId s, ObjectId id, uint64_t size, Location* out, std::string_view note = {}, int place = -1);
  Status seal(SessionId s, ObjectId id, const ClaimKey& key, bool handover, const std::vector<ObjectId>& also);
  Status put_inline(SessionId s, ObjectId id, std::string_view bytes, const ClaimKey& key, bool handover);
  Status abort(SessionId s, ObjectId id);
  enum class Presence { kMissing, kLeased, kReadable };
  Presence presence(ObjectId id) const;
  // Pins, except an inlined object. kWait: it is being read back, and will be in `changed`. kOnDisk: pinned there.
  Status get(SessionId s, ObjectId id, Location* out, bool may_wait = true);
  void release(SessionId s, ObjectId id);
  void remove(ObjectId id);
  void watch(SessionId s, ObjectId id);  // `gone` tells it when the object ceases to exist: at once, if it does not

  void adopt(SessionId s, const ClaimKey& key);
  void disown(SessionId s, const ClaimKey& key, bool mine);
  void unclaim(SessionId s, const ClaimKey& key);
  void inquire(SessionId s, const ClaimKey& key);  // who of the others answers for it: `answers` tells

  // ---- the disk

  // Leaves writes in the effects as the watermarks, the quotas and a waiting create of `wanted` bytes (0: none) ask for.
  void make_room(uint64_t wanted, SessionId who = 0);
  void written(ObjectId id, const std::string& error);    // "" or why it is not on disk
  void read_back(ObjectId id, const std::string& error);
  void spill_again() { disk_refuses_ = false; }            // after an error: try the disk once more
  bool disk_refuses() const { return disk_refuses_; }

  // ---- what a later broker needs

  Names all_saved();  // what a journal begins with; what changes from then on is in the effects
  std::optional<SavedSession> saved(SessionId s) const;
  std::optional<SavedObject> saved(ObjectId id) const;
  std::optional<SavedClaim> saved(const ClaimKey& key) const;
  // In this order, before anything else; then each session resumes, or is closed.
  void restore(const SavedSession& s);
  void restore(const SavedObject& o);
  void restore(const SavedClaim& c);
  void restored();  // drops what no claim names, and ends claims that name nothing
  void resume(SessionId s, uint64_t next_counter);  // it has a new connection; ids from this one on were not of the dead broker

  Effects take_effects() { return std::exchange(effects_, {}); }
  const Counters& counters() const { return counters_; }
  uint64_t used_bytes() const { return usage_.used; }
  uint64_t disk_end() const { return disk_.total_pages() * kPageSize; }  // nothing is beyond, in the spill file
  uint64_t used_bytes(int place) const;
  uint64_t populated_bytes() const;
  uint64_t populated_bytes(uint32_t arena) const { return arenas_.at(arena).total_pages() * kPageSize; }
  uint64_t arena_used(uint32_t a) const { return (arenas_.at(a).total_pages() - arenas_[a].free_pages()) * kPageSize; }
  uint64_t arena_largest_free(uint32_t a) const { return arenas_.at(a).largest_free() * kPageSize; }
  bool is_empty() const { return objects_.empty(); }
  const Limits& limits() const { return limits_; }
  std::string why_full(uint64_t size, SessionId who) const;
  // Members of a JSON object, without its braces. `detail`: with a row an object.
  std::string report(bool detail) const;

 private:
  enum class Io : uint8_t { kNone, kWriting, kReading };
  enum class Idle : uint8_t { kNone, kDirty, kClean };  // in memory and unpinned: could be written; could be dropped
  struct Usage {
    uint64_t used = 0;     // bytes of memory taken
    uint64_t clean = 0;    // of these, what can be dropped at once
    uint64_t writing = 0;  // and what is being written
    uint64_t pressing() const { return used - clean - writing; }
  };
  struct Group {
    std::string name;
    uint64_t sessions = 0, objects = 0;
    Usage usage;
  };
  struct Object {
    bool sealed = false, removed = false, damaged = false;
    bool ahead = false;  // read back unasked, and not got since
    Io io = Io::kNone;
    Idle idle = Idle::kNone;
    SessionId creator = 0;
    uint32_t group = 0;
    uint32_t arena = 0;
    PageAllocator::Node node = PageAllocator::kNil;   // in memory
    PageAllocator::Node extent = PageAllocator::kNil;  // on disk
    uint64_t offset = 0, disk = 0, size = 0, pages = 0;  // bytes, bytes, bytes, pages
    std::string inlined, note;
    uint64_t pins = 0, claims = 0;
    uint64_t replicas = 0;  // of the claims, those that do not keep it
    std::vector<SessionId> watchers;
    uint64_t birth = 0;  // tells it from an earlier object of the same id
    int64_t since = 0;   // ns
    std::list<ObjectId>::iterator queued;  // where it is idle
    bool is_inline() const { return pages == 0; }
    bool in_memory() const { return node != PageAllocator::kNil; }
    bool is_spare() const { return replicas && replicas == claims; }
    bool on_disk() const { return extent != PageAllocator::kNil && io != Io::kWriting; }
    uint64_t bytes() const { return pages * kPageSize; }
  };
  static uint64_t pages_of(uint64_t size) { return std::max<uint64_t>(kPageSize, whole_pages(size)) / kPageSize; }  // of an object in an arena
  struct Claim {
    std::vector<std::pair<ObjectId, uint64_t>> objects;  // and their births: one may have been removed, and its id used again
    SessionId owner = 0;    // who tells us when it ends; 0: being asked, or an orphan
    SessionId creator = 0;
    bool handover = false;  // survives its creator
    bool inherited = false;  // and did: from then on, whoever still refers to it has been asked
    bool restored = false;  // of a broker that died: its end may have been told to that one
    SessionId inquirer = 0;
    std::set<SessionId> asked, waiting;
    std::optional<std::list<ClaimKey>::iterator> orphan;
  };
  struct Session {
    int32_t pid = 0;
    uint64_t born = 0;
    std::string label;
    uint32_t group = 0;
    int64_t since = 0;
    bool listens = false, asked_last = false;
    uint64_t first_counter = 0;  // ids of this session below are of a broker that died
    std::unordered_set<ObjectId> leases;
    std::unordered_map<ObjectId, uint64_t> pins;
    std::unordered_set<ClaimKey> claims;
    std::unordered_set<ClaimKey> queried;
    SessionId last_owner = 0;  // who adopted this session's last return
  };
  using ObjectIt = std::unordered_map<ObjectId, Object>::iterator;
  using ClaimIt = std::unordered_map<ClaimKey, Claim>::iterator;
  struct Held {
    uint64_t owned = 0, leased = 0, pinned = 0;  // bytes
  };

  // objects
  template <class F>
  void account(const Object& o, F&& f) { f(usage_), f(groups_[o.group].usage); }
  bool take_pages(Object& o, int place);
  Status allocate(Object& o, int place);
  void free_pages(Object& o);
  void free_extent(Object& o);
  void drop(ObjectIt it);
  void end_claim_named_after(ObjectId id, ClaimKind kind);
  void maybe_drop(ObjectId id);
  void end_now(ObjectId id, Object& o);
  void tell_watchers(ObjectId id, Object& o);
  void count_claim(const ClaimKey& key, ObjectId id, Object& o, int more);
  void unpin(ObjectId id, uint64_t n);
  void settle(ObjectId id, Object& o);
  bool evict_one_clean(std::optional<uint32_t> group);
  bool room_is_coming(std::optional<uint32_t> group) const;
  bool over_quota(const Object& o) const;
  bool start_read(ObjectId id, Object& o);
  bool read_one(ObjectId id, Object& o);
  void read_ahead();
  void no_longer_ahead(Object& o);
  uint64_t free_bytes() const;
  bool start_write(ObjectId id, Object& o);
  void relieve(const Usage& usage, uint64_t limit, uint64_t wanted, std::optional<uint32_t> group);
  Status absent(ObjectId id) const;
  uint32_t group_of(std::string_view name);
  // claims
  void add_claim(SessionId s, const ClaimKey& key, bool handover, const std::vector<ObjectId>& ids);
  void end_claim(ClaimIt it);
  void query(ClaimIt it, SessionId s, Session& n);
  void ask(ClaimIt it, bool everyone);
  void answered(ClaimIt it, SessionId s);
  void query_all(ClaimIt it, bool last);
  static bool waits_only_for(const Claim& c, SessionId s) { return c.waiting.size() == 1 && c.waiting.contains(s); }
  void tell_inquirer(ClaimIt it, Answer answer);
  void set_owner(ClaimIt it, SessionId s);
  bool evict_one_orphan(std::optional<uint32_t> group);
  void touch(const ClaimKey& key) { if (saving_) effects_.saved.claims.push_back(key); }
  Session* find(SessionId s);
  Object* find(const std::pair<ObjectId, uint64_t>& claimed);
  const Object* find(const std::pair<ObjectId, uint64_t>& claimed) const { return const_cast<Table*>(this)->find(claimed); }
  // telling
  std::unordered_map<SessionId, Held> held() const;
  std::string session_rows(bool all) const;
  std::string object_rows() const;

  Limits limits_;
  Effects effects_;
  Counters counters_;
  std::vector<PageAllocator> arenas_;
  std::vector<int> places_;  // of the arenas
  PageAllocator disk_;
  std::unordered_map<ObjectId, Object> objects_;
  std::unordered_map<ClaimKey, Claim> claims_;
  std::map<SessionId, Session> sessions_;
  std::vector<Group> groups_;  // the first has no name: sessions that named none
  std::list<ClaimKey> orphans_;  // oldest first
  std::unordered_set<ClaimKey> inquiries_;  // claims with an inquirer
  std::unordered_set<SessionId> of_this_life_;  // kept in a second life: sessions whose missing objects were freed, not lost
  std::list<ObjectId> dirty_, clean_;  // idle, least recently used first
  Usage usage_;
  std::map<uint64_t, ObjectId> by_place_;  // what is on disk, by its offset there
  uint64_t inline_used_ = 0, births_ = 0, disk_used_ = 0;
  uint64_t read_to_ = 0, ahead_ = 0;  // where in the spill file reading got to; bytes read back unasked and not got since
  int64_t now_ = 0;
  bool growing_ = true, saving_ = false, second_life_ = false, disk_refuses_ = false;
  std::string disk_error_;
};

}  // namespace mcr
