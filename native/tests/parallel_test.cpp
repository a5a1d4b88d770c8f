// parallel: every piece is done once and before it returns, whatever the threads, and a false one ends it.
#include "columns/parallel.h"

#include <atomic>
#include <memory>

#include "check.h"

namespace {

constexpr size_t kMany = 1 << 30;  // bytes: enough for any number of threads

TEST(each_piece_once) {
  for (unsigned threads : {0u, 1u, 2u, 5u})
    for (size_t pieces : {size_t{0}, size_t{1}, size_t{2}, size_t{7}, size_t{1000}})
      for (size_t bytes : {size_t{0}, kMany}) {
        mcr::set_threads(threads);
        std::vector<int> times(pieces);  // plain: what a piece wrote is seen by who called
        CHECK(mcr::parallel(pieces, bytes, [&](size_t i) { return ++times[i], true; }));
        for (int n : times) CHECK_EQ(n, 1);
      }
  mcr::set_threads(0);
}

TEST(a_false_piece_ends_it) {
  for (unsigned threads : {1u, 4u}) {
    mcr::set_threads(threads);
    std::atomic<size_t> ran{0};
    CHECK(!mcr::parallel(100000, kMany, [&](size_t i) {
      ++ran;
      return i != 3;
    }));
    CHECK(ran < 100000u);
  }
  mcr::set_threads(0);
}

TEST(the_last_piece_may_be_the_false_one) {
  mcr::set_threads(4);
  for (int k = 0; k < 200; ++k) CHECK(!mcr::parallel(9, kMany, [](size_t i) { return i != 8; }));
  mcr::set_threads(0);
}

TEST(a_late_helper_touches_nothing) {
  mcr::set_threads(8);
  for (int k = 0; k < 500; ++k) {
    auto gone = std::make_unique<std::atomic<int>>(0);
    CHECK(mcr::parallel(2, kMany, [&](size_t) { return ++*gone, true; }));
    CHECK_EQ(*gone, 2);
  }
  mcr::set_threads(0);
}

TEST(several_callers) {
  mcr::set_threads(3);
  std::vector<std::jthread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([] {
      for (int k = 0; k < 50; ++k) {
        std::vector<size_t> squares(64);
        CHECK(mcr::parallel(64, kMany, [&](size_t i) { return squares[i] = i * i, true; }));
        for (size_t i = 0; i < 64; ++i) CHECK_EQ(squares[i], i * i);
      }
    });
  callers.clear();
  mcr::set_threads(0);
}

}  // namespace

int main() { return check::run(); }
