// The innermost loops, in each version that this processor can run, against a loop over single items. Memory is exactly as large as it may be.
#include "columns/loops.h"

#include <algorithm>
#include <memory>
#include <random>

#include "check.h"

namespace {

using Rng = std::mt19937_64;

// n items at an address that is not aligned; whatever lies before or behind them is not ours.
struct Memory {
  Memory(size_t bytes, size_t shift) : whole(new uint8_t[bytes + shift]), at(whole.get() + shift), n(bytes) {}
  std::unique_ptr<uint8_t[]> whole;
  uint8_t* at;
  size_t n;
};

uint64_t load(const uint8_t* at, size_t item) {
  uint64_t v = 0;
  std::memcpy(&v, at, item);
  return v;
}

uint64_t masked(uint64_t v, size_t item) { return item == 8 ? v : v & ((uint64_t{1} << (8 * item)) - 1); }

int64_t extended(uint64_t v, size_t item) {
  const unsigned shift = unsigned(64 - 8 * item);
  return int64_t(v << shift) >> shift;
}

const std::vector<size_t> kSizes = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 513, 1029};

template <class F>
void each(F&& f) {
  std::vector<std::pair<const char*, const mcr::Loops*>> versions = {{"base", &mcr::kBaseLoops}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) versions.emplace_back("avx2", &mcr::kAvx2Loops);
#endif
  Rng rng(20260101);
  for (auto [name, loops] : versions)
    for (int log = 0; log < 4; ++log)
      for (size_t n : kSizes)
        for (size_t shift = 0; shift < 3; ++shift) {
          check::context = std::string(name) + ", " + std::to_string(n) + " items of " + std::to_string(1 << log);
          f(*loops, log, size_t(1) << log, n, shift, rng);
        }
}

TEST(first_not) {
  each([](const mcr::Loops& loops, int log, size_t item, size_t n, size_t shift, Rng& rng) {
    for (uint64_t value : {uint64_t{0}, uint64_t{1}, masked(rng(), item)}) {
      Memory m(n * item, shift);
      for (size_t i = 0; i < n; ++i) std::memcpy(m.at + i * item, &value, item);
      CHECK_EQ(loops.first_not[log](m.at, n, value), n);
      for (int k = 0; n && k < 20; ++k) {
        const size_t at = rng() % (n * item);
        m.at[at] ^= uint8_t(1 << rng() % 8);
        size_t first = 0;
        while (first < n && load(m.at + first * item, item) == value) ++first;
        CHECK_EQ(loops.first_not[log](m.at, n, value), first);
      }
    }
  });
}

TEST(counting) {
  each([](const mcr::Loops& loops, int log, size_t item, size_t n, size_t shift, Rng& rng) {
    for (uint64_t from : {uint64_t{0}, uint64_t{250}, rng()}) {
      Memory m(n * item, shift);
      loops.count_up[log](m.at, n, from);
      for (size_t i = 0; i < n; ++i) CHECK_EQ(load(m.at + i * item, item), masked(from + i, item));
      CHECK(loops.counts_up[log](m.at, n, from));
      if (!n) continue;
      m.at[rng() % (n * item)] ^= uint8_t(1 << rng() % 8);
      CHECK(!loops.counts_up[log](m.at, n, from));
    }
  });
}

TEST(fill) {
  each([](const mcr::Loops& loops, int log, size_t item, size_t n, size_t shift, Rng& rng) {
    const uint64_t value = rng();
    Memory m(n * item, shift);
    loops.fill[log](m.at, n, value);
    for (size_t i = 0; i < n; ++i) CHECK_EQ(load(m.at + i * item, item), masked(value, item));
  });
}

TEST(range) {
  each([](const mcr::Loops& loops, int log, size_t item, size_t n, size_t shift, Rng& rng) {
    Memory m(n * item, shift);
    for (size_t i = 0; i < m.n; ++i) m.at[i] = uint8_t(rng());
    int64_t lo = INT64_MAX, hi = INT64_MIN, low = lo, high = hi;
    uint64_t ulo = UINT64_MAX, uhi = 0, ulow = ulo, uhigh = uhi;
    for (size_t i = 0; i < n; ++i) {
      const uint64_t v = load(m.at + i * item, item);
      low = std::min(low, extended(v, item)), high = std::max(high, extended(v, item));
      ulow = std::min(ulow, v), uhigh = std::max(uhigh, v);
    }
    const size_t half = n / 2;  // it widens
    loops.range[1][log](m.at, half, &lo, &hi);
    loops.range[1][log](m.at + half * item, n - half, &lo, &hi);
    loops.range[0][log](m.at, half, &ulo, &uhi);
    loops.range[0][log](m.at + half * item, n - half, &ulo, &uhi);
    CHECK_EQ(lo, low);
    CHECK_EQ(hi, high);
    CHECK_EQ(ulo, ulow);
    CHECK_EQ(uhi, uhigh);
  });
}

TEST(convert) {
  each([](const mcr::Loops& loops, int log, size_t item, size_t n, size_t shift, Rng& rng) {
    Memory m(n * item, shift);
    for (size_t i = 0; i < m.n; ++i) m.at[i] = uint8_t(rng());
    for (int is_signed = 0; is_signed < 2; ++is_signed)
      for (int to_log = 0; to_log < 4; ++to_log) {
        const size_t to_item = size_t(1) << to_log;
        Memory to(n * to_item, shift);
        loops.convert[is_signed][log][to_log](m.at, n, to.at);
        for (size_t i = 0; i < n; ++i) {
          const uint64_t v = load(m.at + i * item, item);
          CHECK_EQ(load(to.at + i * to_item, to_item), masked(is_signed ? uint64_t(extended(v, item)) : v, to_item));
        }
      }
  });
}

bool bit(const uint8_t* bits, size_t i) { return bits[i / 8] >> (i % 8) & 1; }

TEST(to_bits) {
  each([](const mcr::Loops& loops, int log, size_t item, size_t n, size_t shift, Rng& rng) {
    Memory m(n * item, shift);
    for (size_t i = 0; i < m.n; ++i) m.at[i] = rng() % 3 ? 0 : uint8_t(rng());
    Memory bits((n + 7) / 8, shift);
    mcr::BitEnd end{bits.at};
    for (size_t i = 0; i < n;) {  // in parts, as rows are
      const size_t part = std::min(n - i, size_t(rng() % 140));
      loops.to_bits[log](m.at + i * item, part, end);
      i += part;
    }
    std::memcpy(end.out, &end.word, (end.fill + 7) / 8);
    for (size_t i = 0; i < n; ++i) CHECK_EQ(bit(bits.at, i), load(m.at + i * item, item) != 0);
    for (size_t i = n; i < 8 * bits.n; ++i) CHECK(!bit(bits.at, i));
  });
}

TEST(from_bits) {
  each([](const mcr::Loops& loops, int log, size_t item, size_t n, size_t shift, Rng& rng) {
    for (size_t from : {size_t{0}, size_t{1}, size_t{rng() % 100}}) {
      Memory bits((from + n + 7) / 8, shift), to(n * item, shift);
      for (size_t i = 0; i < bits.n; ++i) bits.at[i] = uint8_t(rng());
      const uint64_t one = rng(), zero = rng();
      loops.from_bits[log](bits.at, from, n, to.at, one, zero);
      for (size_t i = 0; i < n; ++i) CHECK_EQ(load(to.at + i * item, item), masked(bit(bits.at, from + i) ? one : zero, item));
    }
  });
}

}  // namespace

int main() { return check::run(); }
