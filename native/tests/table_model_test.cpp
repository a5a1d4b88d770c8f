// The broker's table: random operations of random sessions, with a disk that is slow, fails and is full, against a model written for
// clarity; and the same across restarts, by way of a journal. Usage: table_model_test [SEEDS [FIRST_SEED]]
#include <algorithm>
#include <climits>
#include <map>
#include <optional>
#include <random>
#include <set>

#include "pool/journal.h"
#include "table_support.h"
#include "temporary.h"

using namespace mcr;

namespace {

struct Model {
  enum Io { kNone, kWriting, kReading };
  enum Idle { kBusy, kDirty, kClean };
  struct Object {
    bool sealed = false, removed = false, inlined = false;
    SessionId lessee = 0;
    std::string group = {};
    uint64_t size = 0, pages = 0, offset = 0;
    uint32_t arena = 0;
    std::map<SessionId, uint64_t> pins = {};
    bool memory = false, damaged = false;
    Io io = kNone;
    std::optional<uint64_t> disk = {};  // offset of its extent
    Idle idle = kBusy;
    int idle_since = 0;
    uint64_t bytes() const { return pages * kPageSize; }
    bool on_disk() const { return disk && io != kWriting; }
    Idle state() const { return !sealed || !memory || io != kNone || !pins.empty() ? kBusy : disk ? kClean : kDirty; }
  };
  struct Claim {
    std::set<ObjectId> objects;
    SessionId owner = 0, creator = 0;
    bool handover = false, inherited = false, orphan = false, restored = false;
    bool bound = false;  // it binds, or has bound, objects
    SessionId inquirer = 0;
    int orphan_since = 0;
    std::set<SessionId> asked, waiting;
  };
  struct Session {
    bool listens = false, last = false;
    SessionId last_owner = 0;
    std::string group = {};
    uint64_t first_counter = 0;  // ids below are of an earlier life
  };
  using Hole = std::pair<uint64_t, uint64_t>;
  std::map<ObjectId, Object> objects;
  std::map<ClaimKey, Claim> claims;
  std::map<SessionId, Session> sessions;
  std::vector<uint64_t> arena_pages;
  uint64_t capacity = 0, inline_budget = 0, dropped = 0, quota = 0, disk_limit = 0;  // bytes but for `dropped`
  bool refuses = false, second_life = false;
  std::set<SessionId> of_this_life;
  std::vector<Hole> holes;
  int now = 0;

  using Query = std::pair<SessionId, ClaimKey>;
  std::vector<Query> queries, answers;

  uint64_t claims_on(ObjectId id) const {
    return uint64_t(std::count_if(claims.begin(), claims.end(), [&](auto& c) { return c.second.objects.contains(id); }));
  }
  uint64_t inline_used() const {
    uint64_t n = 0;
    for (auto& [id, o] : objects) n += o.inlined ? o.size : 0;
    return n;
  }
  uint64_t sum(auto&& which) const {  // bytes
    uint64_t n = 0;
    for (auto& [id, o] : objects) n += which(o) ? o.bytes() : 0;
    return n;
  }
  using Group = std::optional<std::string>;  // nullopt: all of them
  uint64_t used(const Group& g = {}) const { return sum([&](auto& o) { return o.memory && (!g || o.group == *g); }); }
  uint64_t writing(const Group& g = {}) const { return sum([&](auto& o) { return o.io == kWriting && (!g || o.group == *g); }); }
  uint64_t idle(Idle what, const Group& g = {}) const { return sum([&](auto& o) { return o.state() == what && (!g || o.group == *g); }); }
  uint64_t used_pages() const { return used() / kPageSize; }
  // A create must wait, since what is written, or can be, will make room.
  bool room_is_coming(const Group& g) const { return writing(g) || (disk_limit && !refuses && idle(kDirty, g)); }
  bool over_quota(const std::string& group, uint64_t pages) const { return quota && used(group) + pages * kPageSize > quota; }
  static bool gap_of(const std::map<uint64_t, uint64_t>& taken, uint64_t total, uint64_t pages) {
    uint64_t at = 0, gap = 0;
    for (auto [first, n] : taken) {
      CHECK(first >= at);  // or two share a page
      gap = std::max(gap, first - at), at = first + n;
    }
    CHECK(at <= total);
    return std::max(gap, total - at) >= pages;
  }
  bool fits_on_disk(uint64_t pages) const {
    std::map<uint64_t, uint64_t> taken;
    for (auto& [id, o] : objects)
      if (o.disk) taken[*o.disk / kPageSize] = o.pages;
    return gap_of(taken, disk_limit / kPageSize, pages);
  }
  uint64_t populated() const {
    uint64_t n = 0;
    for (uint64_t p : arena_pages) n += p * kPageSize;
    return n;
  }
  bool fits(uint64_t pages) const {
    for (uint32_t a = 0; a < arena_pages.size(); ++a) {
      std::map<uint64_t, uint64_t> taken;
      for (auto& [id, o] : objects)
        if (o.memory && o.arena == a) taken[o.offset / kPageSize] = o.pages;
      if (gap_of(taken, arena_pages[a], pages)) return true;
    }
    return false;
  }

  Status absent(ObjectId id) const {
    if (!second_life || of_this_life.contains(id.hi)) return Status::kMissing;
    auto s = sessions.find(id.hi);
    return s == sessions.end() || id.lo < s->second.first_counter ? Status::kLost : Status::kMissing;
  }

