// The broker's table: each rule of table.h by example, and random operations of random sessions against a model written for clarity.
// Usage: table_test [SEEDS [FIRST_SEED]]
#include "pool/table.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "check.h"

using namespace mcr;

namespace mcr {
std::ostream& operator<<(std::ostream& o, Status s) { return o << "status " << int(s); }
std::ostream& operator<<(std::ostream& o, Table::Presence p) { return o << "presence " << int(p); }
bool operator<(const ClaimKey& a, const ClaimKey& b) {
  return a.kind != b.kind ? a.kind < b.kind : std::memcmp(a.bytes, b.bytes, sizeof a.bytes) < 0;
}
}  // namespace mcr

namespace {

constexpr auto kMissing = Table::Presence::kMissing, kLeased = Table::Presence::kLeased, kReadable = Table::Presence::kReadable;

ClaimKey key_of(ClaimKind kind, uint64_t n) {
  ClaimKey k;
  k.kind = uint32_t(kind);
  std::memcpy(k.bytes, &n, sizeof n);
  return k;
}
ClaimKey token(uint64_t n) { return key_of(ClaimKind::kToken, n); }
ClaimKey returned(uint64_t n) { return key_of(ClaimKind::kReturn, n); }
ClaimKey self(ObjectId id) {
  ClaimKey k;
  k.kind = uint32_t(ClaimKind::kSelf);
  std::memcpy(k.bytes, &id, sizeof id);
  return k;
}

// ---- by example

constexpr SessionId A = 101, B = 102, C = 103, D = 104;
constexpr uint64_t kPages = 16;

struct Fixture {
  Table t{{.capacity = kPages * kPageSize, .inline_budget = 64 << 10}};
  uint64_t ids = 0;

