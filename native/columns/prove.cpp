#include "columns/prove.h"

#include <cstring>
#include <limits>
#include <mutex>
#include <stdexcept>

#include "columns/loops.h"
#include "columns/split.h"

namespace mcr {
bool find_spans(const Cells& c, const std::byte* one, int64_t* starts, int64_t* lengths) {
  check(c);
  const Pattern zeros(nullptr, c.item), ones(one, c.item);
  const size_t width = size_t(c.width);
  return over_rows(c.rows, c.width * c.item, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const std::byte* row = c.at + r * c.stride;
      const size_t start = zeros.first_not(row, width);
      starts[r] = lengths[r] = 0;
      if (start == width) continue;
      const size_t length = ones.first_not(row + start * size_t(c.item), width - start);
      const size_t end = start + length;
      if (!length || !zeros.all(row + end * size_t(c.item), width - end)) return false;
      starts[r] = int64_t(start);
      lengths[r] = int64_t(length);
    }
    return true;
  });
}

bool trim(const Cells& c, const std::byte* pad, int64_t* starts, int64_t* lengths) {
  check(c);
  constexpr size_t kBlock = 64;  // items looked at together, from the end
  const Pattern pads(pad, c.item);
  const size_t item = size_t(c.item);
  return over_rows(c.rows, c.width * c.item, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const std::byte* row = c.at + r * c.stride;
      size_t end = size_t(c.width);
      while (end >= kBlock && pads.all(row + (end - kBlock) * item, kBlock)) end -= kBlock;
      while (end && std::memcmp(row + (end - 1) * item, pad, item) == 0) --end;
      const size_t start = pads.first_not(row, end);
      starts[r] = int64_t(end ? start : 0);
      lengths[r] = int64_t(end - start);
    }
    return true;
  });
}

bool outside_is(const Cells& c, const Spans& s, const std::byte* pad) {
  check(c, s);
  const Pattern pads(pad, c.item);
  if (!c.stride) return true;
  return over_cells(c, s, [&](const Part& p) {
    const auto before = p.before(), after = p.after();
    return pads.all(p.at + before.from * c.item, before.size()) && pads.all(p.at + after.from * c.item, after.size());
  });
}

bool inside_constant(const Cells& c, const Spans& s, std::byte* values) {
  check(c, s);
  const size_t item = size_t(c.item);
  int64_t items = 0;
  for (int64_t r = 0; r < c.rows; ++r) items += s.lengths[r];
  const int64_t row_bytes = c.rows ? ceil_div(items, c.rows) * c.item : 0;
  return over_rows(c.rows, row_bytes, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      std::byte* value = values + size_t(r) * item;
      if (!s.lengths[r]) {
        std::memset(value, 0, item);
        continue;
      }
      const std::byte* span = span_of(c, s, r);
      std::memcpy(value, span, item);
      if (!Pattern(value, c.item).all(span, size_t(s.lengths[r]))) return false;
    }
    return true;
  });
}

bool last_hot(const Cells& c, const Spans& s, std::byte* values) {
  check(c, s);
  const Pattern zeros(nullptr, c.item);
  const size_t item = size_t(c.item);
  for (int64_t r = 0; r < c.rows; ++r)
    if (s.lengths[r])
      std::memcpy(values + size_t(r) * item, span_of(c, s, r) + (s.lengths[r] - 1) * c.item, item);
    else
      std::memset(values + size_t(r) * item, 0, item);
  return over_cells(c, s, [&](const Part& p) {
    const int64_t hot = p.length ? p.start + p.length - 1 : p.to;
    const int64_t before = std::clamp(hot, p.from, p.to), after = std::clamp(hot + 1, p.from, p.to);
    return zeros.all(p.at + p.from * c.item, size_t(before - p.from)) && zeros.all(p.at + after * c.item, size_t(p.to - after));
  });
}

bool is_positions(const Cells& c, const Spans& s) {
  check(c, s);
  const int log = integer_log(c.item);
  const Pattern zeros(nullptr, c.item);
  return over_cells(c, s, [&](const Part& p) {
    const auto before = p.before(), inside = p.inside(), after = p.after();
    return zeros.all(p.at + before.from * c.item, before.size()) &&
           loops.counts_up[log](p.at + inside.from * c.item, inside.size(), uint64_t(inside.from - p.start)) &&
           Pattern(uint64_t(std::max<int64_t>(0, p.length - 1)), c.item).all(p.at + after.from * c.item, after.size());
  });
}