  void free_extent(Object& o) {
    holes.emplace_back(*o.disk, o.bytes());
    o.disk.reset();
  }
  void erase(ObjectId id) {
    if (Object& o = objects.at(id); o.disk) free_extent(o);
    objects.erase(id);
    for (auto& [key, c] : claims) c.objects.erase(id);
  }
  void sweep() {
    for (auto it = objects.begin(); it != objects.end();) {
      auto& [id, o] = *it++;
      if (!o.sealed || !o.pins.empty() || (!o.removed && claims_on(id))) continue;
      if (o.io == kNone) erase(ObjectId(id));
      else o.removed = true;
    }
  }
  bool may_ask(SessionId s, const Claim& c) { return sessions.contains(s) && sessions[s].listens && !c.asked.contains(s); }
  void query(const ClaimKey& key, SessionId s) { claims[key].asked.insert(s), claims[key].waiting.insert(s), queries.emplace_back(s, key); }
  void query_all(const ClaimKey& key, bool last) {
    for (auto& [s, n] : sessions)
      if (n.last == last && may_ask(s, claims[key])) query(key, s);
  }
  void tell(const ClaimKey& key, Answer answer) {
    Claim& c = claims.at(key);
    if (!c.inquirer) return;
    ClaimKey with = key;
    with.kind |= uint32_t(answer);
    answers.emplace_back(c.inquirer, with);
    if (answer != Answer::kHeld) c.inquirer = 0;
  }
  void end(const ClaimKey& key) {
    if (!claims.contains(key)) return;
    tell(key, Answer::kEnded);
    claims.erase(key);
  }
  void ask(const ClaimKey& key, bool everyone) {
    Claim& c = claims.at(key);
    const SessionId likely = sessions.contains(c.creator) ? sessions[c.creator].last_owner : 0;
    if (!everyone && may_ask(likely, c)) return query(key, likely);
    query_all(key, false);
    if (!c.waiting.empty()) return;
    tell(key, Answer::kNobody);
    if (!c.bound) return end(key);
    query_all(key, true);
    if (!c.waiting.empty()) return;
    if (c.inherited && !c.restored) end(key);
    else c.orphan = true, c.orphan_since = now;
  }
  void no(SessionId s, const ClaimKey& key) {
    Claim& c = claims.at(key);
    if (!c.waiting.erase(s) || c.owner) return;
    if (c.waiting.empty()) ask(key, true);
    else if (c.inquirer && c.waiting == std::set{c.inquirer}) tell(key, Answer::kNobody);
  }
  void inquire(SessionId s, const ClaimKey& key) {
    if (key.kind != uint32_t(ClaimKind::kToken) && key.kind != uint32_t(ClaimKind::kReturn)) return;
    auto [it, fresh] = claims.try_emplace(key);
    Claim& c = it->second;
    c.inquirer = s;
    if (c.owner) return tell(key, Answer::kHeld);
    c.asked.insert(s);
    if (fresh) {
      c.creator = s;
      c.handover = key.kind == uint32_t(ClaimKind::kToken);
      return ask(key, false);
    }
    query_all(key, false);
    if (c.waiting.empty() || c.waiting == std::set{s}) tell(key, Answer::kNobody);
  }
  void claim(SessionId s, const ClaimKey& key, bool handover, const std::vector<ObjectId>& ids) {
    auto [it, fresh] = claims.try_emplace(key);
    it->second.objects.insert(ids.begin(), ids.end());
    it->second.bound = true;
    if (!fresh) return;
    it->second.creator = s;
    it->second.handover = handover;
    if (key.kind == uint32_t(ClaimKind::kReturn)) ask(key, false);
    else it->second.owner = s;
  }
  std::vector<ClaimKey> keys(auto&& which) const {
    std::vector<ClaimKey> out;
    for (auto& [key, c] : claims)
      if (which(c)) out.push_back(key);
    return out;
  }
  void listen(SessionId s, bool on, bool last = false) {
    if (sessions.at(s).listens == on) return;
    sessions.at(s).listens = on;
    sessions.at(s).last = last;
    if (!on)
      for (const ClaimKey& key : keys([&](auto& c) { return c.waiting.contains(s); })) no(s, key);
    if (on)
      for (const ClaimKey& key : keys([&](auto& c) { return c.restored && (!c.owner || c.owner == s) && !c.asked.contains(s); })) {
        if (key.kind == uint32_t(ClaimKind::kSelf)) continue;
        Claim& c = claims.at(key);
        c.asked.insert(s), c.waiting.insert(s), queries.emplace_back(s, key);
      }
    sweep();
  }
  void close(SessionId s) {
    listen(s, false);
    sessions.erase(s);
    for (auto it = objects.begin(); it != objects.end();) {
      auto& [id, o] = *it++;
      o.pins.erase(s);
      if (!o.sealed && o.lessee == s) erase(ObjectId(id));
    }
    for (const ClaimKey& key : keys([&](auto& c) { return c.owner == s; })) {
      Claim& c = claims.at(key);
      c.owner = 0;
      c.asked.clear();
      if (c.handover) ask(key, true);
      else end(key);
    }
    for (const ClaimKey& key : keys([&](auto& c) { return c.inquirer == s; })) {
      claims.at(key).inquirer = 0;
      if (!claims.at(key).bound) end(key);
    }
    sweep();
  }
  void adopt(SessionId s, const ClaimKey& key) {
    auto it = claims.find(key);
    if (it == claims.end()) return;
    Claim& c = it->second;
    if ((c.owner && !(c.restored && c.owner == s)) || !c.asked.contains(s)) return;
    if (c.owner != s) c.inherited = c.handover;
    c.restored = false;
    c.waiting.clear();
    c.orphan = false;
    c.owner = s;
    tell(key, Answer::kHeld);
    if (sessions.contains(c.creator)) sessions[c.creator].last_owner = s;
  }
  void disown(SessionId s, const ClaimKey& key, bool mine) {
    auto it = claims.find(key);
    if (it == claims.end() || !it->second.asked.contains(s)) return;
    if (it->second.owner == s && it->second.restored) return unclaim(s, key);
    if (it->second.owner) return;
    if (mine) end(key);
    else no(s, key);
    sweep();
  }
  void unclaim(SessionId s, const ClaimKey& key) {
    auto it = claims.find(key);
    if (it == claims.end()) return;
    Claim& c = it->second;
    const bool asked = !c.owner && c.asked.contains(s);
    if (c.owner != s && !asked) return;
    if (!c.handover || s == c.creator) {
      end(key);
    } else if (asked) {
      no(s, key);
    } else {
      c.owner = 0, c.asked = {s}, c.waiting.clear();
      if (c.inquirer) c.asked.insert(c.inquirer);
      ask(key, true);
    }
    sweep();
  }
};

// What differs from seed to seed.
struct Setting {
  uint64_t seed, arenas, capacity, disk, quota;
  bool restarts;
  explicit Setting(uint64_t seed)
      : seed(seed), arenas(1 + seed % 2), capacity((8 + seed % 25) * kPageSize), disk(seed % 3 * (5 + seed % 40) * kPageSize),
        quota(seed / 2 % 2 ? (capacity / 2 + kPageSize) / kPageSize * kPageSize : 0), restarts(seed % 5 > 1 && disk) {}
  Table::Limits limits() const { return {.capacity = capacity, .inline_budget = 4096, .quota = quota, .disk = disk}; }
};

struct Run {
  const Setting setting;
  const Table::Limits limits;
  std::mt19937_64 rng;
  Model m;
  Table t;
  std::vector<ObjectId> ids;  // ever used
  std::map<ObjectId, Table::Presence> seen;
  std::map<ObjectId, std::string> states;  // as the table reports them
  Table::Effects fx;                       // of this step
  struct Job {
    bool write;
    Table::Transfer what;
  };
  std::vector<Job> jobs;
  SessionId next_session = 1;
  uint64_t next_id = 1, restarts = 0, spilled = 0, read = 0;
  const Temporary directory;
  std::unique_ptr<Journal> journal;