  Fixture() {
    t.extend(t.add_arena(), kPages * kPageSize);
    for (SessionId s : {A, B, C}) t.open_session(s, int32_t(s), "process");
    t.take_effects();
  }
  ObjectId lease(SessionId s, uint64_t pages = 1) {
    const ObjectId id{s, ++ids};
    Location at;
    CHECK_EQ(t.create(s, id, pages * kPageSize, &at), Status::kOk);
    return id;
  }
  ObjectId put(SessionId s, const ClaimKey& key, bool handover = false, uint64_t pages = 1) {
    const ObjectId id = lease(s, pages);
    CHECK_EQ(t.seal(s, id, key, handover, {}), Status::kOk);
    return id;
  }
  Status get(SessionId s, ObjectId id) {
    Location at;
    return t.get(s, id, &at);
  }
  std::vector<SessionId> asked() {  // since the last call, in order of their ids
    std::vector<SessionId> out;
    for (auto& [s, key] : t.take_effects().queries) out.push_back(s);
    std::sort(out.begin(), out.end());
    return out;
  }
  uint64_t stat(const char* name) const { return check::number(t.report(false), name); }
  bool empty() const { return t.used_bytes() == 0 && stat("free_pages") == kPages && stat("claims") == 0 && stat("orphans") == 0; }
};
using Asked = std::vector<SessionId>;

TEST(an_object_goes_when_it_is_sealed_unpinned_and_unclaimed) {
  for (bool unpin_first : {true, false}) {
    Fixture f;
    const ObjectId id = f.lease(A);
    CHECK_EQ(f.t.presence(id), kLeased);
    CHECK_EQ(f.get(B, id), Status::kMissing);  // not before its seal
    CHECK_EQ(f.t.seal(A, id, token(1), false, {}), Status::kOk);
    CHECK_EQ(f.get(B, id), Status::kOk);
    CHECK_EQ(f.get(B, id), Status::kOk);
    if (unpin_first) {
      f.t.release(B, id), f.t.release(B, id);
      CHECK_EQ(f.t.presence(id), kReadable);
      f.t.unclaim(A, token(1));
    } else {
      f.t.unclaim(A, token(1));
      f.t.release(B, id);
      CHECK_EQ(f.t.presence(id), kReadable);
      f.t.release(B, id);
    }
    CHECK_EQ(f.t.presence(id), kMissing);
    CHECK(f.empty());
  }
}

TEST(every_claim_of_several_keeps_the_object) {
  Fixture f;
  const ObjectId id = f.put(A, token(1)), other = f.put(A, token(2));
  CHECK_EQ(f.t.seal(B, {}, token(3), false, {id, other}), Status::kOk);
  f.t.unclaim(A, token(1));
  f.t.unclaim(A, token(2));
  CHECK_EQ(f.t.presence(id), kReadable);
  CHECK_EQ(f.t.presence(other), kReadable);
  f.t.unclaim(B, token(3));
  CHECK(f.empty());
}

TEST(only_its_lessee_seals_or_aborts_and_only_its_owner_unclaims) {
  Fixture f;
  const ObjectId id = f.lease(A);
  CHECK_EQ(f.t.seal(B, id, token(1), false, {}), Status::kMissing);
  CHECK_EQ(f.t.abort(B, id), Status::kMissing);
  f.t.remove(id);  // unsealed: its lessee may be writing
  CHECK_EQ(f.t.presence(id), kLeased);
  CHECK_EQ(f.t.seal(A, id, token(1), false, {}), Status::kOk);
  CHECK_EQ(f.t.seal(A, id, token(1), false, {}), Status::kMissing);
  CHECK_EQ(f.t.abort(A, id), Status::kMissing);
  f.t.unclaim(B, token(1));
  f.t.adopt(B, token(1));
  f.t.disown(B, token(1), true);
  f.t.release(B, id);
  CHECK_EQ(f.t.presence(id), kReadable);
  CHECK_EQ(f.stat("pins"), 0u);
  f.t.close_session(A);
  CHECK(f.empty());
}

TEST(a_seal_with_a_missing_companion_changes_nothing) {
  Fixture f;
  const ObjectId id = f.lease(A), there = f.put(B, token(9));
  CHECK_EQ(f.t.seal(A, id, token(1), false, {there, ObjectId{7, 7}}), Status::kMissing);
  CHECK_EQ(f.t.seal(A, id, token(1), false, {id}), Status::kMissing);  // itself is not readable yet
  CHECK_EQ(f.t.seal(A, id, ClaimKey{}, false, {}), Status::kBad);
  CHECK_EQ(f.t.seal(A, {}, token(1), false, {}), Status::kBad);
  CHECK_EQ(f.t.presence(id), kLeased);
  CHECK_EQ(f.stat("claims"), 1u);
  CHECK_EQ(f.t.seal(A, id, token(1), false, {there, there}), Status::kOk);
  f.t.unclaim(B, token(9));
  CHECK_EQ(f.t.presence(there), kReadable);
  f.t.unclaim(A, token(1));
  CHECK(f.empty());
}

TEST(leases_pins_and_claims_end_with_their_session) {
  Fixture f;
  f.lease(A, 2);
  const ObjectId mine = f.put(A, token(1)), kept = f.put(B, token(2));
  CHECK_EQ(f.get(A, kept), Status::kOk);
  CHECK_EQ(f.get(A, kept), Status::kOk);
  CHECK(f.t.holds_anything(A));
  f.t.close_session(A);
  CHECK_EQ(f.t.presence(mine), kMissing);
  CHECK_EQ(f.t.presence(kept), kReadable);
  CHECK_EQ(f.stat("pins"), 0u);
  CHECK_EQ(f.t.counters().reaped_leases, 1u);
  CHECK_EQ(f.t.counters().reaped_pins, 2u);
  f.t.unclaim(B, token(2));
  CHECK(f.empty());
}

TEST(a_pin_outlives_the_session_that_put_the_object) {
  Fixture f;
  const ObjectId id = f.put(A, token(1));
  CHECK_EQ(f.get(B, id), Status::kOk);
  f.t.close_session(A);
  CHECK_EQ(f.t.presence(id), kReadable);
  f.t.release(B, id);
  CHECK(f.empty());
}

TEST(a_removed_object_is_missing_at_once_and_its_pages_return_with_the_last_pin) {
  Fixture f;
  const ObjectId id = f.put(A, token(1));
  CHECK_EQ(f.get(B, id), Status::kOk);
  f.t.remove(id);
  CHECK_EQ(f.t.presence(id), kMissing);
  CHECK_EQ(f.get(C, id), Status::kMissing);
  CHECK_EQ(f.t.used_bytes(), kPageSize);
  Location at;
  CHECK_EQ(f.t.create(A, id, 1, &at), Status::kExists);
  f.t.release(B, id);
  CHECK_EQ(f.t.used_bytes(), 0u);
  CHECK_EQ(f.stat("claims"), 1u);  // the token lives; it claims nothing that is left
  f.t.unclaim(A, token(1));
  CHECK(f.empty());
}

TEST(a_claim_on_a_removed_object_does_not_touch_a_new_one_of_its_id) {
  Fixture f;
  const ObjectId id = f.put(A, token(1));
  f.t.remove(id);
  Location at;
  CHECK_EQ(f.t.create(A, id, kPageSize, &at), Status::kOk);
  f.t.unclaim(A, token(1));
  CHECK_EQ(f.t.seal(A, id, token(2), false, {}), Status::kOk);
  CHECK_EQ(f.t.presence(id), kReadable);
  f.t.unclaim(A, token(2));
  CHECK(f.empty());
}

TEST(whoever_frees_an_object_ends_its_self_claim) {
  Fixture f;
  const ObjectId id{A, 1};
  Location at;
  CHECK_EQ(f.t.create(A, id, 1, &at), Status::kOk);
  CHECK_EQ(f.t.seal(A, id, self(id), false, {}), Status::kOk);
  f.t.remove(id);  // a consumer frees what the producer put
  CHECK(f.empty());
}

TEST(a_return_value_outlives_its_maker_and_ends_with_its_owner) {
  for (bool owner_dies : {true, false}) {
    Fixture f;
    f.t.listen(B, true);
    const ObjectId id = f.put(A, returned(1));
    CHECK(f.asked() == Asked{B});
    f.t.adopt(B, returned(1));
    f.t.close_session(A);
    CHECK_EQ(f.t.presence(id), kReadable);
    if (owner_dies) f.t.close_session(B);
    else f.t.unclaim(B, returned(1));
    CHECK(f.empty());
  }
}

TEST(the_owner_of_the_last_return_is_asked_first_and_then_the_rest) {
  Fixture f;
  for (SessionId s : {A, B, C}) f.t.listen(s, true);
  f.put(A, returned(1));
  CHECK((f.asked() == Asked{A, B, C}));
  f.t.adopt(C, returned(1));
  const ObjectId id = f.put(A, returned(2));
  CHECK(f.asked() == Asked{C});
  f.t.disown(C, returned(2), false);
  CHECK((f.asked() == Asked{A, B}));
  f.t.disown(A, returned(2), false);
  CHECK(f.asked().empty());
  f.t.adopt(B, returned(2));
  f.put(A, returned(3));
  CHECK(f.asked() == Asked{B});
  f.t.listen(B, false);  // no answer is an answer
  CHECK((f.asked() == Asked{A, C}));
  f.put(B, returned(4));  // another maker: nothing known
  CHECK((f.asked() == Asked{A, C}));
  CHECK_EQ(f.t.presence(id), kReadable);
}

TEST(an_owner_may_see_its_return_go_before_it_answers) {
  Fixture f;
  f.t.listen(B, true);
  f.put(A, returned(1));
  f.t.unclaim(C, returned(1));  // was not asked
  CHECK_EQ(f.stat("claims"), 1u);
  f.t.unclaim(B, returned(1));
  CHECK(f.empty());
  f.t.adopt(B, returned(1));  // crosses on the way: must not revive anything
  CHECK(f.empty());
}

TEST(the_owner_says_a_return_is_gone) {
  Fixture f;
  f.t.listen(B, true), f.t.listen(C, true);
  f.put(A, returned(1));
  f.t.disown(B, returned(1), true);
  CHECK(f.empty());
  CHECK_EQ(f.stat("claims_unanswered"), 0u);
  f.t.disown(C, returned(1), false);
  CHECK(f.empty());
}

TEST(a_retried_task_claims_again_without_a_question) {
  Fixture f;
  f.t.listen(B, true);
  const ObjectId one = f.put(A, returned(1));
  f.t.adopt(B, returned(1));
  f.asked();
  const ObjectId two = f.put(C, returned(1));
  CHECK(f.asked().empty());
  f.t.close_session(C);
  CHECK_EQ(f.t.presence(one), kReadable);
  CHECK_EQ(f.t.presence(two), kReadable);
  f.t.unclaim(B, returned(1));
  CHECK(f.empty());
}

TEST(an_orphan_stays_while_there_is_room_and_goes_oldest_first) {
  Fixture f;
  const ObjectId old = f.put(A, returned(1), false, 4), young = f.put(A, returned(2), false, 4);
  f.t.close_session(A);
  CHECK_EQ(f.stat("orphans"), 2u);
  f.put(B, token(1), false, 8);
  CHECK_EQ(f.t.presence(old), kReadable);
  f.put(B, token(2), false, 3);
  CHECK_EQ(f.t.presence(old), kMissing);
  CHECK_EQ(f.t.presence(young), kReadable);
  CHECK_EQ(f.t.counters().orphans_dropped, 1u);
  Location at;  // the token's objects are not the pool's to drop
  CHECK_EQ(f.t.create(B, {B, 99}, 8 * kPageSize, &at), Status::kFull);
  CHECK_EQ(f.stat("orphans"), 0u);
}

TEST(an_orphan_whose_end_would_free_no_page_stays) {
  Fixture f;
  CHECK_EQ(f.t.put_inline(A, {A, 77}, "small", returned(4), false), Status::kOk);
  const ObjectId pinned = f.put(A, returned(1), false, 4), shared = f.put(A, returned(2), false, 4), loose = f.put(A, returned(3), false, 4);
  CHECK_EQ(f.get(B, pinned), Status::kOk);
  CHECK_EQ(f.t.seal(B, {}, token(1), false, {shared}), Status::kOk);
  f.t.close_session(A);
  f.put(C, token(2), false, 8);
  CHECK_EQ(f.t.presence(loose), kMissing);
  CHECK_EQ(f.t.presence(pinned), kReadable);
  CHECK_EQ(f.t.presence(shared), kReadable);
  CHECK_EQ(f.t.presence({A, 77}), kReadable);
  CHECK_EQ(f.t.counters().orphans_dropped, 1u);
}

TEST(no_orphan_goes_while_the_arena_can_still_grow) {
  Table t({.capacity = 8 * kPageSize, .inline_budget = 0});
  const uint32_t arena = t.add_arena();
  t.extend(arena, 4 * kPageSize);
  t.open_session(A, 1, "a");
  Location at;
  CHECK_EQ(t.create(A, {A, 1}, 4 * kPageSize, &at), Status::kOk);
  CHECK_EQ(t.seal(A, {A, 1}, returned(1), false, {}), Status::kOk);
  CHECK_EQ(t.create(A, {A, 2}, 4 * kPageSize, &at), Status::kFull);
  CHECK_EQ(t.presence({A, 1}), kReadable);
  t.extend(arena, 4 * kPageSize);
  CHECK_EQ(t.create(A, {A, 2}, 4 * kPageSize, &at), Status::kOk);
  CHECK_EQ(t.presence({A, 1}), kReadable);
  CHECK_EQ(t.create(A, {A, 3}, 4 * kPageSize, &at), Status::kOk);
  CHECK_EQ(t.presence({A, 1}), kMissing);
}

TEST(orphans_go_where_the_machine_gives_no_more_memory) {
  Table t({.capacity = 8 * kPageSize, .inline_budget = 0});
  t.extend(t.add_arena(), 4 * kPageSize);
  t.open_session(A, 1, "a");
  Location at;
  CHECK_EQ(t.create(A, {A, 1}, 4 * kPageSize, &at), Status::kOk);
  CHECK_EQ(t.seal(A, {A, 1}, returned(1), false, {}), Status::kOk);
  t.take_effects();
  t.stop_growing();
  CHECK(t.take_effects().freed);  // waiting creates have another go
  CHECK_EQ(t.create(A, {A, 2}, 4 * kPageSize, &at), Status::kOk);
  CHECK_EQ(t.presence({A, 1}), kMissing);
}

TEST(an_orphan_can_still_be_adopted_by_whom_was_asked) {
  Fixture f;
  f.t.listen(B, true);
  f.put(A, returned(1));
  f.t.disown(B, returned(1), false);
  CHECK_EQ(f.stat("orphans"), 1u);
  f.t.adopt(B, returned(1));
  CHECK_EQ(f.stat("orphans"), 0u);
  f.t.close_session(B);
  CHECK(f.empty());
}

TEST(without_handover_a_token_ends_with_its_process) {
  Fixture f;
  f.t.listen(B, true);
  f.put(A, token(1), false);
  f.t.close_session(A);
  CHECK(f.asked().empty());
  CHECK(f.empty());
}

TEST(handover_asks_the_survivors_and_ends_with_the_last_heir) {
  Fixture f;
  f.t.listen(B, true), f.t.listen(C, true);
  const ObjectId id = f.put(A, token(1), true);
  CHECK(f.asked().empty());
  f.t.close_session(A);
  CHECK((f.asked() == Asked{B, C}));
  f.t.adopt(B, token(1));
  f.t.unclaim(B, token(1));  // B is done with it; C may refer to it still
  CHECK(f.asked() == Asked{C});
  CHECK_EQ(f.t.presence(id), kReadable);
  f.t.adopt(C, token(1));
  f.t.close_session(C);  // its heirs: B again
  CHECK(f.asked() == Asked{B});
  f.t.disown(B, token(1), false);
  CHECK(f.empty());
}

TEST(a_token_with_handover_that_its_maker_ends_is_gone) {
  Fixture f;
  f.t.listen(B, true);
  f.put(A, token(1), true);
  f.t.unclaim(A, token(1));
  CHECK(f.asked().empty());
  CHECK(f.empty());
}

TEST(a_handover_nobody_takes_is_an_orphan) {
  Fixture f;
  f.t.listen(B, true);
  const ObjectId id = f.put(A, token(1), true);
  f.t.close_session(A);
  f.t.disown(B, token(1), false);
  CHECK_EQ(f.stat("orphans"), 1u);
  // B had a reference after all, and dropped it: nobody else to ask. The claim must be listed once, or dropping it leaves half behind.
  f.t.unclaim(B, token(1));
  CHECK_EQ(f.stat("orphans"), 1u);
  f.put(B, token(2), false, kPages);
  CHECK_EQ(f.t.presence(id), kMissing);
  CHECK_EQ(f.stat("orphans"), 0u);
  Location at;
  CHECK_EQ(f.t.create(B, {B, 99}, 1, &at), Status::kFull);
}

TEST(an_heir_that_lets_go_before_it_answers_leaves_the_others_their_say) {
  Fixture f;
  f.t.listen(B, true), f.t.listen(C, true);
  const ObjectId id = f.put(A, token(1), true);
  f.t.close_session(A);
  f.t.unclaim(B, token(1));
  f.t.adopt(C, token(1));
  CHECK_EQ(f.stat("claims_unanswered"), 0u);
  CHECK_EQ(f.t.presence(id), kReadable);
  f.t.close_session(C);
  f.t.disown(B, token(1), false);
  CHECK(f.empty());
}

TEST(an_asked_session_that_dies_has_answered) {
  Fixture f;
  f.t.listen(B, true);
  f.put(A, returned(1));
  f.t.close_session(B);
  CHECK_EQ(f.stat("claims_unanswered"), 0u);
  CHECK_EQ(f.stat("orphans"), 1u);
}

TEST(who_listens_later_is_not_asked_about_what_is_settled) {
  Fixture f;
  f.put(A, returned(1));
  f.t.listen(B, true);
  CHECK(f.asked().empty());
  f.t.adopt(B, returned(1));  // never asked
  CHECK_EQ(f.stat("orphans"), 1u);
}

TEST(inline_objects_live_by_the_same_rules) {
  Fixture f;
  CHECK_EQ(f.t.put_inline(A, {A, 1}, "bytes", token(1), false), Status::kOk);
  CHECK_EQ(f.t.put_inline(A, {A, 1}, "bytes", token(1), false), Status::kExists);
  CHECK_EQ(f.t.put_inline(A, {A, 2}, std::string(kInlineMax + 1, 'x'), token(1), false), Status::kBad);
  Location at;
  CHECK_EQ(f.t.get(B, {A, 1}, &at), Status::kInline);
  CHECK(at.inlined && *at.inlined == "bytes");
  CHECK_EQ(f.stat("pins"), 0u);
  CHECK(!f.t.holds_anything(B));
  uint64_t n = 2;
  while (f.t.put_inline(B, {B, n}, std::string(kInlineMax, 'x'), token(n), false) == Status::kOk) ++n;
  CHECK_EQ(f.stat("inline_bytes"), 7 * kInlineMax + 5);  // eight would exceed the budget
  f.t.close_session(B);
  CHECK_EQ(f.t.put_inline(A, {A, 3}, std::string(kInlineMax, 'x'), token(3), false), Status::kOk);
  f.t.close_session(A);
  CHECK_EQ(f.stat("inline_bytes"), 0u);
  CHECK(f.empty());
}

TEST(sizes_at_the_edge) {
  Fixture f;
  Location at;
  CHECK_EQ(f.t.create(A, {}, 1, &at), Status::kBad);
  CHECK_EQ(f.t.create(D, {D, 1}, 1, &at), Status::kBad);  // no such session
  CHECK_EQ(f.t.create(A, {A, 1}, kPages * kPageSize + 1, &at), Status::kTooLarge);
  CHECK_EQ(f.t.create(A, {A, 1}, UINT64_MAX, &at), Status::kTooLarge);
  CHECK_EQ(f.t.create(A, {A, 1}, 0, &at), Status::kOk);  // has a page of its own
  CHECK_EQ(f.t.used_bytes(), kPageSize);
  CHECK_EQ(f.t.create(A, {A, 2}, kPageSize + 1, &at), Status::kOk);
  CHECK_EQ(f.t.used_bytes(), 3 * kPageSize);
  CHECK_EQ(at.offset % kPageSize, 0u);
}

TEST(why_full_says_who_holds_what) {
  Fixture f;
  f.t.open_session(D, 4711, "trainer");
  f.put(D, token(1), false, 10);
  f.lease(D, 2);
  CHECK_EQ(f.get(D, f.put(A, returned(1), false, 3)), Status::kOk);
  const std::string why = f.t.why_full(5 * kPageSize, A);
  for (const char* part : {"need 20.0 KiB", "capacity 64.0 KiB", "used 60.0 KiB", "free 4.0 KiB (largest extent 4.0 KiB)",
                           "trainer (pid 4711) owns 48.0 KiB and reads 12.0 KiB", "returns nobody answers for yet owns 12.0 KiB"})
    if (why.find(part) == std::string::npos) check::fail(__FILE__, __LINE__, std::string("no '") + part + "' in: " + why);
}

TEST(a_label_cannot_break_the_statistics) {
  Fixture f;
  f.t.open_session(D, 1, "a\"b\\c\nd\xff");
  CHECK(f.t.report(false).find("\"label\":\"a\\\"b\\\\c?d?\"") != std::string::npos);
}

// ---- random operations against a model

struct Model {
  struct Object {
    bool sealed = false, removed = false, inlined = false;
    SessionId lessee = 0;
    uint64_t size = 0, pages = 0, offset = 0;
    uint32_t arena = 0;
    std::map<SessionId, uint64_t> pins = {};
  };
  struct Claim {
    std::set<ObjectId> objects;
    SessionId owner = 0, creator = 0;
    bool handover = false, inherited = false, orphan = false;
    int orphan_since = 0;
    std::set<SessionId> asked, waiting;
  };
  struct Session {
    bool listens = false;
    SessionId last_owner = 0;
  };
  std::map<ObjectId, Object> objects;
  std::map<ClaimKey, Claim> claims;
  std::map<SessionId, Session> sessions;
  std::vector<uint64_t> arena_pages;
  uint64_t capacity = 0, inline_budget = 0, dropped = 0;
  int now = 0;

