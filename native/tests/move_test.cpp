// Boxes that are copied from one layout to another.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "check.h"
#include "delta/move.h"
#include "parallel.h"

using namespace mcr::delta;

namespace {

using Rng = std::mt19937_64;
using Bytes = std::vector<uint8_t>;
constexpr uint64_t kSeed = 1;

// Memory that is exactly as large as it may be, so that what reads or writes beyond is found.
Bytes noise(size_t n, Rng& rng) {
  Bytes out(n);
  for (uint8_t& b : out) b = uint8_t(rng());
  return out;
}

std::byte* bytes_of(Bytes& b) { return reinterpret_cast<std::byte*>(b.data()); }

// A box with random dimensions, of which those in memory come in any order and with gaps. Returns how many bytes it reaches over.
size_t lay(const std::vector<int64_t>& extents, size_t item, Rng& rng, std::vector<int64_t>& strides) {
  std::vector<size_t> order(extents.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (rng() % 3 == 0) std::shuffle(order.begin(), order.end(), rng);
  strides.assign(extents.size(), 0);
  int64_t step = int64_t(item);
  size_t reach = item;
  for (size_t k = order.size(); k-- > 0;) {
    strides[order[k]] = step;
    reach += size_t((extents[order[k]] - 1) * step);
    step *= extents[order[k]];
    if (rng() % 4 == 0) step += int64_t(item * (rng() % 3));
  }
  return reach;
}

TEST(boxes_are_copied_from_any_layout_to_any_other) {
  Rng rng(kSeed);
  mcr::set_cores(4);
  for (int round = 0; round < 2000; ++round) {
    const size_t n = 1 + rng() % 8;
    std::vector<Bytes> sources, targets, wanted;
    std::vector<Move> moves;
    for (size_t k = 0; k < n; ++k) {
      const size_t item = size_t{1} << rng() % 4;
      std::vector<int64_t> extents(rng() % 4), from, to;
      for (int64_t& e : extents) e = 1 + int64_t(rng() % (rng() % 4 ? 6 : 70));
      sources.push_back(noise(lay(extents, item, rng, from), rng));
      targets.push_back(noise(lay(extents, item, rng, to), rng));
      if (rng() % 20 == 0 && !extents.empty()) extents[rng() % extents.size()] = 0;
      Move move{{}, bytes_of(sources.back()), bytes_of(targets.back()), item};
      for (size_t d = 0; d < extents.size(); ++d) move.dims.push_back({extents[d], from[d], to[d]});
      int64_t count = 1;
      for (int64_t e : extents) count *= e;
      wanted.push_back(targets.back());
      for (int64_t i = 0; i < count; ++i) {
        int64_t rest = i, at = 0, where = 0;
        for (size_t d = extents.size(); d-- > 0;) at += rest % extents[d] * from[d], where += rest % extents[d] * to[d], rest /= extents[d];
        std::memcpy(&wanted.back()[size_t(where)], &sources.back()[size_t(at)], item);
      }
      moves.push_back(std::move(move));
    }
    move(moves);
    CHECK(targets == wanted);
  }
  mcr::set_cores(0);
}

TEST(long_rows_are_copied_by_several_threads) {
  Rng rng(kSeed);
  mcr::set_cores(4);
  for (size_t row : {(size_t{256} << 10) - 2, size_t{256} << 10, (size_t{256} << 10) + 2, size_t{5} << 20, (size_t{3} << 20) + 6}) {
    for (int64_t rows : {1, 3}) {
      const int64_t apart = int64_t(row) + 64;
      Bytes source = noise(size_t(rows * apart), rng), target = noise(row * size_t(rows), rng);
      move({Move{{{rows, apart, int64_t(row)}, {int64_t(row / 2), 2, 2}}, bytes_of(source), bytes_of(target), 2}});
      for (int64_t r = 0; r < rows; ++r) CHECK(!std::memcmp(&target[size_t(r) * row], &source[size_t(r * apart)], row));
    }
  }
  mcr::set_cores(0);
}

}  // namespace

int main() { return check::run(); }