  explicit Run(uint64_t seed) : setting(seed), limits(setting.limits()), rng(seed), t(limits) {
    m.capacity = limits.capacity;
    m.inline_budget = limits.inline_budget;
    m.quota = limits.quota;
    m.disk_limit = limits.disk;
    m.arena_pages.resize(setting.arenas);
    for (uint64_t a = 0; a < setting.arenas; ++a) t.add_arena();
    if (setting.restarts) begin_journal();
  }

  uint64_t pick(uint64_t n) { return rng() % n; }
  SessionId a_session() { return std::next(m.sessions.begin(), long(pick(m.sessions.size())))->first; }
  ObjectId an_id() { return ids.empty() || pick(40) == 0 ? ObjectId{1, 1 << 20} : ids[ids.size() - 1 - pick(std::min<size_t>(ids.size(), 14))]; }
  // Clients do not use an id again; the journal relies on that.
  ObjectId a_fresh_id(SessionId s) {
    ids.push_back(pick(8) || setting.restarts ? ObjectId{s, next_id++} : an_id());
    return ids.back();
  }
  ClaimKey a_key() {
    switch (pick(5)) {
      case 0: return token(pick(5));
      case 1: return self(an_id());
      case 2: return pick(20) ? token(pick(3)) : ClaimKey{};
      default: return returned(pick(limits.disk ? 25 : 7));
    }
  }
  std::vector<ObjectId> some_ids() {
    std::vector<ObjectId> out(pick(3));
    for (ObjectId& id : out) id = an_id();
    return out;
  }

  void collect() {
    auto more = t.take_effects();
    auto append = [](auto& to, auto& from) { to.insert(to.end(), from.begin(), from.end()); };
    for (auto& w : more.writes) jobs.push_back({true, w});
    for (auto& r : more.reads) jobs.push_back({false, r});
    append(fx.queries, more.queries), append(fx.answers, more.answers), append(fx.changed, more.changed), append(fx.writes, more.writes), append(fx.reads, more.reads);
    append(fx.holes, more.holes), append(fx.saved.sessions, more.saved.sessions), append(fx.saved.objects, more.saved.objects);
    append(fx.saved.claims, more.saved.claims);
    fx.freed |= more.freed;
  }
  std::string look() {
    collect();
    std::string json = t.report(true);
    states.clear();
    for (size_t at = json.find("\"object_rows\""); (at = json.find("{\"id\":\"", at)) != std::string::npos;) {
      at += 7;
      unsigned char raw[16];
      for (int i = 0; i < 16; ++i) raw[i] = (unsigned char)(std::stoi(json.substr(at + 2 * size_t(i), 2), nullptr, 16));
      ObjectId id;
      std::memcpy(&id, raw, sizeof id);
      const size_t from = json.find("\"state\":\"", at) + 9;
      states[id] = json.substr(from, json.find('"', from) - from);
    }
    return json;
  }

  // ---- making room: the table says which of several equals it took