  using Query = std::pair<SessionId, ClaimKey>;
  std::vector<Query> queries;

  uint64_t claims_on(ObjectId id) const {
    return uint64_t(std::count_if(claims.begin(), claims.end(), [&](auto& c) { return c.second.objects.contains(id); }));
  }
  uint64_t inline_used() const {
    uint64_t n = 0;
    for (auto& [id, o] : objects) n += o.inlined ? o.size : 0;
    return n;
  }
  uint64_t used_pages() const {
    uint64_t n = 0;
    for (auto& [id, o] : objects) n += o.pages;
    return n;
  }
  uint64_t populated() const {
    uint64_t n = 0;
    for (uint64_t p : arena_pages) n += p * kPageSize;
    return n;
  }
  bool fits(uint64_t pages) const {
    for (uint32_t a = 0; a < arena_pages.size(); ++a) {
      std::map<uint64_t, uint64_t> used;
      for (auto& [id, o] : objects)
        if (!o.inlined && o.arena == a) used[o.offset / kPageSize] = o.pages;
      uint64_t at = 0, gap = 0;
      for (auto [first, n] : used) gap = std::max(gap, first - at), at = first + n;
      if (std::max(gap, arena_pages[a] - at) >= pages) return true;
    }
    return false;
  }

  void erase(ObjectId id) {
    objects.erase(id);
    for (auto& [key, c] : claims) c.objects.erase(id);
  }
  void sweep() {
    for (auto it = objects.begin(); it != objects.end();) {
      const auto& [id, o] = *it++;
      if (o.sealed && o.pins.empty() && (o.removed || !claims_on(id))) erase(ObjectId(id));
    }
  }
  void ask(const ClaimKey& key, bool everyone) {
    Claim& c = claims.at(key);
    std::set<SessionId> whom;
    for (auto& [s, n] : sessions)
      if (n.listens && !c.asked.contains(s)) whom.insert(s);
    if (!everyone && sessions.contains(c.creator) && whom.contains(sessions[c.creator].last_owner)) whom = {sessions[c.creator].last_owner};
    for (SessionId s : whom) c.asked.insert(s), c.waiting.insert(s), queries.emplace_back(s, key);
    if (!whom.empty()) return;
    if (c.inherited) claims.erase(key);
    else c.orphan = true, c.orphan_since = now;
  }
  void no(SessionId s, const ClaimKey& key) {
    Claim& c = claims.at(key);
    if (c.waiting.erase(s) && c.waiting.empty()) ask(key, true);
  }
  void claim(SessionId s, const ClaimKey& key, bool handover, const std::vector<ObjectId>& ids) {
    auto [it, fresh] = claims.try_emplace(key);
    it->second.objects.insert(ids.begin(), ids.end());
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
  void listen(SessionId s, bool on) {
    sessions.at(s).listens = on;
    if (!on)
      for (const ClaimKey& key : keys([&](auto& c) { return c.waiting.contains(s); })) no(s, key);
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
      else claims.erase(key);
    }
    sweep();
  }
  void adopt(SessionId s, const ClaimKey& key) {
    auto it = claims.find(key);
    if (it == claims.end() || it->second.owner || !it->second.asked.contains(s)) return;
    Claim& c = it->second;
    c.inherited = c.handover;
    c.waiting.clear();
    c.orphan = false;
    c.owner = s;
    if (sessions.contains(c.creator)) sessions[c.creator].last_owner = s;
  }
  void disown(SessionId s, const ClaimKey& key, bool mine) {
    auto it = claims.find(key);
    if (it == claims.end() || it->second.owner || !it->second.asked.contains(s)) return;
    if (mine) claims.erase(it);
    else no(s, key);
    sweep();
  }
  void unclaim(SessionId s, const ClaimKey& key) {
    auto it = claims.find(key);
    if (it == claims.end()) return;
    Claim& c = it->second;
    const bool asked = !c.owner && c.asked.contains(s);
    if (c.owner != s && !asked) return;
    if (!c.handover || s == c.creator) claims.erase(it);
    else if (asked) no(s, key);
    else c.owner = 0, c.asked = {s}, ask(key, true);
    sweep();
  }
};

struct Run {
  std::mt19937_64 rng;
  Model m;
  Table t;
  std::vector<ObjectId> ids;  // ever used
  std::map<ObjectId, Table::Presence> seen;
  SessionId next_session = 1;
  uint64_t next_id = 1;

