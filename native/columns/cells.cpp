#include "columns/cells.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "columns/loops.h"

namespace mcr {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void check_span(const Cells& c, int64_t row, int64_t start, int64_t length) {
  if (start < 0 || length < 0) refuse("row " + std::to_string(row) + ": start " + std::to_string(start) + ", length " + std::to_string(length));
  if (c.stride && (start > c.width || length > c.width - start))
    refuse("row " + std::to_string(row) + ": start " + std::to_string(start) + " and length " + std::to_string(length) + " exceed the width of " +
           std::to_string(c.width));
}

}  // namespace

void check(const Cells& c) {
  if (c.rows < 0 || c.width < 0) refuse("cells of " + std::to_string(c.rows) + " rows, width " + std::to_string(c.width));
  if (c.item < 1) refuse("an item of " + std::to_string(c.item) + " bytes");
}

void check(const Cells& c, const Spans& s) {
  check(c);
  for (int64_t r = 0; r < c.rows; ++r) check_span(c, r, s.starts[r], s.lengths[r]);
}

void check(const Cells& c, const int64_t* starts, const int64_t* offsets) {
  check(c);
  if (offsets[0] < 0) refuse("offset 0 is " + std::to_string(offsets[0]));
  for (int64_t r = 0; r < c.rows; ++r) {
    if (offsets[r + 1] < offsets[r]) refuse("offset " + std::to_string(r + 1) + " is less than the one before it");
    check_span(c, r, starts[r], offsets[r + 1] - offsets[r]);
  }
}

std::vector<int64_t> sums(const int64_t* lengths, int64_t n) {
  std::vector<int64_t> result(size_t(n) + 1);
  for (int64_t i = 0; i < n; ++i) result[size_t(i) + 1] = result[size_t(i)] + lengths[i];
  return result;
}

int log_of(int64_t item) { return item == 1 ? 0 : item == 2 ? 1 : item == 4 ? 2 : item == 8 ? 3 : -1; }

int integer_log(int64_t item) {
  const int log = log_of(item);
  if (log < 0) throw std::invalid_argument("an integer of " + std::to_string(item) + " bytes; 1, 2, 4 or 8 were expected");
  return log;
}

Pattern::Pattern(const std::byte* bits, int64_t item) : bits_(bits), item_(size_t(item)), each_(item_) {
  if (bits) reduce(bits);
}

Pattern::Pattern(uint64_t value, int64_t item) : item_(size_t(item)), each_(1), log_(log_of(item)), value_(value) {}

void Pattern::reduce(const std::byte* bits) {
  if (std::memcmp(bits, bits + 1, item_ - 1) == 0) {  // one byte, again and again
    value_ = uint64_t(bits[0]);
    return;
  }
  log_ = log_of(int64_t(item_));
  each_ = log_ >= 0;
  if (each_) std::memcpy(&value_, bits, item_);
}

size_t Pattern::first_not(const std::byte* at, size_t n) const {
  if (each_) return loops.first_not[log_](at, n * each_, value_) / each_;
  size_t i = 0;
  while (i < n && std::memcmp(at + i * item_, bits_, item_) == 0) ++i;
  return i;
}

bool Pattern::all(const std::byte* at, size_t n) const {
  if (each_) return loops.first_not[log_](at, n * each_, value_) == n * each_;
  return !n || (std::memcmp(at, bits_, item_) == 0 && std::memcmp(at, at + item_, (n - 1) * item_) == 0);
}

void Pattern::fill(std::byte* at, size_t n) const {
  if (!n) return;
  if (each_ && log_ == 0) {
    std::memset(at, int(value_), n * each_);
  } else if (each_) {
    loops.fill[log_](at, n, value_);
  } else {
    const size_t bytes = n * item_;
    std::memcpy(at, bits_, item_);
    for (size_t done = item_; done < bytes; done *= 2) std::memcpy(at + done, at, std::min(done, bytes - done));
  }
}

}  // namespace mcr