bool is_arange(const Cells& c, const Spans& s) {
  check(c, s);
  const int log = integer_log(c.item);
  return over_spans(sums(s.lengths, c.rows).data(), c.rows, c.item, [&](int64_t row, int64_t from, int64_t to) {
    return loops.counts_up[log](span_of(c, s, row) + from * c.item, size_t(to - from), uint64_t(from));
  });
}

bool rows_equal(const Cells& a, const Cells& b) {
  check(a);
  check(b);
  if (a.rows != b.rows || a.width != b.width || a.item != b.item) throw std::invalid_argument("cells of different rows, width or item");
  const int64_t row_bytes = a.width * a.item;
  const bool dense = a.stride == row_bytes && b.stride == row_bytes;
  const Cells one{a.at, dense ? 1 : a.rows, dense ? a.rows * row_bytes : row_bytes, 0, 1};
  const int64_t pieces = std::max<int64_t>(1, ceil_div(one.width, kPieceBytes));
  // Many short rows to a piece, or many pieces to a long row.
  if (pieces == 1)
    return over_rows(one.rows, one.width, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r)
        if (std::memcmp(a.at + r * a.stride, b.at + r * b.stride, size_t(one.width))) return false;
      return true;
    });
  return parallel(size_t(one.rows * pieces), threads_for(size_t(one.rows * one.width)), [&](size_t i) {
    const int64_t r = int64_t(i) / pieces, from = int64_t(i) % pieces * kPieceBytes;
    const size_t n = size_t(std::min(kPieceBytes, one.width - from));
    return std::memcmp(a.at + r * a.stride + from, b.at + r * b.stride + from, n) == 0;
  });
}

bool all_equal(const Cells& c, const std::byte* value) {
  check(c);
  const Pattern values(value, c.item);
  Cells flat = c;
  if (c.stride == c.width * c.item) flat.rows = 1, flat.width = c.rows * c.width;
  const int64_t each = std::max<int64_t>(1, kPieceBytes / c.item), pieces = std::max<int64_t>(1, ceil_div(flat.width, each));
  if (pieces == 1)
    return over_rows(flat.rows, flat.width * c.item, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r)
        if (!values.all(c.at + r * c.stride, size_t(flat.width))) return false;
      return true;
    });
  return parallel(size_t(flat.rows * pieces), threads_for(size_t(flat.rows * flat.width * c.item)), [&](size_t i) {
    const int64_t r = int64_t(i) / pieces, from = int64_t(i) % pieces * each;
    return values.all(c.at + r * c.stride + from * c.item, size_t(std::min(each, flat.width - from)));
  });
}

namespace {

template <class Wide>
std::optional<std::pair<uint64_t, uint64_t>> range_as(const Cells& c, const Spans& s) {
  const int log = integer_log(c.item);
  const auto offsets = sums(s.lengths, c.rows);
  if (!offsets.back()) return std::nullopt;
  Wide lo = std::numeric_limits<Wide>::max(), hi = std::numeric_limits<Wide>::min();
  std::mutex mutex;
  over_positions(offsets.data(), c.rows, c.item, 1, [&](int64_t first, int64_t last) {
    Wide low = std::numeric_limits<Wide>::max(), high = std::numeric_limits<Wide>::min();
    walk(offsets.data(), c.rows, first, last, [&](int64_t row, int64_t from, int64_t to) {
      loops.range[std::is_signed_v<Wide>][log](span_of(c, s, row) + from * c.item, size_t(to - from), &low, &high);
      return true;
    });
    const std::lock_guard lock(mutex);
    lo = std::min(lo, low);
    hi = std::max(hi, high);
    return true;
  });
  return std::pair{uint64_t(lo), uint64_t(hi)};
}

}  // namespace

std::optional<std::pair<uint64_t, uint64_t>> int_range(const Cells& c, bool is_signed, const Spans& s) {
  check(c, s);
  return is_signed ? range_as<int64_t>(c, s) : range_as<uint64_t>(c, s);
}

}  // namespace mcr
