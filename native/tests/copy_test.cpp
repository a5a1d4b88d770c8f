// copy_segments: every byte arrives, and no other byte changes, whatever the sizes and the number of threads.
#include "pool/copy.h"

#include <random>

#include "check.h"

using mcr::Segment;

namespace {

constexpr std::byte kFence{0xA5};

// Lays segments of these sizes with gaps between them, copies, and looks at everything.
void copy_and_compare(const std::vector<size_t>& sizes, unsigned threads, std::mt19937_64& rng) {
  size_t from_bytes = 0, to_bytes = 0;
  std::vector<std::pair<size_t, size_t>> at;  // source, destination
  for (size_t n : sizes) {
    from_bytes += rng() % 67;
    to_bytes += 1 + rng() % 67;
    at.emplace_back(from_bytes, to_bytes);
    from_bytes += n;
    to_bytes += n;
  }
  std::vector<uint64_t> random(from_bytes / 8 + 1);
  for (uint64_t& word : random) word = rng();
  const auto* from = reinterpret_cast<const std::byte*>(random.data());
  std::vector<std::byte> to(to_bytes + 1, kFence), expected = to;
  std::vector<Segment> segments;
  for (size_t i = 0; i < sizes.size(); ++i) {
    segments.push_back({to.data() + at[i].second, from + at[i].first, sizes[i]});
    if (sizes[i]) std::memcpy(expected.data() + at[i].second, from + at[i].first, sizes[i]);
  }
  mcr::copy_segments(segments, threads);
  CHECK(std::memcmp(to.data(), expected.data(), to.size()) == 0);
}

TEST(odd_sizes_and_threads) {
  std::mt19937_64 rng(20260101);
  const size_t piece = 1 << 20, per_thread = 4 << 20;
  const std::vector<std::vector<size_t>> layouts = {
      {},
      {0},
      {1},
      {0, 1, 0, 4095, 4096, 4097, 63, 65},
      {piece - 1, piece, piece + 1},
      {per_thread * 2},
      {per_thread * 2 - 1},
      {per_thread * 3 + 1, 0, 7},
      {per_thread * 2 + 12345, piece * 3 - 1, 1, piece * 5 + 4097},
      std::vector<size_t>(3000, 3001),
  };
  for (const auto& sizes : layouts)
    for (unsigned threads : {0u, 1u, 3u, 64u}) {
      check::context = std::to_string(sizes.size()) + " segments, " + std::to_string(threads) + " threads";
      copy_and_compare(sizes, threads, rng);
    }
}

TEST(random_layouts) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    check::context = "seed " + std::to_string(seed);
    std::mt19937_64 rng(seed);
    std::vector<size_t> sizes(1 + rng() % 40);
    for (size_t& n : sizes) n = rng() % (size_t(1) << (rng() % 22));
    sizes.push_back(8 << 20);  // enough for more than one thread
    copy_and_compare(sizes, unsigned(rng() % 5), rng);
  }
}

TEST(copies_too_large_for_a_cache) {
  std::mt19937_64 rng(7);
  const size_t mib = 1 << 20;
  for (const auto& sizes : std::vector<std::vector<size_t>>{{33 * mib + 5}, {20 * mib + 3, 1, 0, 127, 129, 31, 13 * mib + 77, 5000}})
    for (unsigned threads : {1u, 3u}) {
      check::context = std::to_string(sizes.size()) + " segments, " + std::to_string(threads) + " threads";
      copy_and_compare(sizes, threads, rng);
    }
}

TEST(several_callers_at_once) {
  std::vector<std::jthread> callers;
  for (uint64_t c = 0; c < 3; ++c)
    callers.emplace_back([c] {
      std::mt19937_64 rng(c);
      for (int i = 0; i < 3; ++i) copy_and_compare({(8 << 20) + c, 17, 1 << 20}, 2, rng);
    });
}

}  // namespace

int main() { return check::run(); }