  bool in_memory(ObjectId id) const {
    auto s = states.find(id);
    return s != states.end() && s->second != "spilled";
  }
  std::set<int> ages;  // of what was pushed out in this step
  bool push_out(const Model::Group& g) {
    int age = INT_MAX;
    auto clean = [&](const Model::Object& o) { return o.state() == Model::kClean && (!g || o.group == *g); };
    for (auto& [id, o] : m.objects)
      if (clean(o)) age = std::min(age, o.idle_since);
    if (age == INT_MAX) return false;
    ages.insert(age);
    for (auto& [id, o] : m.objects)
      if (clean(o) && o.idle_since == age && !in_memory(id)) return o.memory = false, true;
    check::fail(__FILE__, __LINE__, "none of the least recently used was pushed out");
  }
  void push_out_equals() {
    for (auto& [id, o] : m.objects)
      if (o.state() == Model::kClean && !in_memory(id)) CHECK(ages.contains(o.idle_since)), o.memory = false;
    ages.clear();
  }

  bool frees_pages(const Model::Claim& c, const Model::Group& g) {
    return c.orphan && std::any_of(c.objects.begin(), c.objects.end(), [&](ObjectId id) {
             const auto& o = m.objects.at(id);
             return o.memory && o.io == Model::kNone && o.pins.empty() && m.claims_on(id) == 1 && (!g || o.group == *g);
           });
  }
  bool was_dropped(const ClaimKey& key) {
    const auto& objects = m.claims[key].objects;
    return std::any_of(objects.begin(), objects.end(), [&](ObjectId id) { return t.presence(id) == kMissing; });
  }
  int orphan_age = -1;
  std::vector<ClaimKey> dropped_orphans(const Model::Group& g) {
    auto oldest = m.keys([&](const Model::Claim& c) { return frees_pages(c, g) && c.orphan_since == orphan_age; });
    std::erase_if(oldest, [&](auto& key) { return !was_dropped(key); });
    return oldest;
  }
  void drop_orphan(const ClaimKey& key) {
    m.end(key);
    ++m.dropped;
    m.sweep();
  }
  bool drop_oldest_orphan(const Model::Group& g) {
    const auto candidates = m.keys([&](const Model::Claim& c) { return frees_pages(c, g); });
    if (candidates.empty()) return false;
    orphan_age = INT_MAX;
    for (auto& key : candidates) orphan_age = std::min(orphan_age, m.claims[key].orphan_since);
    const auto taken = dropped_orphans(g);
    CHECK(!taken.empty());
    drop_orphan(taken.front());
    return true;
  }
  Status allocate(const std::string& group, uint64_t pages) {
    orphan_age = -1;
    auto result = [&] {
      while (m.over_quota(group, pages)) {
        if (push_out(group)) continue;
        if (m.room_is_coming(group) || !drop_oldest_orphan(group)) return Status::kQuota;
      }
      for (;;) {
        if (m.fits(pages)) return Status::kOk;
        if (push_out({})) continue;
        if (m.populated() < m.capacity || m.room_is_coming({}) || !drop_oldest_orphan({})) return Status::kFull;
      }
    }();
    // Several that one operation orphaned are of one age.
    if (orphan_age >= 0)
      for (auto taken = dropped_orphans({}); !taken.empty(); taken = dropped_orphans({})) drop_orphan(taken.front());
    push_out_equals();
    return result;
  }
  bool room_to_read(const Model::Object& o) {
    if (m.populated() - m.used() + m.idle(Model::kClean) < o.bytes()) return false;
    while (m.over_quota(o.group, o.pages))
      if (!push_out(o.group)) return false;
    while (!m.fits(o.pages))
      if (!push_out({})) return false;
    return true;
  }
  bool overlaps(uint32_t arena, uint64_t offset, uint64_t pages) const {
    return std::any_of(m.objects.begin(), m.objects.end(), [&](auto& item) {
      auto& o = item.second;
      return o.memory && o.arena == arena && offset < o.offset + o.bytes() && o.offset < offset + pages * kPageSize;
    });
  }

  // ---- spilling

