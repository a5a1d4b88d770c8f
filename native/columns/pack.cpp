#include "columns/pack.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "columns/loops.h"
#include "columns/split.h"

namespace mcr {
void pack(const Cells& c, const Spans& s, std::byte* to) {
  check(c, s);
  const auto offsets = sums(s.lengths, c.rows);
  over_spans(offsets.data(), c.rows, c.item, [&](int64_t row, int64_t from, int64_t end) {
    std::memcpy(to + (offsets[size_t(row)] + from) * c.item, span_of(c, s, row) + from * c.item, size_t((end - from) * c.item));
    return true;
  });
}

void pack_ints(const Cells& c, const Spans& s, std::byte* to, int64_t to_item) {
  check(c, s);
  const int log = integer_log(c.item), to_log = integer_log(to_item);
  if (to_log > log) throw std::invalid_argument("integers of " + std::to_string(c.item) + " bytes packed to " + std::to_string(to_item));
  if (to_log == log) return pack(c, s, to);
  const auto offsets = sums(s.lengths, c.rows);
  const auto convert = loops.convert[0][log][to_log];
  over_spans(offsets.data(), c.rows, c.item, [&](int64_t row, int64_t from, int64_t end) {
    convert(span_of(c, s, row) + from * c.item, size_t(end - from), to + (offsets[size_t(row)] + from) * to_item);
    return true;
  });
}

void pack_bits(const Cells& c, const Spans& s, std::byte* to) {
  check(c, s);
  const auto to_bits = loops.to_bits[integer_log(c.item)];
  const auto offsets = sums(s.lengths, c.rows);
  over_positions(offsets.data(), c.rows, c.item, 64, [&](int64_t first, int64_t last) {  // no two pieces share a byte
    BitEnd end{reinterpret_cast<uint8_t*>(to) + first / 8};
    walk(offsets.data(), c.rows, first, last, [&](int64_t row, int64_t from, int64_t until) {
      to_bits(span_of(c, s, row) + from * c.item, size_t(until - from), end);
      return true;
    });
    std::memcpy(end.out, &end.word, (end.fill + 7) / 8);
    return true;
  });
}

void gather(const std::byte* source, const int64_t* starts, const int64_t* lengths, int64_t n, std::byte* to) {
  pack(Cells{const_cast<std::byte*>(source), n, 0, 0, 1}, {starts, lengths}, to);
}

}  // namespace mcr
