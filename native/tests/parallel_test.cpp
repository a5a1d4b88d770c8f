// parallel: every piece is done once and before it returns, whatever the threads, and a false one ends it.
#include "parallel.h"

#include <atomic>
#include <memory>

#include "check.h"

namespace {

TEST(each_piece_once) {
  for (unsigned threads : {0u, 1u, 2u, 5u})
    for (size_t pieces : {size_t{0}, size_t{1}, size_t{2}, size_t{7}, size_t{1000}}) {
      std::vector<int> times(pieces);  // plain: what a piece wrote is seen by who called
      CHECK(mcr::parallel(pieces, threads, [&](size_t i) { return ++times[i], true; }));
      for (int n : times) CHECK_EQ(n, 1);
    }
}

TEST(a_false_piece_ends_it) {
  for (unsigned threads : {1u, 4u}) {
    std::atomic<size_t> ran{0};
    CHECK(!mcr::parallel(100000, threads, [&](size_t i) {
      ++ran;
      return i != 3;
    }));
    CHECK(ran < 100000u);
  }
}

TEST(the_last_piece_may_be_the_false_one) {
  for (int k = 0; k < 200; ++k) CHECK(!mcr::parallel(9, 4, [](size_t i) { return i != 8; }));
}

TEST(a_late_helper_touches_nothing) {
  for (int k = 0; k < 500; ++k) {
    auto gone = std::make_unique<std::atomic<int>>(0);
    CHECK(mcr::parallel(2, 8, [&](size_t) { return ++*gone, true; }));
    CHECK_EQ(*gone, 2);
  }
}

TEST(several_callers) {
  std::vector<std::jthread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([] {
      for (int k = 0; k < 50; ++k) {
        std::vector<size_t> squares(64);
        CHECK(mcr::parallel(64, 3, [&](size_t i) { return squares[i] = i * i, true; }));
        for (size_t i = 0; i < 64; ++i) CHECK_EQ(squares[i], i * i);
      }
    });
}

TEST(threads_for_bytes) {
  mcr::set_cores(6);
  CHECK_EQ(mcr::threads_for(0), 1u);
  CHECK_EQ(mcr::threads_for((4 << 20) - 1), 1u);
  CHECK_EQ(mcr::threads_for(4 << 20), 2u);
  CHECK_EQ(mcr::threads_for(4 << 20, 4 << 20), 1u);
  CHECK_EQ(mcr::threads_for(size_t{1} << 40), 6u);
  mcr::set_cores(0);
  CHECK(mcr::threads_for(size_t{1} << 40) >= 1 && mcr::threads_for(size_t{1} << 40) <= 8);
}

}  // namespace

int main() { return check::run(); }
