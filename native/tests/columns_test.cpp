// The kernels over cells, item by item: what they say, what they write, and that they touch nothing else. Memory is exactly as large as it may be.
#include <algorithm>
#include <memory>
#include <optional>
#include <random>

#include "check.h"
#include "columns/pack.h"
#include "columns/pages.h"
#include "parallel.h"
#include "columns/prove.h"
#include "columns/unpack.h"

namespace {

using Rng = std::mt19937_64;
using Item = std::vector<std::byte>;

Item random_item(size_t item, Rng& rng) {
  Item bytes(item);
  const int how = int(rng() % 4);
  for (std::byte& b : bytes) b = how == 0 ? std::byte{0} : how == 1 ? std::byte{0xFF} : std::byte(rng());
  if (how == 2) std::fill(bytes.begin() + 1, bytes.end(), std::byte{0});
  return bytes;
}

// Random cells and spans. The last row ends where the memory ends.
struct Table {
  Table(int64_t rows, int64_t width, int64_t item, Rng& rng, int64_t gap = 3)
      : rows(rows), width(width), item(item), stride(width * item + gap), memory(size_t(rows ? rows * stride - gap : 0)) {
    for (size_t i = 0; i < memory.size(); i += 8) {
      const uint64_t word = rng();
      std::memcpy(memory.data() + i, &word, std::min(size_t(8), memory.size() - i));
    }
    for (int64_t r = 0; r < rows; ++r) {
      starts.push_back(int64_t(rng() % uint64_t(width + 1)));
      lengths.push_back(rng() % 5 ? int64_t(rng() % uint64_t(width - starts.back() + 1)) : 0);
    }
    offsets = mcr::sums(lengths.data(), rows);
    for (int64_t r = 0; r < rows; ++r) firsts.push_back(r * width + starts[size_t(r)]);
  }
  mcr::Cells cells() { return {memory.data(), rows, width, stride, item}; }
  mcr::Spans spans() const { return {starts.data(), lengths.data()}; }
  std::byte* at(int64_t r, int64_t c) { return memory.data() + r * stride + c * item; }
  Item get(int64_t r, int64_t c) { return {at(r, c), at(r, c) + item}; }
  void set(int64_t r, int64_t c, const Item& value) { std::copy(value.begin(), value.end(), at(r, c)); }
  bool in(int64_t r, int64_t c) const { return c >= starts[size_t(r)] && c < starts[size_t(r)] + lengths[size_t(r)]; }
  template <class F>
  void each(F&& f) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < width; ++c) f(r, c);
  }
  std::pair<int64_t, int64_t> damage(Rng& rng) {
    const int64_t r = int64_t(rng() % uint64_t(rows)), c = int64_t(rng() % uint64_t(width));
    at(r, c)[rng() % uint64_t(item)] ^= std::byte(1 << rng() % 8);
    return {r, c};
  }
  bool some() const { return rows && width; }

  int64_t rows, width, item, stride;
  std::vector<std::byte> memory;
  std::vector<int64_t> starts, lengths, offsets, firsts;
};

template <class F>
void each_table(F&& f, std::vector<int64_t> items = {1, 2, 3, 4, 8, 12, 16}) {
  for (uint64_t seed = 1; seed <= 12; ++seed)
    for (int64_t item : items) {
      Rng rng(seed);
      const int64_t rows = int64_t(rng() % 6), width = int64_t(rng() % (seed % 2 ? 20 : 700));
      check::context = "seed " + std::to_string(seed) + ", items of " + std::to_string(item);
      Table t(rows, width, item, rng, int64_t(rng() % 2) * 5);
      f(t, rng);
    }
}

const Item zeros(16);

Item number(uint64_t v, int64_t item) {
  Item bytes(static_cast<size_t>(item));
  std::memcpy(bytes.data(), &v, size_t(item));
  return bytes;
}

TEST(find_spans) {
  each_table([](Table& t, Rng& rng) {
    Item one = random_item(size_t(t.item), rng);
    one[0] |= std::byte{1};
    t.each([&](int64_t r, int64_t c) { t.set(r, c, t.in(r, c) ? one : Item(one.size())); });
    std::vector<int64_t> starts(t.starts.size(), -1), lengths = starts;
    CHECK(mcr::find_spans(t.cells(), one.data(), starts.data(), lengths.data()));
    for (size_t r = 0; r < starts.size(); ++r) {
      CHECK_EQ(lengths[r], t.lengths[r]);
      CHECK_EQ(starts[r], t.lengths[r] ? t.starts[r] : 0);
    }
    if (!t.some()) return;
    const auto [r, c] = t.damage(rng);
    if (t.get(r, c) != one && t.get(r, c) != Item(one.size())) CHECK(!mcr::find_spans(t.cells(), one.data(), starts.data(), lengths.data()));
  });
}

