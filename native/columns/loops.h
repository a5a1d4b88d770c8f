// The innermost loops, for items of 1, 2, 4 and 8 bytes, in the best version this processor has. Addresses need no alignment.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

namespace mcr {

static_assert(std::endian::native == std::endian::little);

// A bit string in the making, first bit lowest. `word` holds the `fill` bits (0 … 63) that come next at `out`.
struct BitEnd {
  uint8_t* out;
  uint64_t word = 0;
  unsigned fill = 0;
};

// Indexed by the binary logarithm of the item size. Values are the item's bits, as the low ones of a uint64_t.
struct Loops {
  // The index of the first item that is not `value`; n if there is none.
  size_t (*first_not[4])(const void* at, size_t n, uint64_t value);
  // Whether the items are from, from + 1, …, modulo the item's size.
  bool (*counts_up[4])(const void* at, size_t n, uint64_t from);
  void (*fill[4])(void* at, size_t n, uint64_t value);
  void (*count_up[4])(void* at, size_t n, uint64_t from);
  // Widens [*lo, *hi] (int64_t if is_signed, otherwise uint64_t) to hold the items.
  void (*range[2][4])(const void* at, size_t n, void* lo, void* hi);
  // [from_signed][from][to]
  void (*convert[2][4][4])(const void* at, size_t n, void* to);
  // Appends a bit for each item: whether it is not 0.
  void (*to_bits[4])(const void* at, size_t n, BitEnd& end);
  // An item for each of the bits bit … bit + n - 1 of the bit string: one or zero.
  void (*from_bits[4])(const uint8_t* bits, size_t bit, size_t n, void* to, uint64_t one, uint64_t zero);
};

extern const Loops kBaseLoops;
#if defined(__x86_64__)
extern const Loops kAvx2Loops;
#endif
extern const Loops& loops;

}  // namespace mcr