  uint64_t goal(const Model::Group& g, uint64_t limit, uint64_t wanted) const {
    const uint64_t writing = m.writing(g), pressing = m.used(g) - m.idle(Model::kClean, g) - writing;
    const uint64_t over = pressing > uint64_t(double(limit) * limits.high) ? pressing - uint64_t(double(limit) * limits.low) : 0;
    return std::max(over, wanted - std::min(wanted, writing));
  }
  int oldest_dirty(const Model::Group& g) const {
    int age = INT_MAX;
    for (auto& [id, o] : m.objects)
      if (o.state() == Model::kDirty && (!g || o.group == *g)) age = std::min(age, o.idle_since);
    return age;
  }
  void take_write(const Table::Transfer& w) {
    Model::Object& o = m.objects.at(w.id);
    CHECK(w.arena == o.arena && w.offset == o.offset && w.bytes == o.bytes());
    CHECK(w.disk % kPageSize == 0 && w.disk + w.bytes <= limits.disk);
    for (auto& [id, other] : m.objects) CHECK(!other.disk || w.disk + w.bytes <= *other.disk || *other.disk + other.bytes() <= w.disk);
    o.disk = w.disk;
    o.io = Model::kWriting;
  }
  // The table may stop short of what is asked only where the disk has no room for the next.
  void check_stopped(const Model::Group& g, uint64_t left) {
    const int age = oldest_dirty(g);
    if (!left || age == INT_MAX) return;
    CHECK(t.disk_refuses());
    CHECK(std::any_of(m.objects.begin(), m.objects.end(), [&](auto& item) {
      auto& o = item.second;
      return o.state() == Model::kDirty && o.idle_since == age && (!g || o.group == *g) && !m.fits_on_disk(o.pages);
    }));
  }
  void make_room(uint64_t wanted, SessionId who) {
    t.make_room(wanted, who);
    collect();
    auto writes = fx.writes;
    if (!limits.disk || m.refuses) return CHECK(writes.empty());
    const std::string* group = m.sessions.contains(who) ? &m.sessions[who].group : nullptr;
    const bool quota_first = group && m.quota && m.used(*group) + wanted > m.quota;
    uint64_t left = goal({}, m.capacity, m.populated() < m.capacity || quota_first ? 0 : wanted);
    auto next = writes.begin();
    auto fitting = [&](const Model::Group& g) {
      const Model::Object& o = m.objects.at(next->id);
      return o.state() == Model::kDirty && o.idle_since == oldest_dirty(g) && (!g || o.group == *g);
    };
    for (; left && next != writes.end() && fitting({}); ++next) left -= std::min(left, next->bytes), take_write(*next);
    check_stopped({}, left);
    std::map<std::string, uint64_t> goals;
    if (m.quota)
      for (const char* g : {"", "a", "b"}) goals[g] = goal(g, m.quota, quota_first && *group == g ? wanted : 0);
    for (; next != writes.end(); ++next) {
      const std::string g = m.objects.at(next->id).group;
      CHECK(goals[g] > 0 && fitting(g));
      goals[g] -= std::min(goals[g], next->bytes);
      take_write(*next);
    }
    for (auto& [g, more] : goals) check_stopped(g, more);
    m.refuses = t.disk_refuses();  // with reason, as `check_stopped` saw; or for one that fitted when it was too late
    if (m.refuses) CHECK(std::any_of(m.objects.begin(), m.objects.end(), [&](auto& o) { return o.second.state() == Model::kDirty; }));
    spilled += writes.size();
  }
  void finish(size_t which, bool fails) {
    const Job job = jobs[which];
    jobs.erase(jobs.begin() + long(which));
    Model::Object& o = m.objects.at(job.what.id);
    o.io = Model::kNone;
    if (job.write) {
      t.written(job.what.id, fails ? "error" : "");
      if (fails) m.free_extent(o), m.refuses = true;
    } else {
      t.read_back(job.what.id, fails ? "error" : "");
      if (fails) o.damaged = true, o.memory = false;
      ++read;
    }
    m.sweep();
    collect();
    if (!job.write) CHECK(std::find(fx.changed.begin(), fx.changed.end(), job.what.id) != fx.changed.end());
    if (job.write && fails) CHECK(fx.freed);
  }

  // ---- restarts

  void begin_journal() {
    const uint8_t pool[16] = {1, 2, 3};
    journal = std::make_unique<Journal>(directory / "journal", pool, restarts);
    note(t.all_saved());
    journal->commit();
  }
  void note(const Table::Names& names) {
    auto each = [&](const auto& changed) {
      for (const auto& name : changed) {
        if (auto there = t.saved(name)) journal->put(*there);
        else journal->forget(name);
      }
    };
    each(names.sessions), each(names.objects), each(names.claims);
  }
  void restart() {
    const Journal::Contents log = Journal::read(directory / "journal");
    CHECK_EQ(log.generation, restarts);
    ++restarts;
    // What was told bit by bit is what there is.
    std::set<ObjectId> on_disk;
    for (auto& [id, o] : m.objects)
      if (o.on_disk() && !o.removed) on_disk.insert(id);
    CHECK_EQ(log.objects.size(), on_disk.size());
    for (const SavedObject& s : log.objects) {
      CHECK(on_disk.contains(s.id));
      const Model::Object& o = m.objects[s.id];
      CHECK(s.disk_page * kPageSize == *o.disk && s.size == o.size && s.group == o.group && s.creator == o.lessee && s.note == note_of(s.id));
    }
    CHECK_EQ(log.sessions.size(), m.sessions.size());
    for (const SavedSession& s : log.sessions) {
      CHECK(m.sessions.contains(s.id));
      CHECK(s.group == m.sessions[s.id].group && s.pid == int32_t(s.id) && s.born == 100 + s.id && s.label == "s" + std::to_string(s.id));
    }
    CHECK_EQ(log.claims.size(), m.keys([](auto& c) { return c.bound; }).size());
    for (const SavedClaim& s : log.claims) {
      CHECK(m.claims.contains(s.key));
      const Model::Claim& c = m.claims[s.key];
      CHECK(s.owner == c.owner && s.creator == c.creator && s.handover == c.handover && s.inherited == c.inherited);
      std::set<ObjectId> named(s.objects.begin(), s.objects.end());
      std::erase_if(named, [&](ObjectId id) { return !m.objects.contains(id); });
      CHECK(named == c.objects);
    }

    t = Table(limits);
    for (uint64_t a = 0; a < setting.arenas; ++a) t.extend(t.add_arena(), m.arena_pages[a] * kPageSize);
    for (auto& s : log.sessions) t.restore(s);
    for (auto& o : log.objects) t.restore(o);
    for (auto& c : log.claims) t.restore(c);
    t.restored();
    t.take_effects();
    jobs.clear();
    fx.freed = true;  // nobody waits yet
    for (auto it = m.objects.begin(); it != m.objects.end();) {
      auto& [id, o] = *it++;
      if (on_disk.contains(id) && m.claims_on(id)) {
        o.pins.clear();
        o.memory = o.damaged = false;
        o.io = Model::kNone;
        o.idle = Model::kBusy;
      } else {
        m.erase(ObjectId(id));
      }
    }
    std::erase_if(m.claims, [](auto& item) { return item.second.objects.empty(); });
    for (auto& [key, c] : m.claims) {
      c.asked.clear(), c.waiting.clear();
      c.inquirer = 0;
      c.restored = true;
      if (!c.owner) c.orphan = true, c.orphan_since = m.now;
    }
    for (auto& [s, n] : m.sessions) n.listens = n.last = false, n.last_owner = 0, n.first_counter = UINT64_MAX;
    m.second_life = true;
    m.of_this_life.clear();
    m.refuses = false;
    m.dropped = 0;
    m.holes.clear();
    seen.clear();
    for (auto& [id, o] : m.objects) seen[id] = kReadable;
    begin_journal();
  }
  static std::string note_of(ObjectId id) { return "note " + std::to_string(id.lo); }