TEST(trim) {
  each_table([](Table& t, Rng& rng) {
    const Item pad = random_item(size_t(t.item), rng);
    t.each([&](int64_t r, int64_t c) {
      if (!t.in(r, c)) t.set(r, c, pad);
    });
    std::vector<int64_t> starts(t.starts.size(), -1), lengths = starts;
    mcr::trim(t.cells(), pad.data(), starts.data(), lengths.data());
    for (int64_t r = 0; r < t.rows; ++r) {
      int64_t first = 0, end = t.width;
      while (end && t.get(r, end - 1) == pad) --end;
      while (first < end && t.get(r, first) == pad) ++first;
      CHECK_EQ(lengths[size_t(r)], end - first);
      CHECK_EQ(starts[size_t(r)], end ? first : 0);
    }
  });
}

TEST(outside_and_inside) {
  each_table([](Table& t, Rng& rng) {
    const Item pad = random_item(size_t(t.item), rng);
    std::vector<std::byte> values, found(size_t(t.rows * t.item));
    for (int64_t r = 0; r < t.rows; ++r) {
      const Item value = random_item(size_t(t.item), rng);
      values.insert(values.end(), value.begin(), value.end());
    }
    Table expected = t;
    expected.each([&](int64_t r, int64_t c) {
      expected.set(r, c, t.in(r, c) ? Item(values.begin() + r * t.item, values.begin() + (r + 1) * t.item) : pad);
    });
    mcr::fill_spans(t.cells(), t.spans(), values.data(), pad.data());
    CHECK(t.memory == expected.memory);
    CHECK(mcr::outside_is(t.cells(), t.spans(), pad.data()));
    CHECK(mcr::inside_constant(t.cells(), t.spans(), found.data()));
    for (int64_t i = 0; i < t.rows * t.item; ++i) CHECK(found[size_t(i)] == (t.lengths[size_t(i / t.item)] ? values[size_t(i)] : std::byte{0}));
    if (!t.some()) return;
    const auto [r, c] = t.damage(rng);
    CHECK_EQ(mcr::outside_is(t.cells(), t.spans(), pad.data()), t.in(r, c));
    CHECK_EQ(mcr::inside_constant(t.cells(), t.spans(), found.data()), !t.in(r, c) || t.lengths[size_t(r)] == 1);
  });
}

TEST(last_hot) {
  each_table([](Table& t, Rng& rng) {
    std::vector<std::byte> values(size_t(t.rows * t.item)), found(values.size());
    for (std::byte& b : values) b = std::byte(rng());
    Table expected = t;
    expected.each([&](int64_t r, int64_t c) {
      const bool last = t.lengths[size_t(r)] && c == t.starts[size_t(r)] + t.lengths[size_t(r)] - 1;
      expected.set(r, c, last ? Item(values.begin() + r * t.item, values.begin() + (r + 1) * t.item) : Item(size_t(t.item)));
    });
    mcr::fill_last(t.cells(), t.spans(), values.data());
    CHECK(t.memory == expected.memory);
    CHECK(mcr::last_hot(t.cells(), t.spans(), found.data()));
    for (int64_t i = 0; i < t.rows * t.item; ++i) CHECK(found[size_t(i)] == (t.lengths[size_t(i / t.item)] ? values[size_t(i)] : std::byte{0}));
    if (!t.some()) return;
    const auto [r, c] = t.damage(rng);
    CHECK_EQ(mcr::last_hot(t.cells(), t.spans(), found.data()), t.lengths[size_t(r)] && c == t.starts[size_t(r)] + t.lengths[size_t(r)] - 1);
  });
}

TEST(positions) {
  each_table(
      [](Table& t, Rng& rng) {
        Table expected = t;
        expected.each([&](int64_t r, int64_t c) {
          const int64_t n = std::clamp<int64_t>(c - t.starts[size_t(r)], 0, std::max<int64_t>(0, t.lengths[size_t(r)] - 1));
          expected.set(r, c, number(uint64_t(n), t.item));
        });
        mcr::fill_positions(t.cells(), t.spans());
        CHECK(t.memory == expected.memory);
        CHECK(mcr::is_positions(t.cells(), t.spans()));
        CHECK(mcr::is_arange(t.cells(), t.spans()));
        if (!t.some()) return;
        const auto [r, c] = t.damage(rng);
        CHECK(!mcr::is_positions(t.cells(), t.spans()));
        CHECK_EQ(mcr::is_arange(t.cells(), t.spans()), !t.in(r, c));
      },
      {1, 2, 4, 8});
}

