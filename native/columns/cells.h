// What the kernels work on: rows of items in memory, and a span of each row.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mcr {

// rows x width items of `item` bytes. The items of a row are adjacent; rows are `stride` bytes apart.
// With stride 0 a row is its span and nothing else: it has lengths[r] items, the first at at + starts[r] * item.
// (Where no spans are given, stride 0 means that all rows are the same memory.)
struct Cells {
  std::byte* at;
  int64_t rows, width, stride, item;
};

// Of row r, the items starts[r] … starts[r] + lengths[r] - 1.
struct Spans {
  const int64_t* starts;
  const int64_t* lengths;
};

// Throw std::invalid_argument that names row, number and limit.
void check(const Cells& cells);
void check(const Cells& cells, const Spans& spans);
// Spans whose lengths are the differences of offsets (rows + 1).
void check(const Cells& cells, const int64_t* starts, const int64_t* offsets);

// Running sums of n lengths: n + 1 offsets, the first 0.
std::vector<int64_t> sums(const int64_t* lengths, int64_t n);

// 0 … 3 for items of 1, 2, 4, 8 bytes, otherwise -1.
int log_of(int64_t item);
// The same for what has to be an integer; std::invalid_argument otherwise.
int integer_log(int64_t item);

// Where the span of a row begins.
inline std::byte* span_of(const Cells& c, const Spans& s, int64_t row) { return c.at + row * c.stride + s.starts[row] * c.item; }

// An item's bits, and what can be said of runs of items by them.
class Pattern {
 public:
  // `bits` must outlive this. nullptr: zeros.
  Pattern(const std::byte* bits, int64_t item);
  Pattern(uint64_t value, int64_t item);  // item of 1, 2, 4 or 8 bytes
  size_t first_not(const std::byte* at, size_t n) const;
  bool all(const std::byte* at, size_t n) const;
  void fill(std::byte* at, size_t n) const;

 private:
  void reduce(const std::byte* bits);
  const std::byte* bits_ = nullptr;
  size_t item_, each_;  // each_: elements of the loop in one item; 0: there is no loop for it
  int log_ = 0;
  uint64_t value_ = 0;
};

// A piece of a row that one call deals with: the columns from … to - 1. With stride 0, column 0 is where the span starts.
struct Part {
  int64_t row;
  std::byte* at;  // column 0
  int64_t from, to;
  int64_t start, length;  // of the row's span
  struct Columns {
    int64_t from, to;
    size_t size() const { return size_t(to - from); }
  };
  Columns before() const { return clip(0, start); }
  Columns inside() const { return clip(start, start + length); }
  Columns after() const { return clip(start + length, INT64_MAX); }

 private:
  Columns clip(int64_t a, int64_t b) const {
    a = a > from ? a : from;
    b = b < to ? b : to;
    return {a, b > a ? b : a};
  }
};

constexpr int64_t kPieceBytes = 512 << 10;  // what a thread takes at a time

}  // namespace mcr