  explicit Run(uint64_t seed) : rng(seed), t({.capacity = (capacity(seed)), .inline_budget = 4096}) {
    m.capacity = capacity(seed);
    m.inline_budget = 4096;
    for (uint64_t a = 0; a < 1 + seed % 2; ++a) t.add_arena(), m.arena_pages.push_back(0);
  }
  static uint64_t capacity(uint64_t seed) { return (8 + seed % 25) * kPageSize; }

  uint64_t pick(uint64_t n) { return rng() % n; }
  SessionId a_session() { return std::next(m.sessions.begin(), long(pick(m.sessions.size())))->first; }
  ObjectId an_id() { return ids.empty() || pick(40) == 0 ? ObjectId{1, 1 << 20} : ids[ids.size() - 1 - pick(std::min<size_t>(ids.size(), 14))]; }
  ObjectId a_fresh_id(SessionId s) {
    ids.push_back(pick(8) ? ObjectId{s, next_id++} : an_id());
    return ids.back();
  }
  ClaimKey a_key() {
    switch (pick(5)) {
      case 0: return token(pick(5));
      case 1: return self(an_id());
      case 2: return pick(20) ? token(pick(3)) : ClaimKey{};
      default: return returned(pick(7));
    }
  }
  std::vector<ObjectId> some_ids() {
    std::vector<ObjectId> out(pick(3));
    for (ObjectId& id : out) id = an_id();
    return out;
  }

