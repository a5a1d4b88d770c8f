// The broker's table: each rule of table.h but those of the disk (table_disk_test), by example.
#include <algorithm>

#include "table_support.h"

using namespace mcr;

namespace {

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
  std::vector<Answer> answers() {  // to C, since the last call
    std::vector<Answer> out;
    for (auto& [s, key] : t.take_effects().answers) CHECK_EQ(s, C), out.push_back(Answer(key.kind & ~0xffu));
    return out;
  }
  uint64_t stat(const char* name) const { return check::number(t.report(false), name); }
  bool empty() const { return t.used_bytes() == 0 && stat("free_pages") == kPages && stat("claims") == 0 && stat("orphans") == 0; }
};
using Asked = std::vector<SessionId>;
using Answers = std::vector<Answer>;

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

TEST(who_is_asked_last_is_asked_when_nobody_else_answers) {
  Fixture f;
  f.t.listen(A, true), f.t.listen(B, true), f.t.listen(C, true, true);
  const ObjectId id = f.put(A, returned(1));
  CHECK((f.asked() == Asked{A, B}));
  f.t.disown(A, returned(1), false), f.t.disown(B, returned(1), false);
  CHECK(f.asked() == Asked{C});
  CHECK_EQ(f.stat("orphans"), 0u);
  f.t.adopt(C, returned(1));
  f.put(A, returned(2));
  CHECK(f.asked() == Asked{C});  // it had the last
  f.t.unclaim(C, returned(1));
  CHECK_EQ(f.t.presence(id), kMissing);
  f.t.disown(C, returned(2), false);
  CHECK((f.asked() == Asked{A, B}));
}

TEST(an_inquiry_tells_who_has_a_claim_and_when_it_is_over) {
  for (bool owner_dies : {true, false}) {
    Fixture f;
    f.t.listen(A, true), f.t.listen(B, true), f.t.listen(C, true, true);
    f.t.inquire(C, returned(1));
    CHECK((f.asked() == Asked{A, B}));
    f.t.disown(A, returned(1), false);
    CHECK(f.answers().empty());
    f.t.adopt(B, returned(1));
    CHECK(f.answers() == Answers{Answer::kHeld});
    f.t.inquire(C, returned(2));
    CHECK(f.asked() == Asked{B});
    f.t.unclaim(B, returned(2));  // crosses the question
    CHECK(f.answers() == Answers{Answer::kEnded});
    if (owner_dies) f.t.close_session(B);
    else f.t.unclaim(B, returned(1));
    CHECK(f.answers() == Answers{Answer::kEnded});
    CHECK(f.empty());
  }
}

TEST(an_inquiry_that_nobody_answers_leaves_nothing) {
  Fixture f;
  f.t.inquire(C, returned(1));
  CHECK(f.answers() == Answers{Answer::kNobody});
  CHECK(f.empty());
  f.t.listen(A, true);
  f.t.inquire(C, returned(1));
  f.t.disown(A, returned(1), false);
  CHECK(f.answers() == Answers{Answer::kNobody});
  f.t.inquire(C, returned(1));
  f.t.disown(A, returned(1), true);
  CHECK(f.answers() == Answers{Answer::kEnded});
  f.t.inquire(C, returned(1));
  f.t.close_session(C);
  CHECK(f.answers().empty());
  CHECK(f.empty());
}

TEST(an_inquiry_about_a_claim_that_is_there_too) {
  Fixture f;
  f.t.listen(A, true), f.t.listen(C, true, true);
  f.put(B, returned(1));
  f.t.disown(A, returned(1), false);
  CHECK((f.asked() == Asked{A, C}));  // C asks elsewhere, and somebody there has C inquire
  f.t.inquire(C, returned(1));
  CHECK(f.answers() == Answers{Answer::kNobody});
  f.t.disown(C, returned(1), false);
  CHECK_EQ(f.stat("orphans"), 1u);
  f.t.inquire(C, returned(1));
  CHECK(f.answers() == Answers{Answer::kNobody});
  CHECK_EQ(f.stat("orphans"), 1u);

  f.put(B, returned(2));
  f.asked();
  f.t.adopt(A, returned(2));
  f.t.inquire(C, returned(2));
  CHECK(f.answers() == Answers{Answer::kHeld});
  f.t.unclaim(A, returned(2));
  CHECK(f.answers() == Answers{Answer::kEnded});
}

TEST(a_likely_owner_elsewhere_is_not_waited_for_by_an_inquiry) {
  Fixture f;
  f.t.listen(A, true), f.t.listen(C, true, true);
  f.put(B, returned(1));
  f.t.disown(A, returned(1), false);
  f.t.adopt(C, returned(1));
  f.asked();
  f.put(B, returned(2));
  CHECK(f.asked() == Asked{C});
  f.t.inquire(C, returned(2));
  CHECK(f.asked() == Asked{A});
  f.t.disown(A, returned(2), false);
  CHECK(f.answers() == Answers{Answer::kNobody});
  f.t.adopt(C, returned(2));  // it was somebody else's
  f.t.unclaim(C, returned(2));
  CHECK_EQ(f.stat("claims"), 1u);
}

