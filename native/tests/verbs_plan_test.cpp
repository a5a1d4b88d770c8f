// Ranges of a peer's memory, cut into reads: what each byte's way is, against a table of every byte.
#include <algorithm>
#include <cerrno>
#include <map>
#include <random>

#include "check.h"
#include "verbs/error.h"
#include "verbs/plan.h"

using namespace mcr::verbs;

namespace {

Region region_of(uint64_t address, const std::vector<uint64_t>& sizes) {
  Region r{address, 0, {}};
  for (const uint64_t n : sizes) {
    r.pieces.push_back({address + r.bytes, n, {uint32_t(r.pieces.size())}});
    r.bytes += n;
  }
  return r;
}

int code_of(const std::vector<Range>& ranges, const Regions& regions, const std::vector<Piece>& mine, std::string* text = nullptr) {
  try {
    cut(ranges, regions, mine, 1 << 20);
  } catch (const Error& e) {
    if (text) *text = e.what();
    return e.code;
  }
  return 0;
}

// Every chunk lies in one piece at either end and is no larger than it may be; together they bring each byte where it belongs, once.
void property(uint64_t seed) {
  check::context = "seed " + std::to_string(seed);
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t n) { return random() % n; };
  const auto sizes = [&](size_t count) {
    std::vector<uint64_t> out(count);
    for (uint64_t& n : out) n = 1 + below(300);
    return out;
  };
  Regions regions;
  for (uint64_t number : {5, 900}) regions[number] = region_of(1'000'000 * number, sizes(1 + below(4)));
  const std::vector<Piece> near = region_of(77'000, sizes(1 + below(5))).pieces;
  const std::vector<Piece> far = region_of(990'000, sizes(1 + below(3))).pieces;
  std::vector<Piece> mine = near;
  mine.insert(mine.end(), far.begin(), far.end());

  std::map<uint64_t, uint64_t> expected;  // local address -> remote address
  std::vector<Range> ranges;
  uint64_t local = near.front().address, end = near.back().address + near.back().bytes;
  while (local < end) {
    const uint64_t number = below(2) ? 5 : 900;
    const Region& r = regions[number];
    uint64_t offset = below(r.bytes + 1), n = below(std::min(r.bytes - offset, end - local) + 1);
    if (!ranges.empty() && below(2)) {  // goes on where the one before ended
      const Range& before = ranges.back();
      const Region& same = regions[before.region];
      offset = before.offset + before.bytes;
      n = below(std::min({same.bytes - offset, end - local, uint64_t(50)}) + 1);
      ranges.push_back({before.region, offset, local, n});
    } else {
      ranges.push_back({number, offset, local, n});
    }
    for (uint64_t i = 0; i < n; ++i) expected[local + i] = regions[ranges.back().region].address + offset + i;
    local += n + (below(3) ? 0 : below(20) + 1);
    if (ranges.size() > 60) break;
  }
  const uint32_t largest = uint32_t(1 + below(400));
  const std::vector<Chunk> chunks = cut(ranges, regions, mine, largest);
  std::map<uint64_t, uint64_t> got;
  for (const Chunk& c : chunks) {
    CHECK(c.bytes > 0 && c.bytes <= largest);
    const Piece& here = mine[c.local_piece];
    CHECK(c.local >= here.address && c.local + c.bytes <= here.address + here.bytes);
    CHECK(c.remote >= c.remote_piece->address && c.remote + c.bytes <= c.remote_piece->address + c.remote_piece->bytes);
    for (uint64_t i = 0; i < c.bytes; ++i) CHECK(got.emplace(c.local + i, c.remote + i).second);
  }
  CHECK(got == expected);
  check::context.clear();
}

TEST(neighbours_are_one_read) {
  const Regions regions{{0, region_of(1 << 20, {1 << 20})}};
  const std::vector<Piece> mine = region_of(1 << 30, {1 << 20}).pieces;
  std::vector<Range> ranges;
  for (uint64_t i = 0; i < 64; ++i) ranges.push_back({0, i * 100, (1 << 30) + i * 100, 100});
  CHECK_EQ(cut(ranges, regions, mine, 1 << 20).size(), 1u);
  CHECK_EQ(cut(ranges, regions, mine, 3200).size(), 2u);
  ranges[32].local += 100'000;
  CHECK_EQ(cut(ranges, regions, mine, 1 << 20).size(), 3u);
}

TEST(what_is_refused) {
  const Regions regions{{3, region_of(4096, {1000, 1000})}, {4, Region{9 << 20, 2000, {{9 << 20, 1000, {0}}}}}};
  const std::vector<Piece> mine = region_of(1 << 30, {500, 500}).pieces;
  const uint64_t at = 1 << 30;
  CHECK_EQ(code_of({{3, 0, at, 1000}}, regions, mine), 0);
  CHECK_EQ(code_of({{3, 2000, at, 0}, {8, 0, at, 0}}, regions, mine), 0);
  CHECK_EQ(code_of({{3, 1999, at, 2}}, regions, mine), EINVAL);
  CHECK_EQ(code_of({{3, ~0ull, at, 2}}, regions, mine), EINVAL);
  CHECK_EQ(code_of({{3, 1, at, ~0ull}}, regions, mine), EINVAL);
  CHECK_EQ(code_of({{3, 0, at, 1000}, {3, 1000, at + 1000, 1}}, regions, mine), EINVAL);
  CHECK_EQ(code_of({{3, 0, at - 1, 10}}, regions, mine), EINVAL);
  CHECK_EQ(code_of({{3, 0, ~0ull - 3, 10}}, regions, mine), EINVAL);
  CHECK_EQ(code_of({{3, 0, at, 10}}, regions, {}), EINVAL);
  CHECK_EQ(code_of({{4, 990, at, 20}}, regions, mine), EINVAL);  // a region with a hole: pieces that end before it does
  std::string text;
  CHECK_EQ(code_of({{3, 0, at, 10}, {3, 10, at + 10, 10}, {6, 7, at, 8}}, regions, mine, &text), EINVAL);
  CHECK(text == "range 2: 8 bytes at 7 of region 6: the peer has no such region");
  // A neighbour is only then taken along when it is right itself.
  CHECK_EQ(code_of({{3, 1990, at, 5}, {3, 1995, at + 5, 6}}, regions, mine, &text), EINVAL);
  CHECK(text.starts_with("range 1: 6 bytes at 1995"));
}

TEST(sizes_of_chunks) {
  for (const uint64_t bytes : {0ull, 1ull, 4096ull, 1ull << 20, 100'000'000ull, 1ull << 40})
    for (const size_t queues : {0u, 1u, 2u, 16u}) {
      const uint32_t n = chunk_bytes(bytes, queues, 1u << 31);
      CHECK(n % 4096 == 0 && n >= 64 << 10 && n <= 1 << 20);
    }
  CHECK_EQ(chunk_bytes(1 << 20, 4, 1u << 31), 64u << 10);
  CHECK_EQ(chunk_bytes(16 << 20, 4, 1u << 31), 1u << 20);
  CHECK_EQ(chunk_bytes(6 << 20, 4, 1u << 31), 384u << 10);  // all four have something to do until the end
  CHECK_EQ(chunk_bytes(16 << 20, 4, 5000), 5000u);
}

using Indices = std::vector<size_t>;

TEST(ways_between_memories) {
  const std::vector<Way> ways{{0, 0}, {1, 1}, {0, 0}, {1, 1}};  // two rails at either end, two queues each
  CHECK(best_ways(ways, 0b01, 0b01) == (Indices{0, 2}));
  CHECK(best_ways(ways, 0b10, 0b11) == (Indices{1, 3}));
  CHECK(best_ways(ways, 0b10, 0b01) == (Indices{0, 2}));  // none is near at both: at the peer, then
  CHECK(best_ways(ways, 0b10, 0b100) == (Indices{1, 3}));
  CHECK(best_ways(ways, 0b100, 0b100) == (Indices{0, 1, 2, 3}));
  CHECK(best_ways(ways, kAllRails, kAllRails) == (Indices{0, 1, 2, 3}));
  CHECK(best_ways(std::vector<Way>{{0, 1}, {70, 99}}, 0, 0) == (Indices{1}));  // a rail that no set has room for is near to all
  CHECK(best_ways({}, 1, 1).empty());
}

// Every chunk is in one batch, that of its ways, behind those that were before it.
void batches_property(uint64_t seed) {
  check::context = "seed " + std::to_string(seed);
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t n) { return random() % n; };
  std::vector<Way> ways(1 + below(6));
  for (Way& w : ways) w = {below(3), below(3)};
  std::vector<Piece> mine(1 + below(4)), theirs(1 + below(4));
  for (std::vector<Piece>* all : {&mine, &theirs})
    for (Piece& p : *all) p.near = below(4) ? below(8) : kAllRails;
  std::vector<Chunk> chunks(below(40));
  for (size_t i = 0; i < chunks.size(); ++i)
    chunks[i] = {i, i, uint32_t(below(mine.size())), 1, &theirs[below(theirs.size())]};
  std::vector<bool> seen(chunks.size());
  for (const Batch& b : batches(chunks, mine, ways)) {
    CHECK(!b.chunks.empty() && !b.posted);
    for (size_t k = 0; k < b.chunks.size(); ++k) {
      const Chunk& c = b.chunks[k];
      CHECK(!k || b.chunks[k - 1].local < c.local);
      CHECK(!seen[c.local]);
      seen[c.local] = true;
      CHECK(c.remote_piece == chunks[c.local].remote_piece && c.local_piece == chunks[c.local].local_piece);
      CHECK(b.ways == best_ways(ways, mine[c.local_piece].near, c.remote_piece->near));
    }
  }
  CHECK(std::find(seen.begin(), seen.end(), false) == seen.end());
  check::context.clear();
}

uint64_t seeds = 16;
TEST(every_chunk_in_one_batch) {
  for (uint64_t s = 0; s < seeds * 50; ++s) batches_property(s);
}

TEST(every_byte_once) {
  for (uint64_t s = 0; s < seeds * 50; ++s) property(s);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) seeds = std::strtoull(argv[1], nullptr, 10);
  return check::run();
}
