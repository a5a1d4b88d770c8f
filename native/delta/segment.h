// The changes of one segment: adjacent elements of a region, numbered from 0. A change is a step: new - old, as unsigned integers of the element's
// size, modulo 2^(8 x size). So any bits come back exactly, changes of changes are sums, and taking one back is adding its negative.
#pragma once
#include "delta/box.h"
#include "delta/classes.h"
#include "delta/symbols.h"

namespace mcr::delta {

// How many elements a segment has, given those of the region's rows (its first dimension): whole rows, where they are not too long.
uint64_t segment_elements(uint64_t row_elements);

constexpr uint64_t kMostElements = uint64_t{1} << 21;

struct Change {
  uint64_t changed = 0;  // elements
  uint64_t digest = 0;   // what is to be added to the digest of the old ones for that of the new ones
};

// Appends the steps from old to now, two packed arrays of n elements; nothing if they are equal. `old`: nullptr for zeros.
// `index`: of the region's elements; `first`: the segment's first one. `classing`: only where those who decode have all of `old`. Throws
// std::bad_alloc.
class Encoder {
 public:
  Change encode(const std::byte* old, const std::byte* now, uint64_t n, int log, const Box& index, uint64_t first, Classing classing, Bytes& out);

 private:
  template <class T>
  Change encode(const std::byte* old, const std::byte* now, uint64_t n, const Box& index, uint64_t first, Classing classing, Bytes& out);
  template <class T>
  Change sparse(const std::byte* old, const std::byte* now, uint64_t n, uint64_t most, const Box& index, uint64_t first);
  template <class T>
  Change recount(const std::byte* old, const std::byte* now, uint64_t n, const Box& index, uint64_t first);
  template <class T>
  void dense(const std::byte* old, const std::byte* now, uint64_t n, Bytes& out);
  Bytes gaps_, values_;  // as long as each other
  BitWriter bits_;
  Bytes plane_, other_;
  Classes classes_;
};

// Steps as they are applied: of some elements, or of all of them.
class Decoder {
 public:
  // False if these are not the bytes of `changed` of n elements. n is at most kMostElements. `old`: those n elements, packed; nullptr where they
  // are not there, and then segments that are coded against them cannot be decoded.
  bool decode(const uint8_t* at, size_t nbytes, uint64_t n, uint64_t changed, int log, const std::byte* old);

  // Gives back memory that only decoding needs.
  void forget() {
    classes_ = {};
    symbols_ = {}, more_ = {};
  }

  // Calls take(position, step, later) in rising order; `later` is a position that will come soon.
  template <class F>
  void each(F&& take) const {
    if (!dense_) {
      constexpr size_t kAhead = 16;
      const size_t n = positions_.size();
      for (size_t i = 0; i < n; ++i) take(uint64_t{positions_[i]}, steps_[i], uint64_t{positions_[std::min(i + kAhead, n - 1)]});
      return;
    }
    for (uint64_t i = 0; i < n_; ++i) {
      uint64_t step = 0;
      std::memcpy(&step, &raw_[i << log_], size_t{1} << log_);
      if (step) take(i, step, i);
    }
  }

 private:
  bool sparse(const uint8_t* at, size_t nbytes, uint64_t changed);
  bool classed(const uint8_t* at, size_t nbytes, uint64_t changed, const std::byte* old);
  bool planes(const uint8_t* at, size_t nbytes);
  uint64_t n_ = 0;
  int log_ = 0;
  bool dense_ = false;
  std::vector<uint32_t> positions_;
  std::vector<uint64_t> steps_;
  Bytes raw_, symbols_, more_;
  Classes classes_;
};

// Whether a segment is coded against what was there.
bool needs_old(const uint8_t* at, size_t nbytes);

}  // namespace mcr::delta