TEST(equality) {
  each_table([](Table& t, Rng& rng) {
    Table other(t.rows, t.width, t.item, rng, 11);
    t.each([&](int64_t r, int64_t c) { other.set(r, c, t.get(r, c)); });
    CHECK(mcr::rows_equal(t.cells(), other.cells()));
    const Item value = random_item(size_t(t.item), rng);
    if (t.some()) {
      other.damage(rng);
      CHECK(!mcr::rows_equal(t.cells(), other.cells()));
    }
    for (Table* table : {&t, &other}) {
      table->each([&](int64_t r, int64_t c) { table->set(r, c, value); });
      CHECK(mcr::all_equal(table->cells(), value.data()));
      if (!t.some()) continue;
      table->damage(rng);
      CHECK(!mcr::all_equal(table->cells(), value.data()));
    }
  });
}

TEST(packing) {
  each_table([](Table& t, Rng& rng) {
    std::vector<std::byte> expected, packed(size_t(t.offsets.back() * t.item));
    t.each([&](int64_t r, int64_t c) {
      if (t.in(r, c)) expected.insert(expected.end(), t.at(r, c), t.at(r, c) + t.item);
    });
    mcr::pack(t.cells(), t.spans(), packed.data());
    CHECK(packed == expected);
    const Item pad = random_item(size_t(t.item), rng);
    Table back(t.rows, t.width, t.item, rng), wanted = back;
    wanted.each([&](int64_t r, int64_t c) { wanted.set(r, c, t.in(r, c) ? t.get(r, c) : pad); });
    mcr::unpack(packed.data(), {t.offsets.data(), t.starts.data()}, back.cells(), pad.data());
    CHECK(back.memory == wanted.memory);
    // The same spans, where they begin by themselves.
    Table flat(t.rows, t.width, t.item, rng, 0), touched = flat;
    mcr::Cells ragged = flat.cells();
    ragged.stride = 0;
    mcr::unpack(packed.data(), {t.offsets.data(), t.firsts.data()}, ragged, pad.data());
    touched.each([&](int64_t r, int64_t c) {
      if (t.in(r, c)) touched.set(r, c, t.get(r, c));
    });
    CHECK(flat.memory == touched.memory);
    std::fill(packed.begin(), packed.end(), std::byte{0});
    mcr::pack(ragged, {t.firsts.data(), t.lengths.data()}, packed.data());
    CHECK(packed == expected);
    std::vector<int64_t> starts(t.firsts), lengths(t.lengths);
    for (int64_t& n : starts) n *= t.item;
    for (int64_t& n : lengths) n *= t.item;
    std::fill(packed.begin(), packed.end(), std::byte{0});
    mcr::gather(flat.memory.data(), starts.data(), lengths.data(), t.rows, packed.data());
    CHECK(packed == expected);
  });
}

