// How cells are cut into pieces for several threads: by rows, and within long rows.
#pragma once
#include <algorithm>

#include "columns/cells.h"
#include "parallel.h"

namespace mcr {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// f(first row, row after the last) -> bool, for some rows at a time.
template <class F>
bool over_rows(int64_t rows, int64_t row_bytes, F&& f) {
  const int64_t each = std::max<int64_t>(1, kPieceBytes / std::max<int64_t>(1, row_bytes));
  return parallel(size_t(ceil_div(rows, each)), threads_for(size_t(rows * row_bytes)), [&](size_t i) {
    const int64_t first = int64_t(i) * each;
    return f(first, std::min(rows, first + each));
  });
}

// All positions first … last - 1 of rows laid end to end, where row r has the positions offsets[r] … offsets[r + 1] - 1:
// f(row, from, to) for what of each row is there, from and to counted from the row's beginning.
template <class F>
bool walk(const int64_t* offsets, int64_t rows, int64_t first, int64_t last, F&& f) {
  int64_t row = std::upper_bound(offsets, offsets + rows + 1, first) - offsets - 1;
  for (; first < last; ++row) {
    const int64_t end = std::min(last, offsets[row + 1]);
    if (end > first && !f(row, first - offsets[row], end - offsets[row])) return false;
    first = std::max(first, end);
  }
  return true;
}

// f(first position, position after the last) -> bool, for positions offsets[0] … offsets[rows] - 1, cut at multiples of `align` from the first.
template <class F>
bool over_positions(const int64_t* offsets, int64_t rows, int64_t item, int64_t align, F&& f) {
  const int64_t zero = offsets[0], total = offsets[rows] - zero;
  const int64_t each = ceil_div(std::max<int64_t>(1, kPieceBytes / item), align) * align;
  return parallel(size_t(ceil_div(total, each)), threads_for(size_t(total * item)), [&](size_t i) {
    const int64_t first = zero + int64_t(i) * each;
    return f(first, std::min(zero + total, first + each));
  });
}

// f(row, from, to) -> bool, for every item of every row.
template <class F>
bool over_spans(const int64_t* offsets, int64_t rows, int64_t item, F&& f) {
  return over_positions(offsets, rows, item, 1, [&](int64_t first, int64_t last) { return walk(offsets, rows, first, last, f); });
}

// f(Part) -> bool, for all columns of all rows. length(row) is that of its span.
template <class L, class F>
bool over_cells(const Cells& c, const int64_t* starts, L&& length, F&& f) {
  if (!c.stride) {
    std::vector<int64_t> offsets(size_t(c.rows) + 1);
    for (int64_t r = 0; r < c.rows; ++r) offsets[size_t(r) + 1] = offsets[size_t(r)] + length(r);
    return over_spans(offsets.data(), c.rows, c.item, [&](int64_t row, int64_t from, int64_t to) {
      return f(Part{row, c.at + starts[row] * c.item, from, to, 0, length(row)});
    });
  }
  const int64_t row_bytes = c.width * c.item;
  if (row_bytes <= 2 * kPieceBytes) {
    return over_rows(c.rows, row_bytes, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r)
        if (!f(Part{r, c.at + r * c.stride, 0, c.width, starts[r], length(r)})) return false;
      return true;
    });
  }
  const int64_t each = std::max<int64_t>(1, kPieceBytes / c.item), pieces = ceil_div(c.width, each);
  return parallel(size_t(c.rows * pieces), threads_for(size_t(c.rows * row_bytes)), [&](size_t i) {
    const int64_t r = int64_t(i) / pieces, from = int64_t(i) % pieces * each;
    return f(Part{r, c.at + r * c.stride, from, std::min(c.width, from + each), starts[r], length(r)});
  });
}

template <class F>
bool over_cells(const Cells& c, const Spans& s, F&& f) {
  return over_cells(c, s.starts, [&](int64_t r) { return s.lengths[r]; }, f);
}

}  // namespace mcr