  bool frees_pages(const Model::Claim& c) {
    return c.orphan && std::any_of(c.objects.begin(), c.objects.end(), [&](ObjectId id) {
             const auto& o = m.objects.at(id);
             return !o.inlined && o.pins.empty() && m.claims_on(id) == 1;
           });
  }
  bool was_dropped(const ClaimKey& key) {
    const auto& objects = m.claims[key].objects;
    return std::any_of(objects.begin(), objects.end(), [&](ObjectId id) { return t.presence(id) == kMissing; });
  }
  void drop_orphan(const ClaimKey& key) {
    m.claims.erase(key);
    ++m.dropped;
    m.sweep();
  }
  // Orphans go oldest first. Several that one operation orphaned are of one age: the table says which of them it took, and in what order.
  bool make_room(uint64_t pages) {
    int age = -1;
    auto next = [&] {
      auto oldest = m.keys([&](const Model::Claim& c) { return frees_pages(c) && (age < 0 || c.orphan_since == age); });
      std::erase_if(oldest, [&](auto& key) { return !was_dropped(key); });
      return oldest;
    };
    while (!m.fits(pages)) {
      if (m.populated() < m.capacity) return false;
      const auto candidates = m.keys([&](const Model::Claim& c) { return frees_pages(c); });
      if (candidates.empty()) return false;
      age = INT32_MAX;
      for (auto& key : candidates) age = std::min(age, m.claims[key].orphan_since);
      const auto taken = next();
      CHECK(!taken.empty());
      drop_orphan(taken.front());
    }
    if (age >= 0)
      for (auto taken = next(); !taken.empty(); taken = next()) drop_orphan(taken.front());
    return true;
  }