TEST(packing_integers_and_bits) {
  each_table(
      [](Table& t, Rng& rng) {
        t.each([&](int64_t r, int64_t c) {
          if (rng() % 2) t.set(r, c, Item(size_t(t.item)));
        });
        std::vector<uint64_t> numbers;
        t.each([&](int64_t r, int64_t c) {
          uint64_t v = 0;
          std::memcpy(&v, t.at(r, c), size_t(t.item));
          if (t.in(r, c)) numbers.push_back(v);
        });
        const Item pad = random_item(size_t(t.item), rng), one = random_item(size_t(t.item), rng), zero = random_item(size_t(t.item), rng);
        for (int64_t small : {1, 2, 4, 8}) {
          if (small > t.item) continue;
          std::vector<std::byte> packed(numbers.size() * size_t(small));
          mcr::pack_ints(t.cells(), t.spans(), packed.data(), small);
          for (size_t i = 0; i < numbers.size(); ++i) CHECK(std::memcmp(packed.data() + i * size_t(small), &numbers[i], size_t(small)) == 0);
          for (bool is_signed : {false, true}) {
            Table back(t.rows, t.width, t.item, rng), wanted = back;
            size_t i = 0;
            wanted.each([&](int64_t r, int64_t c) {
              if (!t.in(r, c)) return wanted.set(r, c, pad);
              const unsigned shift = unsigned(64 - 8 * small);
              const uint64_t high = numbers[i++] << shift;
              wanted.set(r, c, number(is_signed ? uint64_t(int64_t(high) >> shift) : high >> shift, t.item));
            });
            mcr::unpack_ints(packed.data(), small, is_signed, {t.offsets.data(), t.starts.data()}, back.cells(), pad.data());
            CHECK(back.memory == wanted.memory);
          }
        }
        std::vector<std::byte> bits((numbers.size() + 7) / 8);
        mcr::pack_bits(t.cells(), t.spans(), bits.data());
        for (size_t i = 0; i < bits.size() * 8; ++i)
          CHECK_EQ(int(bits[i / 8] >> int(i % 8)) & 1, int(i < numbers.size() && numbers[i] != 0));
        Table back(t.rows, t.width, t.item, rng), wanted = back;
        size_t i = 0;
        wanted.each([&](int64_t r, int64_t c) { wanted.set(r, c, !t.in(r, c) ? pad : numbers[i++] ? one : zero); });
        mcr::unpack_bits(bits.data(), 0, {t.offsets.data(), t.starts.data()}, back.cells(), one.data(), zero.data(), pad.data());
        CHECK(back.memory == wanted.memory);
        // Signed and unsigned extremes.
        std::optional<std::pair<uint64_t, uint64_t>> unsigned_range, signed_range;
        for (uint64_t v : numbers) {
          const unsigned shift = unsigned(64 - 8 * t.item);
          const auto s = uint64_t(int64_t(v << shift) >> shift);
          if (!unsigned_range) unsigned_range = {v, v}, signed_range = {s, s};
          unsigned_range = {std::min(unsigned_range->first, v), std::max(unsigned_range->second, v)};
          signed_range = {uint64_t(std::min(int64_t(signed_range->first), int64_t(s))), uint64_t(std::max(int64_t(signed_range->second), int64_t(s)))};
        }
        CHECK(mcr::int_range(t.cells(), false, t.spans()) == unsigned_range);
        CHECK(mcr::int_range(t.cells(), true, t.spans()) == signed_range);
      },
      {1, 2, 4, 8});
}

// Rows that are cut, and more of them than there are threads: what several write is what one writes, and no two write the same byte.
TEST(several_threads) {
  for (auto [rows, width] : {std::pair<int64_t, int64_t>{1400, 400}, {2, 270'001}, {1, 540'000}})
    for (int64_t item : {int64_t{8}, int64_t{12}}) {
      if (item == 12 && rows == 1) continue;
      check::context = std::to_string(rows) + " rows, " + std::to_string(width) + " items of " + std::to_string(item);
      Rng rng(uint64_t(rows + item));
      Table t(rows, width, item, rng, 0);
      if (rows < 4)
        for (size_t r = 0; r < size_t(rows); ++r) t.starts[r] = 3 + int64_t(r), t.lengths[r] = width - 77 - int64_t(r);
      t.offsets = mcr::sums(t.lengths.data(), rows);
      const Item pad = random_item(size_t(item), rng), one = random_item(size_t(item), rng);
      std::vector<std::vector<std::byte>> results[2];
      for (unsigned threads : {1u, 4u}) {
        mcr::set_cores(threads);
        auto& out = results[threads > 1];
        std::vector<std::byte> packed(size_t(t.offsets.back() * item));
        mcr::pack(t.cells(), t.spans(), packed.data());
        out.push_back(packed);
        Table back = t;
        mcr::unpack(packed.data(), {t.offsets.data(), t.starts.data()}, back.cells(), pad.data());
        out.push_back(back.memory);
        CHECK(mcr::outside_is(back.cells(), t.spans(), pad.data()));
        if (item == 8) {
          std::vector<std::byte> bits(size_t(t.offsets.back() + 7) / 8), narrow(size_t(t.offsets.back()) * 4);
          mcr::pack_bits(t.cells(), t.spans(), bits.data());
          mcr::pack_ints(t.cells(), t.spans(), narrow.data(), 4);
          out.push_back(bits);
          out.push_back(narrow);
          const auto range = mcr::int_range(t.cells(), true, t.spans());
          out.push_back(number(range->first, 8));
          out.push_back(number(range->second, 8));
          mcr::unpack_bits(bits.data(), 0, {t.offsets.data(), t.starts.data()}, back.cells(), one.data(), pad.data(), one.data());
          out.push_back(back.memory);
          mcr::fill_positions(back.cells(), t.spans());
          CHECK(mcr::is_positions(back.cells(), t.spans()) && mcr::is_arange(back.cells(), t.spans()));
          out.push_back(back.memory);
        }
        std::vector<std::byte> values(size_t(rows * item), std::byte{7}), found(values.size());
        mcr::fill_spans(back.cells(), t.spans(), values.data(), zeros.data());
        CHECK(mcr::inside_constant(back.cells(), t.spans(), found.data()));
        std::vector<int64_t> starts(static_cast<size_t>(rows)), lengths(starts);
        CHECK(mcr::find_spans(back.cells(), values.data(), starts.data(), lengths.data()));
        CHECK(lengths == t.lengths);
        mcr::fill_last(back.cells(), t.spans(), values.data());
        CHECK(mcr::last_hot(back.cells(), t.spans(), found.data()));
        CHECK(!mcr::rows_equal(back.cells(), t.cells()) && mcr::rows_equal(back.cells(), back.cells()));
        CHECK(!mcr::all_equal(back.cells(), zeros.data()));
      }
      CHECK(results[0] == results[1]);
    }
  mcr::set_cores(0);
}