  // ----

  void step(int i) {
    m.now = i;
    if (m.sessions.size() < 2 || (m.sessions.size() < 6 && pick(30) == 0)) {
      const SessionId s = next_session++;
      const std::string group = std::vector<std::string>{"", "a", "b"}[pick(3)];
      t.open_session(s, int32_t(s), "s" + std::to_string(s), group, 100 + s);
      m.sessions[s].group = group;
      if (m.second_life) m.of_this_life.insert(s);
      const bool last = pick(4) == 0;
      if (pick(4)) t.listen(s, true, last), m.listen(s, true, last);
      return;
    }
    const SessionId s = a_session();
    switch (pick(25)) {
      case 0:
        if (pick(4)) break;
        t.close_session(s);
        m.close(s);
        break;
      case 1: {
        const bool on = pick(3), last = pick(4) == 0;
        t.listen(s, on, last);
        m.listen(s, on, last);
        break;
      }
      case 2:
      case 3:
      case 4: {
        const ObjectId id = a_fresh_id(s);
        const uint64_t size = pick(30) ? pick(6 * kPageSize) : m.capacity + pick(2);
        const bool known = m.objects.contains(id);
        Location at;
        const Status st = t.create(s, id, size, &at, note_of(id));
        const std::string& group = m.sessions[s].group;
        const uint64_t pages = std::max<uint64_t>(1, (size + kPageSize - 1) / kPageSize);
        if (known) CHECK_EQ(st, Status::kExists);
        else if (size > m.capacity || (m.quota && pages * kPageSize > m.quota)) CHECK_EQ(st, Status::kTooLarge);
        else {
          look();
          CHECK_EQ(st, allocate(group, pages));
          if (st != Status::kOk) break;
          CHECK_EQ(at.offset % kPageSize, 0u);
          CHECK(at.arena < m.arena_pages.size() && at.offset / kPageSize + pages <= m.arena_pages[at.arena]);
          CHECK(!overlaps(at.arena, at.offset, pages));
          m.objects[id] = {.lessee = s, .group = group, .size = size, .pages = pages, .offset = at.offset, .arena = at.arena, .memory = true};
        }
        break;
      }
      case 5:
      case 6:
      case 7: {
        // Mostly a lease of its own, so that something gets sealed.
        ObjectId id = an_id();
        for (auto& [other, o] : m.objects)
          if (!o.sealed && o.lessee == s && pick(4)) id = other;
        if (pick(12) == 0) id = {};
        const ClaimKey key = a_key();
        const bool handover = key.kind == uint32_t(ClaimKind::kToken) && pick(2);
        const auto also = some_ids();
        auto readable = [&](ObjectId o) { return m.objects.contains(o) && m.objects[o].sealed && !m.objects[o].removed; };
        Status expected = Status::kOk;
        if (!key.kind || (!id && also.empty())) expected = Status::kBad;
        else if ((id && (!m.objects.contains(id) || m.objects[id].sealed || m.objects[id].lessee != s)) || !std::all_of(also.begin(), also.end(), readable))
          expected = Status::kMissing;
        CHECK_EQ(t.seal(s, id, key, handover, also), expected);
        if (expected != Status::kOk) break;
        auto all = also;
        if (id) m.objects[id].sealed = true, all.push_back(id);
        m.claim(s, key, handover, all);
        m.sweep();
        break;
      }
      case 8: {
        const ObjectId id = a_fresh_id(s);
        const std::string bytes(pick(700), 'x');
        const ClaimKey key = a_key();
        Status expected = Status::kOk;
        if (!key.kind) expected = Status::kBad;
        else if (m.objects.contains(id)) expected = Status::kExists;
        else if (m.inline_used() + bytes.size() > m.inline_budget) expected = Status::kFull;
        CHECK_EQ(t.put_inline(s, id, bytes, key, false), expected);
        if (expected != Status::kOk) break;
        m.objects[id] = {.sealed = true, .inlined = true, .lessee = s, .group = m.sessions[s].group, .size = bytes.size()};
        m.claim(s, key, false, {id});
        m.sweep();
        break;
      }
      case 9: {
        ObjectId id = an_id();
        for (auto& [other, o] : m.objects)  // often what is on the disk only, or on its way
          if ((!o.memory || o.io != Model::kNone) && !o.inlined && pick(3) == 0) id = other;
        auto o = m.objects.find(id);
        const bool there = o != m.objects.end() && o->second.sealed && !o->second.removed;
        const bool may_wait = pick(3);
        Location at;
        const Status st = t.get(s, id, &at, may_wait);
        if (!there) {
          CHECK_EQ(st, m.absent(id));
          break;
        }
        Model::Object& it = o->second;
        Status expected = Status::kOk;
        if (it.inlined) {
          expected = Status::kInline;
        } else if (!it.memory || it.io == Model::kReading) {
          look();
          if (it.damaged) expected = Status::kDamaged;
          else if (may_wait && it.io == Model::kReading) expected = Status::kWait;
          else if (may_wait && room_to_read(it)) {
            expected = Status::kWait;
            CHECK_EQ(fx.reads.size(), 1u);
            const Table::Transfer& r = fx.reads[0];
            CHECK(r.id == id && r.disk == *it.disk && r.bytes == it.bytes());
            CHECK(!overlaps(r.arena, r.offset, it.pages));
            it.memory = true, it.arena = r.arena, it.offset = r.offset;
            it.io = Model::kReading;
          } else {
            expected = Status::kOnDisk;
          }
          push_out_equals();
        }
        CHECK_EQ(st, expected);
        if (st == Status::kWait || st == Status::kDamaged) break;
        CHECK_EQ(at.size, it.size);
        if (it.inlined) break;
        CHECK_EQ(at.offset, st == Status::kOnDisk ? *it.disk : it.offset);
        ++it.pins[s];
        break;
      }
      case 10: {
        ObjectId id = an_id();
        for (auto& [other, o] : m.objects)
          if (o.pins.contains(s) && pick(2)) id = other;
        t.release(s, id);
        if (auto o = m.objects.find(id); o != m.objects.end() && o->second.pins.contains(s)) {
          if (--o->second.pins[s] == 0) o->second.pins.erase(s);
          m.sweep();
        }
        break;
      }
      case 11: {
        ObjectId id = an_id();
        for (auto& [other, o] : m.objects)  // or the disk is soon full of orphans
          if ((o.disk || !o.sealed) && pick(6) == 0) id = other;
        if (pick(2)) {
          const bool leased = m.objects.contains(id) && !m.objects[id].sealed && m.objects[id].lessee == s;
          CHECK_EQ(t.abort(s, id), leased ? Status::kOk : Status::kMissing);
          if (leased) m.erase(id);
        } else {
          t.remove(id);
          if (auto o = m.objects.find(id); o != m.objects.end() && o->second.sealed && !o->second.removed) {
            o->second.removed = true;
            m.claims.erase(self(id));
            m.sweep();
          }
        }
        break;
      }
      case 12: {
        const ClaimKey key = a_key();
        t.adopt(s, key);
        m.adopt(s, key);
        break;
      }
      case 13: {
        const ClaimKey key = a_key();
        const bool mine = pick(4) == 0;
        t.disown(s, key, mine);
        m.disown(s, key, mine);
        break;
      }
      case 14: {
        const ClaimKey key = a_key();
        t.unclaim(s, key);
        m.unclaim(s, key);
        break;
      }
      case 15: {
        const uint32_t a = uint32_t(pick(m.arena_pages.size()));
        const uint64_t n = std::min(pick(8), (m.capacity - m.populated()) / kPageSize);
        t.extend(a, n * kPageSize);
        m.arena_pages[a] += n;
        break;
      }
      case 16:
      case 17:
        make_room(pick(3) ? pick(2 * m.capacity) : 0, pick(5) ? s : 0);
        break;
      case 18:
      case 19:
      case 20:
        if (!jobs.empty()) finish(pick(jobs.size()), pick(20) == 0);
        break;
      case 21:
        t.spill_again();
        m.refuses = false;
        break;
      case 22: {
        const ClaimKey key = a_key();
        t.inquire(s, key);
        m.inquire(s, key);
        m.sweep();
        break;
      }
      case 23:
      case 24:
        if (m.second_life && m.sessions[s].first_counter == UINT64_MAX) {
          t.resume(s, next_id);
          m.sessions[s].first_counter = next_id;
        }
        break;
    }
  }

