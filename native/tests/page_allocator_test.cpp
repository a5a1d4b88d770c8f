// The page allocator against a model that only knows intervals. Usage: page_allocator_test [SEEDS [FIRST_SEED]]
#include "pool/page_allocator.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "check.h"

using mcr::PageAllocator;

namespace {

struct Model {
  struct Used {
    uint64_t pages;
    PageAllocator::Node node;
  };
  uint64_t total = 0;
  std::map<uint64_t, Used> used;  // by first page

  uint64_t free_pages() const {
    uint64_t n = total;
    for (auto& [first, u] : used) n -= u.pages;
    return n;
  }
  uint64_t largest_gap() const {
    uint64_t at = 0, best = 0;
    for (auto& [first, u] : used) best = std::max(best, first - at), at = first + u.pages;
    return std::max(best, total - at);
  }
  void take(const PageAllocator::Extent& e) {
    CHECK(e.first + e.pages <= total);
    auto after = used.lower_bound(e.first);
    CHECK(after == used.end() || e.first + e.pages <= after->first);
    CHECK(after == used.begin() || std::prev(after)->first + std::prev(after)->second.pages <= e.first);
    used.emplace(e.first, Used{e.pages, e.node});
  }
};

// Blocks tile the range, no two free ones touch, and the used ones are the model's.
void compare(const PageAllocator& a, const Model& m) {
  CHECK_EQ(a.total_pages(), m.total);
  CHECK_EQ(a.free_pages(), m.free_pages());
  CHECK_EQ(a.largest_free(), m.largest_gap());
  uint64_t at = 0;
  bool before_free = false;
  auto expected = m.used.begin();
  for (const auto& b : a.blocks()) {
    CHECK_EQ(b.first, at);
    CHECK(b.pages > 0);
    CHECK(b.used || !before_free);
    before_free = !b.used;
    at += b.pages;
    if (!b.used) continue;
    CHECK(expected != m.used.end());
    CHECK_EQ(b.first, expected->first);
    CHECK_EQ(b.pages, expected->second.pages);
    ++expected;
  }
  CHECK(expected == m.used.end());
  CHECK_EQ(at, m.total);
}

uint64_t log_uniform(std::mt19937_64& rng, uint64_t most) {
  const double bits = std::uniform_real_distribution<>(0, std::log2(double(most)))(rng);
  return std::clamp<uint64_t>(uint64_t(std::exp2(bits)), 1, most);
}

void run_seed(uint64_t seed) {
  std::mt19937_64 rng(seed);
  PageAllocator a;
  Model m;
  const uint64_t step = log_uniform(rng, uint64_t(1) << (6 + rng() % 30));
  const int busy = 30 + int(rng() % 50);  // percent of the steps that allocate
  for (int i = 0; i < 2500; ++i) {
    check::context = "seed " + std::to_string(seed) + ", step " + std::to_string(i);
    const int what = int(rng() % 100);
    if (what < 2 || !m.total) {
      const uint64_t n = rng() % (step + 1);
      a.extend(n);
      m.total += n;
    } else if (what < 5) {
      const uint64_t n = log_uniform(rng, step);
      m.total += n;
      m.take({m.total - n, n, a.append(n)});
    } else if (what < busy) {
      // Often exactly what is left, or one page more.
      const uint64_t gap = m.largest_gap();
      const uint64_t n = what % 8 == 0 ? gap : what % 8 == 1 ? gap + 1 : log_uniform(rng, std::max<uint64_t>(1, m.total / 4));
      const auto e = a.allocate(n);
      CHECK_EQ(e.has_value(), n > 0 && n <= gap);
      if (e) {
        CHECK_EQ(e->pages, n);
        m.take(*e);
      }
    } else if (!m.used.empty()) {
      auto it = m.used.lower_bound(rng() % m.total);
      if (it == m.used.end()) it = m.used.begin();
      a.free(it->second.node);
      m.used.erase(it);
    }
    compare(a, m);
  }
  while (!m.used.empty()) {
    auto it = std::next(m.used.begin(), long(rng() % m.used.size()));
    a.free(it->second.node);
    m.used.erase(it);
    CHECK_EQ(a.free_pages(), m.free_pages());
  }
  compare(a, m);
  CHECK(!m.total || a.blocks().size() == 1);  // merged in full
  if (!m.total) return;
  const auto all = a.allocate(m.total);
  CHECK(all && all->first == 0);
  CHECK(!a.allocate(1));
}

int seeds = 20;
uint64_t first_seed = 1;

TEST(random_operations_match_the_interval_model) {
  for (uint64_t s = first_seed; s < first_seed + uint64_t(seeds); ++s) run_seed(s);
  std::printf("seeds %llu to %llu\n", (unsigned long long)first_seed, (unsigned long long)first_seed + seeds - 1);
}

TEST(an_empty_allocator_gives_nothing) {
  PageAllocator a;
  CHECK(!a.allocate(1));
  CHECK(!a.allocate(0));
  CHECK_EQ(a.largest_free(), 0u);
  a.extend(0);
  CHECK(a.blocks().empty());
}

TEST(what_is_appended_is_taken_until_it_is_freed) {
  PageAllocator a;
  const auto first = a.append(3);
  CHECK(!a.allocate(1));
  a.extend(2);
  const auto last = a.append(1);
  CHECK_EQ(a.total_pages(), 6u);
  CHECK_EQ(a.largest_free(), 2u);
  a.free(first);
  CHECK_EQ(a.largest_free(), 5u);  // merged with what was between
  a.free(last);
  const auto all = a.allocate(6);
  CHECK(all && all->first == 0);
}

// A block that its bin's lower bound says is too small, and is not: every size in the bin must be usable.
TEST(the_last_large_block_is_usable_whatever_its_size) {
  for (uint64_t pages = 1; pages < 3000; ++pages) {
    PageAllocator a;
    a.extend(pages);
    CHECK(!a.allocate(pages + 1));
    const auto e = a.allocate(pages);
    CHECK(e);
    CHECK_EQ(a.free_pages(), 0u);
    a.free(e->node);
    CHECK_EQ(a.largest_free(), pages);
  }
}

TEST(a_fit_behind_a_smaller_block_of_the_same_bin_is_found) {
  PageAllocator a;
  a.extend(1000 + 1 + 1020 + 1);
  const auto x = a.allocate(1000), wall = a.allocate(1), y = a.allocate(1020), end = a.allocate(1);
  CHECK(x && wall && y && end);
  a.free(y->node);
  a.free(x->node);  // now the head of the bin that holds both
  const auto e = a.allocate(1010);
  CHECK(e && e->first == y->first);
}

TEST(sizes_beyond_32_bits) {
  PageAllocator a;
  const uint64_t huge = uint64_t(1) << 50;
  a.extend(huge);
  a.extend(huge);
  CHECK_EQ(a.blocks().size(), 1u);
  const auto big = a.allocate(huge + 12345);
  CHECK(big);
  const auto rest = a.allocate(huge - 12345);
  CHECK(rest && rest->first == huge + 12345);
  CHECK(!a.allocate(1));
  a.free(big->node);
  CHECK_EQ(a.largest_free(), huge + 12345);
  a.free(rest->node);
  CHECK_EQ(a.largest_free(), 2 * huge);
  CHECK(!a.allocate(UINT64_MAX));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) seeds = std::atoi(argv[1]);
  if (argc > 2) first_seed = std::strtoull(argv[2], nullptr, 10);
  return check::run();
}