TEST(refusals) {
  std::vector<std::byte> memory(64);
  const auto refused = [&](int64_t start, int64_t length, int64_t stride) {
    try {
      mcr::pack({memory.data(), 1, 8, stride, 1}, {&start, &length}, memory.data());
    } catch (const std::invalid_argument& e) {
      return std::string(e.what()).starts_with("row 0: ");
    }
    return false;
  };
  CHECK(refused(-1, 1, 8) && refused(0, -1, 8) && refused(5, 4, 8) && refused(9, 0, 8) && refused(INT64_MAX, 1, 8) && refused(1, INT64_MAX, 8));
  CHECK(refused(-1, 1, 0) && refused(0, -1, 0) && !refused(8, 0, 8) && !refused(0, 8, 8) && !refused(20, 12, 0));
}

constexpr size_t kMiB = 1 << 20;

TEST(pages) {
  for (size_t bytes : {size_t{1}, 2 * kMiB, 5 * kMiB + 1}) {
    mcr::Pages::kept(true);
    mcr::Pages pages(bytes);
    CHECK_EQ(reinterpret_cast<uintptr_t>(pages.data()) % (2 * kMiB), 0u);
    CHECK(pages.data()[0] == std::byte{0} && pages.data()[bytes - 1] == std::byte{0});
    std::memset(pages.data(), 1, bytes);
  }
}

TEST(pages_are_kept_up_to_a_limit) {
  mcr::Pages::kept(true);
  const std::byte* first = nullptr;
  {
    mcr::Pages a(16 * kMiB), b(64 * kMiB);
    first = a.data();
  }
  CHECK_EQ(mcr::Pages::kept(), 80 * kMiB);
  {
    mcr::Pages much_smaller(8 * kMiB), smaller(15 * kMiB), same(16 * kMiB);
    CHECK(much_smaller.data() != first && smaller.data() == first && same.data() != first);
    CHECK_EQ(mcr::Pages::kept(), 64 * kMiB);
  }
  for (size_t n = 1; n < 100; ++n) {
    { mcr::Pages pages(n * 6 * kMiB); }
    CHECK(mcr::Pages::kept() <= mcr::Pages::kKeep);
  }
  for (size_t n = 0; n < 100; ++n) {
    std::vector<std::unique_ptr<mcr::Pages>> many;
    for (size_t i = 0; i < n; ++i) many.push_back(std::make_unique<mcr::Pages>(2 * kMiB));
  }
  CHECK_EQ(mcr::Pages::kept(), 128 * kMiB);
  mcr::Pages::kept(true);
}

TEST(pages_of_several_threads) {
  std::vector<std::jthread> users;
  for (int u = 0; u < 4; ++u)
    users.emplace_back([u] {
      for (int k = 0; k < 100; ++k) {
        mcr::Pages pages(size_t(2 + 2 * (k % 3)) * kMiB);
        auto* word = reinterpret_cast<volatile int*>(pages.data());
        *word = u;
        std::this_thread::yield();
        CHECK_EQ(*word, u);
      }
    });
  users.clear();
  mcr::Pages::kept(true);
}

}  // namespace

int main() { return check::run(); }
