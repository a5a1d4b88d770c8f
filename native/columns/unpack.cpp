#include "columns/unpack.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "columns/loops.h"
#include "columns/split.h"

namespace mcr {
namespace {

// put(to, number of the first value, how many).
template <class F>
void place(const Ragged& ragged, const Cells& c, const std::byte* pad, F&& put) {
  const Pattern pads(pad, c.item);
  const int64_t* offsets = ragged.offsets;
  over_cells(c, ragged.starts, [&](int64_t r) { return offsets[r + 1] - offsets[r]; }, [&](const Part& p) {
    const auto before = p.before(), inside = p.inside(), after = p.after();
    pads.fill(p.at + before.from * c.item, before.size());
    if (inside.size()) put(p.at + inside.from * c.item, offsets[p.row] + inside.from - p.start, inside.size());
    pads.fill(p.at + after.from * c.item, after.size());
    return true;
  });
}

}  // namespace

void unpack(const std::byte* values, const Ragged& ragged, const Cells& c, const std::byte* pad) {
  check(c, ragged.starts, ragged.offsets);
  place(ragged, c, pad, [&](std::byte* to, int64_t first, size_t n) { std::memcpy(to, values + first * c.item, n * size_t(c.item)); });
}

void unpack_ints(const std::byte* values, int64_t from_item, bool from_signed, const Ragged& ragged, const Cells& c, const std::byte* pad) {
  check(c, ragged.starts, ragged.offsets);
  const int log = integer_log(from_item), to_log = integer_log(c.item);
  if (log > to_log) throw std::invalid_argument("integers of " + std::to_string(from_item) + " bytes unpacked to " + std::to_string(c.item));
  if (log == to_log) return unpack(values, ragged, c, pad);
  const auto convert = loops.convert[from_signed][log][to_log];
  place(ragged, c, pad, [&](std::byte* to, int64_t first, size_t n) { convert(values + first * from_item, n, to); });
}

void unpack_bits(const std::byte* values, int64_t bit, const Ragged& ragged, const Cells& c, const std::byte* one, const std::byte* zero,
                 const std::byte* pad) {
  check(c, ragged.starts, ragged.offsets);
  if (bit < 0) throw std::invalid_argument("bit " + std::to_string(bit));
  const auto from_bits = loops.from_bits[integer_log(c.item)];
  uint64_t one_value = 0, zero_value = 0;
  std::memcpy(&one_value, one, size_t(c.item));
  std::memcpy(&zero_value, zero, size_t(c.item));
  place(ragged, c, pad, [&](std::byte* to, int64_t first, size_t n) {
    from_bits(reinterpret_cast<const uint8_t*>(values), size_t(bit + first), n, to, one_value, zero_value);
  });
}

void fill_spans(const Cells& c, const Spans& s, const std::byte* inside, const std::byte* outside) {
  check(c, s);
  const Pattern others(outside, c.item);
  over_cells(c, s, [&](const Part& p) {
    const auto before = p.before(), in = p.inside(), after = p.after();
    others.fill(p.at + before.from * c.item, before.size());
    Pattern(inside + p.row * c.item, c.item).fill(p.at + in.from * c.item, in.size());
    others.fill(p.at + after.from * c.item, after.size());
    return true;
  });
}

void fill_last(const Cells& c, const Spans& s, const std::byte* values) {
  check(c, s);
  const Pattern zeros(nullptr, c.item);
  over_cells(c, s, [&](const Part& p) {
    zeros.fill(p.at + p.from * c.item, size_t(p.to - p.from));
    const int64_t last = p.start + p.length - 1;
    if (p.length && last >= p.from && last < p.to) std::memcpy(p.at + last * c.item, values + p.row * c.item, size_t(c.item));
    return true;
  });
}

void fill_positions(const Cells& c, const Spans& s) {
  check(c, s);
  const int log = integer_log(c.item);
  over_cells(c, s, [&](const Part& p) {
    const auto before = p.before(), inside = p.inside(), after = p.after();
    loops.fill[log](p.at + before.from * c.item, before.size(), 0);
    loops.count_up[log](p.at + inside.from * c.item, inside.size(), uint64_t(inside.from - p.start));
    loops.fill[log](p.at + after.from * c.item, after.size(), uint64_t(std::max<int64_t>(0, p.length - 1)));
    return true;
  });
}

}  // namespace mcr