  void compare(uint64_t room_before) {
    for (auto& [id, o] : m.objects)
      if (o.state() != o.idle) o.idle = o.state(), o.idle_since = m.now;
    const std::string json = look();
    auto order = [](const Model::Query& x, const Model::Query& y) { return x.first != y.first ? x.first < y.first : x.second < y.second; };
    std::sort(fx.queries.begin(), fx.queries.end(), order);
    std::sort(m.queries.begin(), m.queries.end(), order);
    CHECK(fx.queries == m.queries);
    m.queries.clear();
    std::sort(fx.answers.begin(), fx.answers.end(), order);
    std::sort(m.answers.begin(), m.answers.end(), order);
    CHECK(fx.answers == m.answers);
    m.answers.clear();
    std::sort(fx.holes.begin(), fx.holes.end());
    std::sort(m.holes.begin(), m.holes.end());
    CHECK(fx.holes == m.holes);
    m.holes.clear();
    if (journal) note(fx.saved), journal->write();

    for (ObjectId id : ids) {
      auto o = m.objects.find(id);
      const auto expected = o == m.objects.end() || o->second.removed ? kMissing : o->second.sealed ? kReadable : kLeased;
      CHECK_EQ(t.presence(id), expected);
      auto& before = seen.try_emplace(id, kMissing).first->second;
      const bool told = std::find(fx.changed.begin(), fx.changed.end(), id) != fx.changed.end();
      CHECK(before == expected || expected == kLeased || told);  // who waits for it would never hear
      before = expected;
    }
    uint64_t leases = 0, pins = 0, readable = 0, removed = 0, orphans = 0, unanswered = 0, spilled_objects = 0;
    std::map<SessionId, bool> holds;
    CHECK_EQ(states.size(), m.objects.size());
    for (auto& [id, o] : m.objects) {
      leases += !o.sealed;
      readable += o.sealed && !o.removed;
      removed += o.removed;
      if (!o.sealed) holds[o.lessee] = true;
      for (auto& [s, n] : o.pins) pins += n, holds[s] = true;
      spilled_objects += o.disk && !o.memory;
      CHECK_EQ(states.at(id), o.removed                 ? "removed"
                              : o.inlined               ? "inline"
                              : !o.sealed               ? "leased"
                              : o.io == Model::kWriting ? "spilling"
                              : o.io == Model::kReading ? "restoring"
                              : o.memory                ? "resident"
                                                        : "spilled");
      CHECK(o.inlined || o.memory || o.disk);  // or it is nowhere
    }
    for (auto& [key, c] : m.claims) {
      orphans += c.orphan;
      unanswered += !c.waiting.empty();
      CHECK(!c.owner || m.sessions.contains(c.owner));
    }
    const uint64_t free = m.populated() - m.used(), clean = m.idle(Model::kClean);
    const std::pair<const char*, uint64_t> expected[] = {
        {"free_pages", free / kPageSize},
        {"used_bytes", m.used()},
        {"clean_bytes", clean},
        {"writing_bytes", m.writing()},
        {"disk_bytes", m.sum([](auto& o) { return bool(o.disk); })},
        {"spilled_objects", spilled_objects},
        {"spilled_bytes", m.sum([](auto& o) { return o.disk && !o.memory; })},
        {"inline_bytes", m.inline_used()},
        {"leases", leases},
        {"pins", pins},
        {"objects", readable},
        {"removed_but_pinned", removed},
        {"claims", m.claims.size()},
        {"orphans", orphans},
        {"claims_unanswered", unanswered},
        {"orphans_dropped", m.dropped},
    };
    for (auto [name, value] : expected)
      if (check::number(json, name) != value) check::fail(__FILE__, __LINE__, std::string(name) + " should be " + std::to_string(value) + " in " + json);
    for (const std::string g : {"", "a", "b"})
      if (size_t at = json.find("{\"name\":\"" + g + "\",\"resident_bytes\":"); at != std::string::npos)
        CHECK_EQ(check::number(json.substr(at), "resident_bytes"), m.used(g));
      else CHECK_EQ(m.used(g), 0u);
    CHECK_EQ(t.disk_refuses(), m.refuses);
    CHECK_EQ(t.session_count(), m.sessions.size());
    for (auto& [s, n] : m.sessions) CHECK_EQ(t.holds_anything(s), holds[s]);
    m.fits(1), m.fits_on_disk(1);                         // check that nothing overlaps
    CHECK(free + clean <= room_before || fx.freed);       // or a waiting create sleeps on
    fx = {};
  }
  uint64_t room() const { return m.populated() - m.used() + m.idle(Model::kClean); }

