// Requests that wait: order, deadlines, removal.
#include "pool/parking.h"

#include <climits>
#include <set>

#include "check.h"

using namespace mcr;

namespace {

Parked parked(Op op, int64_t since, int64_t deadline, std::vector<ObjectId> ids = {}) {
  Parked p;
  p.request.op = uint16_t(op);
  p.since = since;
  p.deadline = deadline;
  p.ids = std::move(ids);
  return p;
}
using Serials = std::vector<uint64_t>;

TEST(creates_keep_their_order_whoever_leaves) {
  Parking p;
  const uint64_t a = p.add(parked(Op::kCreate, 1, 9)), get = p.add(parked(Op::kGet, 1, 9)), b = p.add(parked(Op::kCreate, 2, 9)),
                 c = p.add(parked(Op::kCreate, 3, 9));
  CHECK(a && get && b && c);
  auto order = [&] { return Serials(p.creates().begin(), p.creates().end()); };
  CHECK((order() == Serials{a, b, c}));
  CHECK_EQ(p.count(Op::kCreate), 3u);
  CHECK_EQ(p.count(Op::kGet), 1u);
  CHECK_EQ(p.count(Op::kWait), 0u);
  CHECK(p.remove(b));
  CHECK(!p.remove(b));
  CHECK((order() == Serials{a, c}));
  CHECK(p.remove(get));
  CHECK((order() == Serials{a, c}));
  const uint64_t d = p.add(parked(Op::kCreate, 4, 9));
  CHECK((order() == Serials{a, c, d}));
  CHECK(d != a && d != b && d != c && d != get);  // no serial is used again
}

TEST(deadlines_and_ages) {
  Parking p;
  CHECK_EQ(p.next_deadline(), INT64_MAX);
  CHECK_EQ(p.oldest(), INT64_MAX);
  CHECK(p.expired(INT64_MAX - 1).empty());
  const uint64_t late = p.add(parked(Op::kGet, 5, 300)), soon = p.add(parked(Op::kCreate, 7, 100)), never = p.add(parked(Op::kWait, 6, INT64_MAX));
  CHECK_EQ(p.next_deadline(), 100);
  CHECK_EQ(p.oldest(), 5);
  CHECK(p.expired(99).empty());
  CHECK(p.expired(100) == Serials{soon});
  CHECK((p.expired(1000) == Serials{late, soon}));
  p.remove(soon);
  CHECK_EQ(p.next_deadline(), 300);
  p.remove(late);
  CHECK_EQ(p.next_deadline(), INT64_MAX);
  CHECK_EQ(p.oldest(), 6);
  CHECK(p.find(never) && p.find(never)->since == 6);
  CHECK(!p.find(late));
}

TEST(who_waits_for_an_object) {
  Parking p;
  const ObjectId x{1, 1}, y{1, 2}, z{2, 1};
  const uint64_t get = p.add(parked(Op::kGet, 1, 1, {x})), both = p.add(parked(Op::kWait, 1, 1, {x, y})), twice = p.add(parked(Op::kWait, 1, 1, {y, y}));
  auto waiting = [&](ObjectId id) {
    std::multiset<uint64_t> out;
    for (uint64_t s : p.waiting_for(id)) out.insert(s);
    return out;
  };
  using Set = std::multiset<uint64_t>;
  CHECK((waiting(x) == Set{get, both}));
  CHECK((waiting(y) == Set{both, twice, twice}));
  CHECK(waiting(z).empty());
  p.remove(both);
  CHECK(waiting(x) == Set{get});
  CHECK((waiting(y) == Set{twice, twice}));
  p.remove(twice);
  CHECK(waiting(y).empty());
  p.remove(get);
  CHECK(waiting(x).empty());
}

}  // namespace

int main() { return check::run(); }
