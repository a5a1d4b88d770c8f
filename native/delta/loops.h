// The innermost loops, for elements of 1, 2, 4 and 8 bytes, in the best version this processor has. Addresses need no alignment.
#pragma once
#include <cstddef>
#include <cstdint>

namespace mcr::delta {

// Indexed by the binary logarithm of the element size.
struct Loops {
  // The sum of the terms of n adjacent elements, the first of which has that index.
  uint64_t (*digest[4])(const void* at, size_t n, uint64_t index);
  // A bit for each of n elements, in (n + 63) / 64 words: whether the two differ. Returns whether any do.
  bool (*differ[4])(const void* a, const void* b, size_t n, uint64_t* bits);
  // A bit for each of n elements: whether it is at least the limit, without its uppermost bit.
  void (*at_least[4])(const void* at, size_t n, uint64_t limit, uint64_t* bits);
  // Of so many words: those bits of `some` that are not in `others`, and how many of them a word has.
  void (*without)(const uint64_t* some, const uint64_t* others, size_t words, uint64_t* bits, uint8_t* counts);
};

extern const Loops kBaseLoops;
#if defined(__x86_64__)
extern const Loops kAvx2Loops, kAvx512Loops;
#endif
extern const Loops& loops;

}  // namespace mcr::delta