  void run() {
    const std::string who = "seed " + std::to_string(setting.seed);
    for (int i = 0; i < 2500; ++i) {
      check::context = who + ", step " + std::to_string(i);
      const uint64_t before = room();
      if (setting.restarts && i && pick(400) == 0) m.now = i, restart();
      else step(i);
      compare(before);
    }
    check::context = who + ", at the end";
    while (!m.sessions.empty() || !jobs.empty()) {
      const uint64_t before = room();
      ++m.now;
      if (m.sessions.empty() || (!jobs.empty() && pick(2))) {
        finish(pick(jobs.size()), pick(20) == 0);
      } else {
        const SessionId s = a_session();
        t.close_session(s);
        m.close(s);
      }
      compare(before);
    }
    for (auto& [key, c] : m.claims) CHECK(c.orphan);
    for (auto& [id, o] : m.objects) CHECK(m.claims_on(id) > 0 && o.pins.empty());
    fill();
  }
  // And orphans give way, to the disk or for good: the arenas can be had whole.
  void fill() {
    for (uint32_t a = 0; m.populated() < m.capacity; a = (a + 1) % uint32_t(m.arena_pages.size())) t.extend(a, kPageSize), ++m.arena_pages[a];
    const SessionId last[] = {next_session, next_session + 1, next_session + 2};
    for (SessionId s : last) t.open_session(s, 1, "last", "group " + std::to_string(s));
    t.spill_again();
    for (bool more = true; more;) {
      more = false;
      for (SessionId s : last) {
        Location at;
        if (t.create(s, {s, ++next_id}, kPageSize, &at) == Status::kOk) more = true;
        else t.make_room(kPageSize, s);
        collect();
        for (auto& job : std::exchange(jobs, {})) t.written(job.what.id, ""), more = true;
      }
    }
    CHECK_EQ(t.used_bytes(), m.capacity);
  }
};

int seeds = 10;
uint64_t first_seed = 1;

TEST(random_sessions_match_the_model) {
  uint64_t spilled = 0, read = 0, restarts = 0;
  for (uint64_t s = first_seed; s < first_seed + uint64_t(seeds); ++s) {
    Run r(s);
    r.run();
    spilled += r.spilled, read += r.read, restarts += r.restarts;
  }
  std::printf("seeds %llu to %llu: %llu writes, %llu reads, %llu restarts\n", (unsigned long long)first_seed, (unsigned long long)first_seed + seeds - 1,
              (unsigned long long)spilled, (unsigned long long)read, (unsigned long long)restarts);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) seeds = std::atoi(argv[1]);
  if (argc > 2) first_seed = std::strtoull(argv[2], nullptr, 10);
  return check::run();
}