TEST(an_inquiry_about_a_token_ends_with_the_last_that_refers_to_it) {
  Fixture f;
  f.t.listen(A, true), f.t.listen(B, true), f.t.listen(C, true, true);
  f.t.inquire(C, token(1));
  f.t.disown(A, token(1), false);
  f.t.adopt(B, token(1));
  CHECK(f.answers() == Answers{Answer::kHeld});
  f.asked();
  f.t.unclaim(B, token(1));
  CHECK(f.asked() == Asked{A});
  f.t.adopt(A, token(1));
  f.t.close_session(A);
  f.t.disown(B, token(1), false);
  const Answers all = f.answers();
  CHECK(!all.empty() && all.back() != Answer::kHeld);
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

// ---- replicas, and who watches

TEST(a_replica_that_nobody_pins_goes_when_the_room_is_needed) {
  Fixture f;
  const ObjectId id = f.lease(A, 10);
  CHECK_EQ(f.t.seal(A, id, replica(id), false, {}), Status::kOk);
  CHECK_EQ(f.get(B, id), Status::kOk);
  Location at;
  CHECK_EQ(f.t.create(C, {C, 1}, 10 * kPageSize, &at), Status::kFull);  // pinned
  f.t.release(B, id);
  CHECK_EQ(f.t.presence(id), kReadable);
  CHECK_EQ(f.t.create(C, {C, 1}, 10 * kPageSize, &at), Status::kOk);
  CHECK_EQ(f.t.presence(id), kMissing);
  CHECK_EQ(f.stat("claims"), 0u);
}

TEST(a_replica_that_is_claimed_is_not_dropped_until_that_ends) {
  Fixture f;
  const ObjectId id = f.lease(A, 10);
  CHECK_EQ(f.t.seal(A, id, replica(id), false, {}), Status::kOk);
  CHECK_EQ(f.t.seal(B, {}, token(1), false, {id}), Status::kOk);  // passed on
  Location at;
  CHECK_EQ(f.t.create(C, {C, 1}, 10 * kPageSize, &at), Status::kFull);
  f.t.unclaim(A, replica(id));  // its first home has let it go
  CHECK_EQ(f.t.presence(id), kReadable);
  CHECK_EQ(f.t.create(C, {C, 1}, 10 * kPageSize, &at), Status::kFull);
  f.t.unclaim(B, token(1));
  CHECK_EQ(f.t.presence(id), kMissing);
  CHECK(f.empty());
}

TEST(a_claim_that_ends_leaves_a_replica_that_may_go) {
  Fixture f;
  const ObjectId id = f.lease(A, 10);
  CHECK_EQ(f.t.seal(A, id, replica(id), false, {}), Status::kOk);
  CHECK_EQ(f.t.seal(B, {}, token(1), false, {id}), Status::kOk);
  f.t.unclaim(B, token(1));
  CHECK_EQ(f.t.presence(id), kReadable);
  Location at;
  CHECK_EQ(f.t.create(C, {C, 1}, 10 * kPageSize, &at), Status::kOk);
  CHECK_EQ(f.t.presence(id), kMissing);
}

TEST(replicas_end_with_the_session_that_made_them) {
  Fixture f;
  const ObjectId free = f.lease(A), pinned = f.lease(A);
  for (ObjectId id : {free, pinned}) CHECK_EQ(f.t.seal(A, id, replica(id), false, {}), Status::kOk);
  CHECK_EQ(f.get(B, pinned), Status::kOk);
  f.t.close_session(A);
  CHECK_EQ(f.t.presence(free), kMissing);
  f.t.release(B, pinned);
  CHECK(f.empty());
}

TEST(a_removed_replica_leaves_no_claim) {
  Fixture f;
  const ObjectId id = f.lease(A);
  CHECK_EQ(f.t.seal(A, id, replica(id), false, {}), Status::kOk);
  f.t.remove(id);
  CHECK(f.empty());
}

TEST(who_watches_an_object_is_told_once_when_it_ceases_to_exist) {
  Fixture f;
  const ObjectId id = f.put(A, token(1)), pinned = f.put(A, token(2));
  CHECK_EQ(f.get(C, pinned), Status::kOk);
  for (ObjectId o : {id, pinned}) f.t.watch(B, o);
  CHECK(f.t.take_effects().gone.empty());
  f.t.unclaim(A, token(1));
  f.t.remove(pinned);  // nobody can get it any more, although its reader has it
  const auto gone = f.t.take_effects().gone;
  CHECK_EQ(gone.size(), 2u);
  CHECK(gone[0] == std::pair(B, id));
  CHECK(gone[1] == std::pair(B, pinned));
  f.t.release(C, pinned);
  CHECK(f.t.take_effects().gone.empty());
  f.t.watch(B, id);  // too late
  CHECK_EQ(f.t.take_effects().gone.size(), 1u);
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

}  // namespace

int main() { return check::run(); }
