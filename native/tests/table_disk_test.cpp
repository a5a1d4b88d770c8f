// The broker's table and the disk: each rule of table.h by example.
#include <algorithm>

#include "table_support.h"

using namespace mcr;

namespace {

constexpr SessionId A = 101, B = 102, C = 103;
constexpr uint64_t kPages = 20, kHigh = 16, kLow = 13, kDiskPages = 100;  // with the default watermarks
using Ids = std::vector<ObjectId>;

Table::Limits limits(uint64_t disk_pages = kDiskPages, uint64_t quota_pages = 0, uint64_t pages = kPages) {
  return {.capacity = pages * kPageSize, .inline_budget = 64 << 10, .quota = quota_pages * kPageSize, .disk = disk_pages * kPageSize};
}

// A and B are of group "one", C of group "two".
struct Fixture {
  Table t;
  uint64_t ids = 0;
  Table::Effects fx;  // since the last `take`
  std::vector<Table::Transfer> writing, reading;  // under way, in the order in which they were asked for

  explicit Fixture(Table::Limits l = limits(), bool sessions = true) : t(l) {
    t.extend(t.add_arena(), l.capacity);
    if (!sessions) return;
    for (SessionId s : {A, B}) t.open_session(s, int32_t(s), "process", "one", 10 * s);
    t.open_session(C, int32_t(C), "process", "two", 10 * C);
    take();
  }
  void take() {
    fx = t.take_effects();
    writing.insert(writing.end(), fx.writes.begin(), fx.writes.end());
    reading.insert(reading.end(), fx.reads.begin(), fx.reads.end());
  }
  static Ids names(const std::vector<Table::Transfer>& transfers) {
    Ids out;
    for (auto& x : transfers) out.push_back(x.id);
    return out;
  }
  bool changed(ObjectId id) const { return std::find(fx.changed.begin(), fx.changed.end(), id) != fx.changed.end(); }