  void step(int i) {
    m.now = i;
    if (m.sessions.size() < 2 || (m.sessions.size() < 6 && pick(30) == 0)) {
      const SessionId s = next_session++;
      t.open_session(s, 1, "s");
      m.sessions[s] = {};
      if (pick(4)) t.listen(s, true), m.listen(s, true);
      return;
    }
    const SessionId s = a_session();
    switch (pick(16)) {
      case 0:
        if (pick(4)) break;
        t.close_session(s);
        m.close(s);
        break;
      case 1: {
        const bool on = pick(3);
        t.listen(s, on);
        m.listen(s, on);
        break;
      }
      case 2:
      case 3:
      case 4: {
        const ObjectId id = a_fresh_id(s);
        const uint64_t size = pick(30) ? pick(6 * kPageSize) : m.capacity + pick(2);
        const bool known = m.objects.contains(id);
        Location at;
        const Status st = t.create(s, id, size, &at);
        if (known) CHECK_EQ(st, Status::kExists);
        else if (size > m.capacity) CHECK_EQ(st, Status::kTooLarge);
        else {
          const uint64_t pages = std::max<uint64_t>(1, (size + kPageSize - 1) / kPageSize);
          CHECK_EQ(st, make_room(pages) ? Status::kOk : Status::kFull);
          if (st != Status::kOk) break;
          CHECK_EQ(at.offset % kPageSize, 0u);
          CHECK(at.arena < m.arena_pages.size() && at.offset / kPageSize + pages <= m.arena_pages[at.arena]);
          for (auto& [other, o] : m.objects)
            CHECK(o.inlined || o.arena != at.arena || at.offset + pages * kPageSize <= o.offset || o.offset + o.pages * kPageSize <= at.offset);
          m.objects[id] = {.lessee = s, .size = size, .pages = pages, .offset = at.offset, .arena = at.arena};
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
        m.objects[id] = {.sealed = true, .inlined = true, .lessee = s, .size = bytes.size()};
        m.claim(s, key, false, {id});
        m.sweep();
        break;
      }
      case 9: {
        const ObjectId id = an_id();
        auto o = m.objects.find(id);
        const bool there = o != m.objects.end() && o->second.sealed && !o->second.removed;
        Location at;
        CHECK_EQ(t.get(s, id, &at), !there ? Status::kMissing : o->second.inlined ? Status::kInline : Status::kOk);
        if (!there) break;
        CHECK_EQ(at.size, o->second.size);
        if (o->second.inlined) break;
        CHECK_EQ(at.offset, o->second.offset);
        ++o->second.pins[s];
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
        const ObjectId id = an_id();
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
    }
  }

  void compare(uint64_t free_before) {
    auto effects = t.take_effects();
    auto order = [](const Model::Query& x, const Model::Query& y) { return x.first != y.first ? x.first < y.first : x.second < y.second; };
    std::sort(effects.queries.begin(), effects.queries.end(), order);
    std::sort(m.queries.begin(), m.queries.end(), order);
    CHECK(effects.queries == m.queries);
    m.queries.clear();

    for (ObjectId id : ids) {
      auto o = m.objects.find(id);
      const auto expected = o == m.objects.end() || o->second.removed ? kMissing : o->second.sealed ? kReadable : kLeased;
      CHECK_EQ(t.presence(id), expected);
      auto& before = seen.try_emplace(id, kMissing).first->second;
      const bool told = std::find(effects.changed.begin(), effects.changed.end(), id) != effects.changed.end();
      CHECK(before == expected || expected == kLeased || told);  // who waits for it would never hear
      before = expected;
    }
    uint64_t leases = 0, pins = 0, readable = 0, removed = 0, orphans = 0, unanswered = 0;
    std::map<SessionId, bool> holds;
    for (auto& [id, o] : m.objects) {
      leases += !o.sealed;
      readable += o.sealed && !o.removed;
      removed += o.removed;
      if (!o.sealed) holds[o.lessee] = true;
      for (auto& [s, n] : o.pins) pins += n, holds[s] = true;
    }
    for (auto& [key, c] : m.claims) {
      orphans += c.orphan;
      unanswered += !c.waiting.empty();
      CHECK(!c.owner || m.sessions.contains(c.owner));
    }
    const std::string json = t.report(false);
    const uint64_t free_pages = m.populated() / kPageSize - m.used_pages();
    CHECK_EQ(t.used_bytes(), m.used_pages() * kPageSize);
    CHECK_EQ(check::number(json, "free_pages"), free_pages);
    CHECK_EQ(check::number(json, "inline_bytes"), m.inline_used());
    CHECK_EQ(check::number(json, "leases"), leases);
    CHECK_EQ(check::number(json, "pins"), pins);
    CHECK_EQ(check::number(json, "objects"), readable);
    CHECK_EQ(check::number(json, "removed_but_pinned"), removed);
    CHECK_EQ(check::number(json, "claims"), m.claims.size());
    CHECK_EQ(check::number(json, "orphans"), orphans);
    CHECK_EQ(check::number(json, "claims_unanswered"), unanswered);
    CHECK_EQ(t.counters().orphans_dropped, m.dropped);
    CHECK_EQ(t.session_count(), m.sessions.size());
    for (auto& [s, n] : m.sessions) CHECK_EQ(t.holds_anything(s), holds[s]);
    CHECK(free_pages <= free_before || effects.freed);  // or a waiting create sleeps on
  }

  void run(uint64_t seed) {
    for (int i = 0; i < 3000; ++i) {
      check::context = "seed " + std::to_string(seed) + ", step " + std::to_string(i);
      const uint64_t before = m.populated() / kPageSize - m.used_pages();
      step(i);
      compare(before);
    }
    check::context = "seed " + std::to_string(seed) + ", at the end";
    while (!m.sessions.empty()) {
      const uint64_t before = m.populated() / kPageSize - m.used_pages();
      const SessionId s = a_session();
      t.close_session(s);
      m.close(s);
      compare(before);
    }
    for (auto& [key, c] : m.claims) CHECK(c.orphan);
    for (auto& [id, o] : m.objects) CHECK(m.claims_on(id) > 0 && o.pins.empty());
    // And orphans give way: the arenas can be had whole.
    for (uint32_t a = 0; a < m.arena_pages.size() && m.populated() < m.capacity; a = (a + 1) % uint32_t(m.arena_pages.size()))
      t.extend(a, kPageSize), ++m.arena_pages[a];
    t.open_session(A, 1, "last");
    uint64_t n = 0;
    Location at;
    while (t.create(A, {A, ++n}, kPageSize, &at) == Status::kOk) {}
    CHECK_EQ(t.used_bytes(), m.capacity);
  }
};

int seeds = 10;
uint64_t first_seed = 1;

TEST(random_sessions_match_the_model) {
  for (uint64_t s = first_seed; s < first_seed + uint64_t(seeds); ++s) Run(s).run(s);
  std::printf("seeds %llu to %llu\n", (unsigned long long)first_seed, (unsigned long long)first_seed + seeds - 1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) seeds = std::atoi(argv[1]);
  if (argc > 2) first_seed = std::strtoull(argv[2], nullptr, 10);
  return check::run();
}
