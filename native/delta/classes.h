// Changes coded against what was there: the smaller an element is, the more often a step of an optimizer changes it, and by more. So elements are
// classed by their size, and each class has steps, with frequencies, of its own; and distances, too, if it is worth the time: then all elements,
// and not only those that changed, are looked at. Who decodes must have all that was there.
#pragma once
#include <cstdint>

#include "delta/symbols.h"

namespace mcr::delta {

// Which classes elements are to have.
struct Classing {
  int mantissa = -1;   // how many bits of an element are below its exponent; -1 for no classes
  bool apart = false;  // whether each class has distances of its own
};

class Classes {
 public:
  // Appends the changes from old to now, packed arrays of n elements, of which `changed` differ; false where it cannot be done, or is not worth
  // it. Throws std::bad_alloc.
  bool encode(const std::byte* old, const std::byte* now, uint64_t n, uint64_t changed, int log, Classing classing, Bytes& out);

  // The positions and the folded steps less 1 of `changed` changes, in rising order. False if these are not the bytes of as many changes of what
  // was there; not every wrong `old` is found.
  bool decode(const uint8_t* at, size_t nbytes, const std::byte* old, uint64_t n, uint64_t changed, int log, std::vector<uint32_t>& positions,
              std::vector<uint64_t>& values);

 private:
  static constexpr int kMost = 12, kAll = kMost + 1;  // limits between classes; the stream that is for all of them
  template <class T>
  bool encode(const std::byte* old, const std::byte* now, uint64_t n, uint64_t changed, Classing classing, Bytes& out);
  template <class T>
  void together(const std::byte* old, const std::byte* now, uint64_t n);
  template <class T>
  void apart(const std::byte* old, const std::byte* now, uint64_t n);
  template <class T>
  bool together(const std::byte* old, uint64_t n, std::vector<uint32_t>& positions, std::vector<uint64_t>& values);
  bool apart(const std::byte* old, uint64_t n, int log, std::vector<uint32_t>& positions, std::vector<uint64_t>& values);
  bool numbers(const uint8_t*& at, const uint8_t* end, uint32_t count, const uint32_t* bytes, int width, std::vector<uint64_t>& to);
  struct Numbers {
    Bytes distances, steps;  // symbols
    BitWriter distance_bits, step_bits;
    void distance(uint64_t v) { put(v, distances, distance_bits); }
    void step(uint64_t v) { put(v, steps, step_bits); }
    static void put(uint64_t v, Bytes& symbols, BitWriter& bits) {
      const Coded c = coded(v);
      symbols.push_back(c.symbol);
      bits.put(v, c.bits);
    }
  };
  uint64_t limits_[kMost];
  int count_ = 0;
  Numbers streams_[kAll + 1];
  Bytes gaps_, values_;
  std::vector<uint64_t> distances_, steps_;
  uint64_t first_[kMost + 2];  // of each class's steps
};

}  // namespace mcr::delta