  Status create(SessionId s, uint64_t pages, ObjectId* id = nullptr) {
    const ObjectId fresh{s, ++ids};
    Location at;
    if (id) *id = fresh;
    return t.create(s, fresh, pages * kPageSize, &at);
  }
  ObjectId lease(SessionId s, uint64_t pages) {
    ObjectId id;
    CHECK_EQ(create(s, pages, &id), Status::kOk);
    return id;
  }
  ObjectId put(SessionId s, uint64_t pages, ClaimKey key = {}) {
    const ObjectId id = lease(s, pages);
    CHECK_EQ(t.seal(s, id, key.kind ? key : self(id), false, {}), Status::kOk);
    return id;
  }
  Ids spill(uint64_t wanted_pages = 0, SessionId who = 0) {  // what make_room chooses
    t.make_room(wanted_pages * kPageSize, who);
    take();
    return names(fx.writes);
  }
  void written(ObjectId id, const std::string& error = "") {
    auto w = std::find_if(writing.begin(), writing.end(), [&](auto& x) { return x.id == id; });
    CHECK(w != writing.end());
    writing.erase(w);
    t.written(id, error);
    take();
  }
  void all_written() {
    while (!writing.empty()) written(writing.front().id);
  }
  void read_back(ObjectId id, const std::string& error = "") {
    auto r = std::find_if(reading.begin(), reading.end(), [&](auto& x) { return x.id == id; });
    CHECK(r != reading.end());
    reading.erase(r);
    t.read_back(id, error);
    take();
  }
  Status get(SessionId s, ObjectId id, Location* where = nullptr, bool may_wait = true) {
    Location at;
    const Status st = t.get(s, id, where ? where : &at, may_wait);
    take();
    return st;
  }
  // On disk only: written, and pushed out by something that is gone again.
  ObjectId spilled(SessionId s, uint64_t pages, ClaimKey key = {}) {
    const ObjectId id = put(s, pages, key);
    CHECK(spill(kPages, s) == Ids{id});
    all_written();
    CHECK_EQ(t.abort(s, lease(s, kPages)), Status::kOk);
    CHECK_EQ(state(id), "spilled");
    take();
    return id;
  }
  std::string state(ObjectId id) const {
    const std::string rows = t.report(true);
    char hex[40];
    const auto* p = reinterpret_cast<const unsigned char*>(&id);
    for (int i = 0; i < 16; ++i) std::snprintf(hex + 2 * i, 3, "%02x", p[i]);
    const size_t at = rows.find(std::string("{\"id\":\"") + hex);
    if (at == std::string::npos) return "missing";
    const size_t from = rows.find("\"state\":\"", at) + 9;
    const bool clean = rows.compare(from, 8, "resident") == 0 && rows.compare(rows.find("\"clean\":", from), 12, "\"clean\":true") == 0;
    return rows.substr(from, rows.find('"', from) - from) + (clean ? "+clean" : "");
  }
  uint64_t stat(const char* name) const { return check::number(t.report(false), name); }
  uint64_t used() const { return t.used_bytes() / kPageSize; }
};

std::string text(const Ids& ids) {
  std::string out;
  for (ObjectId id : ids) out += std::to_string(id.hi) + "/" + std::to_string(id.lo) + " ";
  return out;
}
#define CHECK_IDS(a, ...) CHECK_EQ(text(a), text(Ids __VA_ARGS__))

void expect_in(const std::string& where, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    if (where.find(part) == std::string::npos) check::fail(__FILE__, __LINE__, std::string("no '") + part + "' in: " + where);
}

// ---- which objects, and when

TEST(spilling_begins_above_the_high_mark_and_ends_at_the_low_one) {
  Fixture f;
  Ids all;
  for (uint64_t i = 0; i < kHigh; ++i) all.push_back(f.put(A, 1));
  CHECK_IDS(f.spill(), {});
  all.push_back(f.put(A, 1));
  CHECK_IDS(f.spill(), ({all[0], all[1], all[2], all[3]}));  // 17 pages pressed, 13 will
  CHECK_IDS(f.spill(), {});                                  // what is being written counts as gone
  CHECK_EQ(f.stat("writing_bytes"), 4 * kPageSize);
  f.all_written();
  CHECK_IDS(f.spill(), {});
  CHECK_EQ(f.stat("clean_bytes"), 4 * kPageSize);
  CHECK_EQ(f.used(), 17u);  // and stays in memory
  CHECK_EQ(f.state(all[0]), "resident+clean");
  for (uint64_t i = 0; i < kHigh - kLow; ++i) all.push_back(f.put(A, 1));  // 16 pages that are not clean
  CHECK_IDS(f.spill(), {});
  ObjectId last = f.put(A, 1);
  CHECK_EQ(f.used(), 20u);  // it took the place of a clean one
  CHECK_EQ(f.spill().size(), kHigh + 1 - kLow);
  CHECK_EQ(f.state(last), "resident");
}

TEST(the_least_recently_used_go_first) {
  Fixture f;
  const ObjectId a = f.put(A, 4), b = f.put(A, 4), c = f.put(A, 4), d = f.put(A, 4);
  CHECK_EQ(f.get(B, a), Status::kOk);
  f.t.release(B, a);
  CHECK_EQ(f.get(B, c), Status::kOk);
  CHECK_IDS(f.spill(12, A), ({b, d, a}));  // c is pinned
  f.all_written();
  f.t.release(B, c);
  CHECK_EQ(f.get(B, d), Status::kOk);  // reading makes a clean one recent as well
  f.t.release(B, d);
  f.lease(A, 4);  // what is free
  CHECK_EQ(f.create(A, 4), Status::kOk);
  CHECK_EQ(f.state(b), "spilled");
  CHECK_EQ(f.state(a), "resident+clean");
  CHECK_EQ(f.state(d), "resident+clean");
  CHECK_EQ(f.create(A, 4), Status::kOk);
  CHECK_EQ(f.state(a), "spilled");
  CHECK_EQ(f.state(d), "resident+clean");
  CHECK_EQ(f.state(c), "resident");
}

TEST(pinned_leased_and_inline_objects_are_never_chosen) {
  Fixture f;
  const ObjectId leased = f.lease(A, 5), pinned = f.put(A, 5), idle = f.put(A, 5);
  CHECK_EQ(f.t.put_inline(A, {A, 1000}, std::string(5000, 'x'), token(1), false), Status::kOk);
  CHECK_EQ(f.get(B, pinned), Status::kOk);
  CHECK_IDS(f.spill(kPages, A), {idle});
  f.all_written();
  CHECK_EQ(f.create(A, 11), Status::kFull);
  CHECK_EQ(f.create(A, 10), Status::kOk);
  CHECK_EQ(f.state(idle), "spilled");
  CHECK_EQ(f.state(leased), "leased");
  CHECK_EQ(f.state({A, 1000}), "inline");
  CHECK_IDS(f.spill(kPages, A), {});
  f.t.release(B, pinned);
  CHECK_EQ(f.t.seal(A, leased, token(2), false, {}), Status::kOk);
  CHECK_IDS(f.spill(kPages, A), ({pinned, leased}));
}

TEST(a_waiting_create_has_as_much_written_as_it_needs) {
  Fixture f;
  const ObjectId a = f.put(A, 4), b = f.put(A, 4);
  f.lease(A, 12);
  CHECK_EQ(f.create(B, 5), Status::kFull);
  CHECK_IDS(f.spill(5, B), ({a, b}));
  CHECK_IDS(f.spill(5, B), {});  // is under way
  f.written(a);
  CHECK(f.fx.freed);
  CHECK_EQ(f.create(B, 5), Status::kFull);
  f.written(b);
  CHECK_EQ(f.create(B, 5), Status::kOk);
}

TEST(nothing_is_written_for_a_create_that_new_memory_will_serve) {
  Fixture f(limits());
  f.t.set_capacity(2 * kPages * kPageSize);  // half of it is populated
  f.put(A, 12);
  CHECK_EQ(f.create(A, 12), Status::kFull);
  CHECK_IDS(f.spill(12, A), {});
  f.t.stop_growing();
  CHECK_EQ(f.spill(12, A).size(), 1u);
}

TEST(a_higher_capacity_moves_the_marks_and_wakes_who_waits) {
  Fixture f;
  for (uint64_t i = 0; i <= kHigh; ++i) f.put(A, 1);
  f.take();
  f.t.set_capacity(2 * kPages * kPageSize);
  f.take();
  CHECK(f.fx.freed);
  CHECK_IDS(f.spill(), {});
  CHECK_EQ(f.create(A, kPages + 1), Status::kFull);  // no longer too large
}

TEST(clean_objects_go_only_when_their_place_is_wanted) {
  Fixture f;
  const ObjectId a = f.put(A, 4), b = f.put(A, 4);
  f.spill(8, A);
  f.all_written();
  f.lease(A, 12);
  CHECK_EQ(f.state(a), "resident+clean");
  CHECK_EQ(f.get(B, b), Status::kOk);  // pinned: must stay
  CHECK_EQ(f.create(A, 8), Status::kFull);
  CHECK_EQ(f.state(a), "spilled");
  CHECK_EQ(f.state(b), "resident+clean");
  CHECK_EQ(f.create(A, 4), Status::kOk);
}

// ---- reading

TEST(a_spilled_object_is_read_back_where_there_is_room) {
  Fixture f;
  const ObjectId id = f.spilled(A, 3);
  CHECK_EQ(f.used(), 0u);
  CHECK_EQ(f.get(B, id), Status::kWait);
  CHECK_EQ(f.reading.size(), 1u);
  CHECK_EQ(f.reading[0].bytes, 3 * kPageSize);
  CHECK_EQ(f.used(), 3u);
  CHECK_EQ(f.state(id), "restoring");
  CHECK(!f.t.holds_anything(B));
  CHECK_EQ(f.get(C, id), Status::kWait);  // another waits with it
  CHECK_EQ(f.reading.size(), 1u);
  const auto where = f.reading[0];
  f.read_back(id);
  CHECK(f.changed(id));
  Location at;
  CHECK_EQ(f.get(B, id, &at), Status::kOk);
  CHECK_EQ(at.arena, where.arena);
  CHECK_EQ(at.offset, where.offset);
  CHECK_EQ(f.stat("spill_read_bytes"), 3 * kPageSize);
  f.t.release(B, id);
  CHECK_EQ(f.state(id), "resident+clean");  // still on disk: need not be written again
  CHECK_IDS(f.spill(kPages, A), {});
}

TEST(a_get_that_may_not_wait_or_finds_no_room_is_sent_to_the_disk) {
  Fixture f;
  const ObjectId id = f.spilled(A, 3);
  Location at;
  CHECK_EQ(f.get(B, id, &at, false), Status::kOnDisk);
  CHECK_EQ(at.offset, 0u);  // in the spill file, which has nothing else
  CHECK_EQ(at.size, 3 * kPageSize);
  CHECK(f.t.holds_anything(B));
  CHECK(f.reading.empty());
  f.t.release(B, id);
  f.lease(A, kPages - 2);
  CHECK_EQ(f.get(B, id), Status::kOnDisk);
  CHECK_EQ(f.used(), kPages - 2);
  CHECK_EQ(f.stat("served_from_disk"), 2u);
  CHECK_EQ(f.stat("gets"), 2u);
}

TEST(room_for_reading_is_also_what_clean_objects_have) {
  Fixture f;
  const ObjectId id = f.spilled(A, 8), other = f.put(A, 8);
  CHECK_IDS(f.spill(kPages, A), {other});
  f.all_written();
  f.lease(A, 10);
  CHECK_EQ(f.state(other), "resident+clean");
  CHECK_EQ(f.get(B, id), Status::kWait);
  CHECK_EQ(f.state(other), "spilled");
  CHECK_EQ(f.get(B, other), Status::kOnDisk);  // what is being read is not pushed out again
  f.read_back(id);
}

TEST(a_get_of_what_is_being_read_need_not_wait_for_it) {
  Fixture f;
  const ObjectId id = f.spilled(A, 3);
  CHECK_EQ(f.get(B, id), Status::kWait);
  Location at;
  CHECK_EQ(f.get(C, id, &at, false), Status::kOnDisk);
  f.read_back(id);
  CHECK_EQ(f.state(id), "resident+clean");
  CHECK_EQ(f.create(A, kPages), Status::kFull);  // C's pin
  f.t.release(C, id);
  CHECK_EQ(f.create(A, kPages), Status::kOk);
}

TEST(a_pin_on_the_disk_keeps_the_extent) {
  Fixture f;
  const ObjectId id = f.spilled(A, 3);
  CHECK_EQ(f.get(B, id, nullptr, false), Status::kOnDisk);
  f.t.remove(id);
  f.take();
  CHECK_EQ(f.t.presence(id), kMissing);
  CHECK(f.fx.holes.empty());
  CHECK_EQ(f.stat("disk_bytes"), 3 * kPageSize);
  f.t.close_session(B);
  f.take();
  CHECK_EQ(f.fx.holes.size(), 1u);
  CHECK(f.fx.holes[0] == std::make_pair(uint64_t(0), 3 * kPageSize));
  CHECK_EQ(f.stat("disk_bytes"), 0u);
}

// ---- objects that end while they are on the way

TEST(what_ends_during_its_write_is_missing_at_once_and_freed_after) {
  for (const char* how : {"remove", "unclaim", "death"}) {
    check::context = how;
    Fixture f;
    const ObjectId id = f.put(A, 4, token(1));
    CHECK_IDS(f.spill(kPages, A), {id});
    if (*how == 'r') f.t.remove(id);
    else if (*how == 'u') f.t.unclaim(A, token(1));
    else f.t.close_session(A);
    f.take();
    CHECK(f.changed(id));
    CHECK_EQ(f.t.presence(id), kMissing);
    CHECK_EQ(f.get(B, id), Status::kMissing);
    CHECK_EQ(f.used(), 4u);
    CHECK(f.fx.holes.empty());
    Location at;
    CHECK_EQ(f.t.create(B, id, 1, &at), Status::kExists);
    f.written(id, *how == 'r' ? "error" : "");
    CHECK_EQ(f.used(), 0u);
    CHECK_EQ(f.fx.holes.size(), 1u);
    CHECK(f.fx.freed);
    CHECK_EQ(f.stat("disk_bytes") + f.stat("writing_bytes") + f.stat("clean_bytes"), 0u);
    CHECK_EQ(f.t.create(B, id, 1, &at), Status::kOk);
  }
}

TEST(what_ends_during_its_read_is_missing_at_once_and_freed_after) {
  for (bool error : {false, true}) {
    Fixture f;
    const ObjectId id = f.spilled(A, 4, token(1));
    CHECK_EQ(f.get(B, id), Status::kWait);
    f.t.unclaim(A, token(1));
    f.take();
    CHECK(f.changed(id));  // B, which waits, is told
    CHECK_EQ(f.get(B, id), Status::kMissing);
    CHECK_EQ(f.used(), 4u);
    CHECK(f.fx.holes.empty());
    f.read_back(id, error ? "error" : "");
    CHECK_EQ(f.used(), 0u);
    CHECK_EQ(f.fx.holes.size(), 1u);
    CHECK_EQ(f.stat("disk_bytes"), 0u);
  }
}

TEST(a_pin_taken_during_the_write_outlives_it) {
  Fixture f;
  const ObjectId id = f.put(A, 4);
  f.spill(kPages, A);
  CHECK_EQ(f.get(B, id), Status::kOk);
  f.written(id);
  CHECK_EQ(f.stat("clean_bytes"), 0u);
  CHECK_EQ(f.create(A, kPages), Status::kFull);
  f.take();
  f.t.release(B, id);
  f.take();
  CHECK(f.fx.freed);
  CHECK_EQ(f.create(A, kPages), Status::kOk);
}

// ---- errors

TEST(a_failed_write_leaves_the_object_in_memory_and_stops_spilling) {
  Fixture f;
  const ObjectId a = f.put(A, 4), b = f.put(A, 4);
  f.spill(8, A);
  f.written(a, "write: no space (/disk/data)");
  CHECK(f.t.disk_refuses());
  CHECK(f.fx.freed);  // orphans may go now
  CHECK_EQ(f.state(a), "resident");
  CHECK_EQ(f.fx.holes.size(), 1u);
  f.written(b);  // was under way already
  CHECK_EQ(f.state(b), "resident+clean");
  for (int i = 0; i < 12; ++i) f.put(A, 1);
  CHECK_IDS(f.spill(4, A), {});
  CHECK_EQ(f.get(B, a), Status::kOk);
  f.t.release(B, a);
  f.t.spill_again();
  CHECK(!f.t.disk_refuses());
  CHECK(f.spill(8, A).size() >= 1);
}

TEST(why_full_names_the_error_and_the_quota) {
  Fixture f(limits(kDiskPages, 10));
  const ObjectId a = f.put(A, 4);
  f.spill(8, A);
  f.written(a, "write: no space (/disk/data)");
  expect_in(f.t.why_full(4096, A), {"nothing can be spilled: write: no space (/disk/data)", "0 B on disk", "group one has 16.0 KiB of its quota of 40.0 KiB"});
  f.t.spill_again();
  f.spill(8, A);
  f.written(a);
  const std::string why = f.t.why_full(4096, C);
  expect_in(why, {"16.0 KiB on disk", "group two has 0 B of its quota"});
  CHECK(why.find("nothing can be spilled") == std::string::npos);
  f.t.open_session(104, 1, "x");
  expect_in(f.t.why_full(4096, 104), {"group without a name has 0 B"});
}

TEST(where_the_disk_refuses_orphans_go_as_if_there_were_none) {
  for (bool refuses : {false, true}) {
    Fixture f;
    const ObjectId orphan = f.put(A, 8, returned(1)), other = f.put(B, 8);
    f.take();
    if (refuses) {
      f.spill(8, A);
      f.written(orphan, "error");
    }
    CHECK_EQ(f.create(B, 8), refuses ? Status::kOk : Status::kFull);
    CHECK_EQ(f.t.presence(orphan), refuses ? kMissing : kReadable);
    CHECK_EQ(f.t.presence(other), kReadable);
    if (refuses) continue;
    CHECK_IDS(f.spill(8, B), {orphan});  // orphans are spilled like all others
    f.all_written();
    CHECK_EQ(f.create(B, 8), Status::kOk);
    CHECK_EQ(f.t.presence(orphan), kReadable);
  }
}

TEST(an_orphan_is_not_dropped_while_it_is_written) {
  Fixture f;
  const ObjectId first = f.put(A, 8, returned(1)), second = f.put(A, 8, returned(2));
  f.spill(16, A);
  f.written(first, "error");
  CHECK_EQ(f.create(B, 12), Status::kFull);  // the second one's write is under way: room may come of it
  CHECK_EQ(f.t.presence(first), kReadable);
  f.written(second, "error");
  CHECK_EQ(f.create(B, 12), Status::kOk);
  CHECK_EQ(f.t.presence(first), kMissing);
}

TEST(what_the_disk_does_not_give_back_is_damaged_for_ever) {
  Fixture f;
  const ObjectId id = f.spilled(A, 4, token(1));
  CHECK_EQ(f.get(B, id), Status::kWait);
  f.read_back(id, "read: I/O error");
  CHECK(f.changed(id));
  CHECK(f.fx.freed);
  CHECK_EQ(f.used(), 0u);
  for (bool may_wait : {true, false}) CHECK_EQ(f.get(B, id, nullptr, may_wait), Status::kDamaged);
  CHECK(f.reading.empty());
  CHECK(!f.t.holds_anything(B));
  f.t.unclaim(A, token(1));
  CHECK_EQ(f.get(B, id), Status::kMissing);
  CHECK_EQ(f.stat("disk_bytes"), 0u);
}

TEST(the_spill_file_has_a_limit) {
  Fixture f(limits(10));
  const ObjectId a = f.put(A, 6), b = f.put(A, 4), c = f.put(A, 4);
  CHECK_IDS(f.spill(kPages, A), ({a, b}));
  CHECK(f.t.disk_refuses());
  expect_in(f.t.why_full(4096, A), {"the spill file has reached its limit of 40960 bytes"});
  f.all_written();
  f.lease(A, 6);
  f.lease(A, 10);
  CHECK_EQ(f.create(A, 1), Status::kFull);
  CHECK_EQ(f.state(c), "resident");
  f.t.remove(a);
  f.t.spill_again();
  CHECK_IDS(f.spill(4, A), {c});  // in the place that was freed
  CHECK_EQ(f.writing[0].disk, 0u);
}

TEST(the_last_bytes_of_the_spill_file_are_used) {
  // It grows by 64 MiB: the rest of the last step and what is left up to the limit are one extent.
  constexpr uint64_t kMiB = 256;  // pages
  Fixture f(limits(100 * kMiB, 0, 200 * kMiB));
  const ObjectId a = f.put(A, 24 * kMiB), b = f.put(A, 76 * kMiB);
  CHECK_IDS(f.spill(100 * kMiB, A), ({a, b}));
  CHECK(!f.t.disk_refuses());
}

TEST(so_much_is_written_at_a_time) {
  constexpr uint64_t kMiB = 256;
  Fixture f(limits(4000 * kMiB, 0, 1000 * kMiB));
  Ids all;
  for (int i = 0; i < 10; ++i) all.push_back(f.put(A, 100 * kMiB));
  CHECK_IDS(f.spill(1000 * kMiB, A), ({all[0], all[1], all[2]}));  // the first that goes beyond 256 MiB is the last
  f.written(all[0]);
  CHECK_IDS(f.spill(1000 * kMiB, A), {all[3]});
}

TEST(without_a_disk_nothing_is_spilled) {
  Fixture f(limits(0));
  for (uint64_t i = 0; i < kPages; ++i) f.put(A, 1);
  CHECK_IDS(f.spill(5, A), {});
  CHECK_EQ(f.create(A, 1), Status::kFull);
  CHECK(f.t.why_full(1, A).find("disk") == std::string::npos);
}

// ---- quotas

TEST(a_quota_binds_its_own_group_only) {
  Fixture f(limits(kDiskPages, 10));
  f.lease(A, 6);
  CHECK_EQ(f.create(B, 5), Status::kQuota);  // the same group
  CHECK_EQ(f.create(B, 4), Status::kOk);
  CHECK_EQ(f.create(A, 1), Status::kQuota);
  CHECK_EQ(f.create(C, 10), Status::kOk);
  CHECK_EQ(f.create(C, 11), Status::kTooLarge);
  CHECK_EQ(f.create(A, 11), Status::kTooLarge);
}

TEST(room_in_the_quota_is_made_of_the_groups_own_objects) {
  Fixture f(limits(kDiskPages, 10));
  const ObjectId other = f.put(C, 4), one = f.put(A, 6), two = f.put(B, 2);
  CHECK_EQ(f.create(A, 5), Status::kQuota);
  CHECK_IDS(f.spill(5, A), {one});  // the other group's is older
  f.all_written();
  CHECK_EQ(f.create(A, 5), Status::kOk);
  CHECK_EQ(f.state(one), "spilled");
  CHECK_EQ(f.state(other), "resident");
  CHECK_EQ(f.state(two), "resident");
}

TEST(clean_objects_of_others_do_not_go_for_a_quota) {
  Fixture f(limits(kDiskPages, 10));
  const ObjectId other = f.put(C, 6);
  CHECK_IDS(f.spill(kPages, C), {other});
  f.all_written();
  f.lease(A, 8);
  CHECK_EQ(f.create(A, 4), Status::kQuota);
  CHECK_EQ(f.state(other), "resident+clean");
  f.lease(A, 2);
  CHECK_EQ(f.create(C, 6), Status::kOk);  // within its quota once its own clean one has gone
  CHECK_EQ(f.state(other), "spilled");
}

TEST(a_quota_has_watermarks_of_its_own) {
  Fixture f(limits(kDiskPages, 10));
  Ids all;
  for (int i = 0; i < 9; ++i) all.push_back(f.put(A, 1));
  CHECK_IDS(f.spill(), ({all[0], all[1], all[2]}));  // 9 of 10: above 8, down to 6.5
}

TEST(reading_back_respects_the_quota) {
  Fixture f(limits(kDiskPages, 10));
  const ObjectId id = f.put(A, 6);
  f.spill(6, A);
  f.all_written();
  f.lease(A, 8);
  CHECK_EQ(f.state(id), "spilled");
  CHECK_EQ(f.get(C, id), Status::kOnDisk);  // whoever reads: it counts for the group that put it
  CHECK_EQ(f.used(), 8u);
}

TEST(orphans_of_a_group_give_way_to_its_quota_where_no_disk_helps) {
  Fixture f(limits(0, 10));
  const ObjectId mine = f.put(A, 5, returned(1)), others = f.put(C, 5, returned(2));
  f.put(A, 5);
  CHECK_EQ(f.create(A, 5), Status::kOk);
  CHECK_EQ(f.t.presence(mine), kMissing);
  CHECK_EQ(f.t.presence(others), kReadable);
  CHECK_EQ(f.create(A, 1), Status::kQuota);
}

TEST(a_group_is_forgotten_with_its_last_session_and_object) {
  Fixture f(limits(kDiskPages, 10));
  f.t.open_session(200, 1, "x", "three");
  const uint32_t three = f.t.group(200);
  f.put(200, 1, returned(1));
  f.t.close_session(200);
  f.t.open_session(201, 1, "x", "four");
  CHECK(f.t.group(201) != three);  // an orphan is left in it
  f.t.open_session(202, 1, "x", "three");
  CHECK_EQ(f.t.group(202), three);
  f.t.close_session(201);
  f.t.open_session(203, 1, "x", "five");
  CHECK(f.t.report(false).find("\"name\":\"four\"") == std::string::npos);
}

// ---- places

TEST(a_place_is_preferred_not_required) {
  Table t(limits(0));
  const uint32_t other = t.add_arena(0), near = t.add_arena(1);
  t.extend(other, 10 * kPageSize), t.extend(near, 10 * kPageSize);
  t.open_session(A, 1, "a");
  Location at;
  CHECK_EQ(t.create(A, {A, 1}, 6 * kPageSize, &at, {}, 1), Status::kOk);
  CHECK_EQ(at.arena, near);
  CHECK_EQ(t.create(A, {A, 2}, 6 * kPageSize, &at, {}, 1), Status::kOk);
  CHECK_EQ(at.arena, other);
  CHECK_EQ(t.create(A, {A, 3}, 4 * kPageSize, &at, {}, 7), Status::kOk);  // nobody's place
  CHECK_EQ(at.arena, other);
  CHECK_EQ(t.used_bytes(0), 10 * kPageSize);
  CHECK_EQ(t.used_bytes(1), 6 * kPageSize);
  CHECK_EQ(t.used_bytes(2), 0u);
}

TEST(notes_are_bounded_and_reported) {
  Fixture f;
  Location at;
  CHECK_EQ(f.t.create(A, {A, 1}, 1, &at, std::string(kNoteMax + 1, 'n')), Status::kBad);
  CHECK_EQ(f.t.create(A, {A, 1}, 1, &at, "train.py:12"), Status::kOk);
  expect_in(f.t.report(true), {"\"note\":\"train.py:12\"", "\"group\":\"one\"", "\"creator_pid\":101"});
}

// ---- another life

// A table, and what a later one is told of it.
struct Lives {
  Fixture first, second;
  Lives(Table::Limits l = limits()) : first(l), second(l, false) {}
  void restart() {
    const auto names = first.t.all_saved();
    for (SessionId s : names.sessions) second.t.restore(*first.t.saved(s));
    for (ObjectId id : names.objects)
      if (auto o = first.t.saved(id)) second.t.restore(*o);
    for (const ClaimKey& key : names.claims) second.t.restore(*first.t.saved(key));
    second.t.restored();
    second.take();
  }
};

TEST(what_was_on_disk_comes_back_with_its_claims) {
  Lives l;
  const ObjectId kept = l.first.spilled(A, 3, token(1)), clean = l.first.put(A, 2, token(2));
  CHECK_IDS(l.first.spill(kPages, A), {clean});
  l.first.all_written();
  const ObjectId memory = l.first.put(A, 1, token(3));
  CHECK_EQ(l.first.t.put_inline(A, {A, 77}, "x", token(4), false), Status::kOk);
  l.restart();
  Fixture& f = l.second;
  CHECK_EQ(f.t.presence(kept), kReadable);
  CHECK_EQ(f.state(kept), "spilled");
  CHECK_EQ(f.state(clean), "spilled");
  CHECK_EQ(f.t.presence(memory), kMissing);
  CHECK_EQ(f.stat("disk_bytes"), 5 * kPageSize);
  CHECK_EQ(f.stat("claims"), 2u);
  CHECK_EQ(f.t.session_count(), 3u);
  CHECK_EQ(f.get(B, kept), Status::kWait);
  CHECK_EQ(f.reading[0].disk, 0u);
  f.read_back(kept);
  CHECK_EQ(f.get(B, kept), Status::kOk);
  f.t.release(B, kept);
  f.t.unclaim(B, token(1));  // not B's
  CHECK_EQ(f.t.presence(kept), kReadable);
  f.t.unclaim(A, token(1));
  f.take();
  CHECK_EQ(f.t.presence(kept), kMissing);
  CHECK_EQ(f.fx.holes.size(), 1u);
  f.t.close_session(A);
  CHECK(f.t.is_empty());
  CHECK_EQ(f.stat("disk_bytes"), 0u);
}

TEST(lost_is_what_was_of_a_dead_broker_and_missing_what_never_was) {
  Lives l;
  const ObjectId kept = l.first.spilled(A, 1, token(1)), lost = l.first.put(A, 1), freed = l.first.put(B, 1);
  l.first.t.remove(freed);
  CHECK_EQ(l.first.get(A, freed), Status::kMissing);
  CHECK_EQ(l.first.get(A, {999, 1}), Status::kMissing);
  l.restart();
  Fixture& f = l.second;
  CHECK_EQ(f.get(A, lost), Status::kLost);
  CHECK_EQ(f.get(A, freed), Status::kLost);      // it cannot know better
  CHECK_EQ(f.get(A, {999, 1}), Status::kLost);   // of a session that is gone
  CHECK_EQ(f.get(A, {A, 1000}), Status::kLost);  // A has not said how far it had come
  f.t.resume(A, 500);
  CHECK_EQ(f.get(A, {A, 1000}), Status::kMissing);
  CHECK_EQ(f.get(A, {A, 499}), Status::kLost);
  f.t.open_session(104, 1, "new");
  CHECK_EQ(f.get(A, {104, 1}), Status::kMissing);
  f.t.close_session(104);
  CHECK_EQ(f.get(A, {104, 1}), Status::kMissing);
  f.t.close_session(A);
  CHECK_EQ(f.get(B, {A, 1000}), Status::kLost);
  CHECK_EQ(f.get(B, kept), Status::kLost);
}

TEST(a_removed_object_does_not_come_back) {
  Lives l;
  const ObjectId id = l.first.spilled(A, 1, token(1));
  CHECK_EQ(l.first.get(B, id, nullptr, false), Status::kOnDisk);
  l.first.t.all_saved();  // from here on, changes are told
  l.first.t.remove(id);
  l.first.take();
  const Ids& told = l.first.fx.saved.objects;
  CHECK(std::find(told.begin(), told.end(), id) != told.end());
  CHECK(!l.first.t.saved(id));
  l.restart();
  CHECK(l.second.t.is_empty());
  CHECK_EQ(l.second.stat("claims"), 0u);
}

TEST(an_object_that_ends_while_it_is_read_is_told_at_once) {
  Fixture f;
  const ObjectId id = f.spilled(A, 1, token(1));
  f.t.all_saved();
  CHECK_EQ(f.get(B, id), Status::kWait);
  f.t.unclaim(A, token(1));
  f.take();
  CHECK_IDS(f.fx.saved.objects, {id});
}

TEST(what_nobody_claims_and_what_shares_its_place_is_dropped) {
  Fixture f(limits(), false);
  f.t.restore(SavedSession{A, 1, 10, "a", "one"});
  const SavedObject fine{{A, 1}, A, 2 * kPageSize, 4, "one", ""}, unclaimed{{A, 2}, A, 2 * kPageSize, 10, "one", ""},
      overlapped{{A, 3}, A, 5 * kPageSize, 20, "one", ""}, overlapping{{A, 4}, A, kPageSize, 22, "one", ""}, after{{A, 5}, A, 1, 25, "one", ""};
  for (const SavedObject& o : {after, overlapping, unclaimed, overlapped, fine}) f.t.restore(o);
  uint64_t n = 0;
  for (const SavedObject& o : {fine, overlapped, overlapping, after}) f.t.restore(SavedClaim{token(++n), A, A, false, false, {o.id}});
  f.t.restore(SavedClaim{token(9), A, A, false, false, {{A, 99}}});
  f.t.restored();
  f.take();
  CHECK_EQ(f.t.presence(fine.id), kReadable);
  CHECK_EQ(f.t.presence(after.id), kReadable);
  for (const SavedObject& o : {unclaimed, overlapped, overlapping}) CHECK_EQ(f.t.presence(o.id), kMissing);
  CHECK_EQ(f.stat("claims"), 2u);  // and no claim is left that names nothing
  CHECK_EQ(f.stat("disk_bytes"), 3 * kPageSize);
  // What lies between is free, and has been told as such: 0-3, 6-24.
  std::vector<bool> hole(26);
  for (auto [offset, bytes] : f.fx.holes)
    for (uint64_t p = offset / kPageSize; p < (offset + bytes) / kPageSize; ++p) hole.at(p) = true;
  for (uint64_t p = 0; p < 26; ++p) CHECK_EQ(hole[p], !(p == 4 || p == 5 || p == 25));
  f.ids = 100;
  const ObjectId big = f.put(A, 19);
  CHECK_IDS(f.spill(19, A), {big});
  CHECK_EQ(f.writing[0].disk, 6 * kPageSize);
}

TEST(a_claim_whose_owner_is_gone_is_an_orphan_that_anybody_may_take) {
  Fixture f(limits(), false);
  f.t.restore(SavedSession{A, 1, 10, "a", ""});
  f.t.restore(SavedSession{B, 1, 10, "b", ""});
  const ObjectId owned{A, 1}, orphan{C, 1};
  f.t.restore(SavedObject{owned, A, 1, 0, "", ""});
  f.t.restore(SavedObject{orphan, C, 1, 1, "", ""});
  f.t.restore(SavedClaim{returned(1), A, C, false, false, {owned}});
  f.t.restore(SavedClaim{returned(2), C, C, false, false, {orphan}});
  f.t.restored();
  CHECK_EQ(f.stat("orphans"), 1u);
  f.t.listen(B, true);
  f.take();
  CHECK_EQ(f.fx.queries.size(), 1u);  // about the orphan only: the other has an owner, who is asked when it listens
  CHECK(f.fx.queries[0] == std::make_pair(B, returned(2)));
  f.t.listen(A, true);
  f.take();
  CHECK_EQ(f.fx.queries.size(), 2u);
  f.t.adopt(A, returned(1));
  f.t.disown(B, returned(2), false);
  CHECK_EQ(f.stat("orphans"), 1u);
  f.t.adopt(A, returned(2));
  CHECK_EQ(f.stat("orphans"), 0u);
  CHECK_EQ(f.stat("claims_unanswered"), 0u);
  f.t.disown(A, returned(1), true);  // too late to take back: it has adopted
  CHECK_EQ(f.t.presence(owned), kReadable);
  f.t.unclaim(A, returned(1));
  CHECK_EQ(f.t.presence(owned), kMissing);
  f.t.close_session(A);
  CHECK(f.t.is_empty());
}

// The owner may have told the dead broker that the key is gone, and that one have died of it.
TEST(owners_are_asked_whether_restored_claims_still_hold) {
  for (const char* answer : {"adopt", "disown", "mine", "unclaim", "silence"}) {
    check::context = answer;
    Lives l;
    const ObjectId id = l.first.spilled(A, 1, token(1));
    l.restart();
    Fixture& f = l.second;
    f.t.listen(A, true);
    f.take();
    CHECK_EQ(f.fx.queries.size(), 1u);
    CHECK(f.fx.queries[0] == std::make_pair(A, token(1)));
    const std::string a = answer;
    if (a == "adopt") f.t.adopt(A, token(1));
    if (a == "disown") f.t.disown(A, token(1), false);
    if (a == "mine") f.t.disown(A, token(1), true);
    if (a == "unclaim") f.t.unclaim(A, token(1));
    const bool stays = a == "adopt" || a == "silence";
    CHECK_EQ(f.t.presence(id), stays ? kReadable : kMissing);
    f.t.listen(A, false);
    CHECK_EQ(f.t.presence(id), stays ? kReadable : kMissing);
    f.t.close_session(A);
    CHECK(f.t.is_empty());
    CHECK_EQ(f.stat("claims"), 0u);
  }
}

TEST(self_claims_are_not_asked_about) {
  Lives l;
  const ObjectId id = l.first.spilled(A, 1);
  l.restart();
  Fixture& f = l.second;
  for (SessionId s : {A, B}) f.t.listen(s, true);
  f.take();
  CHECK(f.fx.queries.empty());
  f.t.remove(id);
  CHECK(f.t.is_empty());
  CHECK_EQ(f.stat("claims"), 0u);
}

TEST(a_restored_handover_waits_for_heirs_that_are_not_back_yet) {
  Fixture f(limits(), false);
  f.t.restore(SavedSession{A, 1, 10, "a", ""});
  f.t.restore(SavedSession{B, 1, 10, "b", ""});
  const ObjectId id{A, 1};
  f.t.restore(SavedObject{id, A, 1, 0, "", ""});
  f.t.restore(SavedClaim{token(1), A, C, true, true, {id}});  // inherited by A from C
  f.t.restored();
  f.t.close_session(A);  // it died with the broker
  CHECK_EQ(f.t.presence(id), kReadable);
  CHECK_EQ(f.stat("orphans"), 1u);
  f.t.listen(B, true);
  f.take();
  CHECK_EQ(f.fx.queries.size(), 1u);
  f.t.adopt(B, token(1));
  CHECK_EQ(f.stat("orphans"), 0u);
  f.t.unclaim(B, token(1));  // as in the first life: the last heir ends it
  CHECK(f.t.is_empty());
}

TEST(a_third_life_knows_what_the_second_one_had) {
  Lives l;
  const ObjectId id = l.first.spilled(A, 2, token(1));
  l.restart();
  l.second.t.resume(A, 100);
  l.second.t.close_session(C);
  const ObjectId late = l.second.put(B, 2, token(2));
  CHECK_IDS(l.second.spill(kPages, B), {late});
  l.second.all_written();
  CHECK(l.second.fx.saved.objects.empty());  // nobody has asked yet
  Fixture third(limits(), false);
  const auto names = l.second.t.all_saved();
  CHECK_EQ(names.sessions.size(), 2u);
  for (SessionId s : names.sessions) third.t.restore(*l.second.t.saved(s));
  for (ObjectId o : names.objects) third.t.restore(*l.second.t.saved(o));
  for (const ClaimKey& key : names.claims) third.t.restore(*l.second.t.saved(key));
  third.t.restored();
  CHECK_EQ(third.get(B, id, nullptr, false), Status::kOnDisk);
  CHECK_EQ(third.get(B, late, nullptr, false), Status::kOnDisk);
  CHECK_EQ(third.get(B, {A, 200}), Status::kLost);  // until A has resumed here as well
  third.t.resume(A, 150);
  CHECK_EQ(third.get(B, {A, 200}), Status::kMissing);
}

TEST(groups_come_back_with_sessions_and_objects) {
  Lives l(limits(kDiskPages, 10));
  l.first.put(A, 4);
  l.first.spill(10, A);
  l.first.all_written();
  l.restart();
  Fixture& f = l.second;
  CHECK_EQ(f.t.group(A), f.t.group(B));
  CHECK(f.t.group(A) != f.t.group(C));
  CHECK_EQ(f.create(B, 10), Status::kOk);
  CHECK_EQ(f.create(A, 1), Status::kQuota);
  CHECK_EQ(f.create(C, 10), Status::kOk);
}

TEST(what_is_got_in_order_is_read_ahead) {
  Table::Limits l = limits(200, 0, 100);
  l.read_ahead = 4 * kPageSize;
  Fixture f(l);
  Ids ids;
  for (int i = 0; i < 150; ++i) {
    ids.push_back(f.put(A, 1));
    f.spill();
    f.all_written();
  }
  auto ask = [&](int i) {
    Location at;
    const Status st = f.t.get(A, ids[size_t(i)], &at);
    f.take();
    return st;
  };
  CHECK_EQ(ask(2), Status::kWait);  // out of the blue: alone
  CHECK_EQ(f.reading.size(), 1u);
  f.read_back(ids[2]);
  CHECK_EQ(ask(2), Status::kOk);
  CHECK_EQ(ask(3), Status::kWait);  // the next one: four more
  CHECK(Fixture::names(f.reading) == (Ids{ids[3], ids[4], ids[5], ids[6], ids[7]}));
  while (!f.reading.empty()) f.read_back(f.reading.front().id);
  CHECK_EQ(ask(4), Status::kOk);  // and one more for each that is got
  CHECK(Fixture::names(f.reading) == Ids{ids[8]});
  f.t.remove(ids[8]);  // the others go on
  f.take();
  f.read_back(ids[8]);
  CHECK_EQ(ask(5), Status::kOk);
  CHECK_EQ(f.reading.size(), 2u);
  Location at;
  CHECK_EQ(f.t.get(A, ids[6], &at, false), Status::kOk);  // not while creates wait
  f.take();
  CHECK_EQ(f.reading.size(), 2u);
}

}  // namespace

int main() { return check::run(); }
