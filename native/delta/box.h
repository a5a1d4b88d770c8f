// Boxes of tensors: where an element of a region is in its whole tensor, and where in somebody's memory.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace mcr::delta {

// A region: a box of a whole tensor, its elements numbered in C order. And a box of that region which lies in somebody's memory.
struct Box {
  struct Dim {
    int64_t extent;  // of the region
    int64_t step;    // to the next one in the whole tensor, in elements
    int64_t lo, hi;  // of the box in the region
    int64_t stride;  // to the next one in memory, in bytes; may be negative
  };
  std::vector<Dim> dims;
  uint64_t index = 0;       // in the whole tensor, of the region's first element
  std::byte* at = nullptr;  // of the box's first element
  int log = 0;              // binary logarithm of the element size

  int64_t elements() const {
    int64_t n = 1;
    for (const Dim& d : dims) n *= d.extent;
    return n;
  }
  bool empty() const {
    return std::any_of(dims.begin(), dims.end(), [](const Dim& d) { return d.lo >= d.hi; });
  }
  // Joins what lies side by side, so that rows get as long as they can be. Dimensions of one element go.
  void simplify() {
    std::vector<Dim> out;
    for (const Dim& d : dims) {
      if (d.extent == 1 && d.lo == 0 && d.hi == 1) continue;
      if (!out.empty() && d.lo == 0 && d.hi == d.extent && out.back().step == d.step * d.extent && out.back().stride == d.stride * d.extent) {
        Dim& o = out.back();
        o = {o.extent * d.extent, d.step, o.lo * d.extent, o.hi * d.extent, d.stride};
      } else {
        out.push_back(d);
      }
    }
    if (out.empty()) out.push_back({1, 1, 0, 1, 0});
    dims = std::move(out);
  }
};

// Where positions of a region are. They may be asked for in any order; rising ones are cheap. The box must be simplified.
class Walk {
 public:
  explicit Walk(const Box& box) : box_(box) {}

  // The row that a position is in; false where no element of that row is in the box.
  bool seek(uint64_t position) {
    const Box::Dim& row = box_.dims.back();
    uint64_t rest = position / uint64_t(row.extent);
    begin = rest * uint64_t(row.extent);
    end = begin + uint64_t(row.extent);
    index = box_.index;
    at = box_.at;
    inside = true;
    for (size_t d = box_.dims.size() - 1; d-- > 0;) {
      const Box::Dim& dim = box_.dims[d];
      const int64_t c = int64_t(rest % uint64_t(dim.extent));
      rest /= uint64_t(dim.extent);
      inside &= c >= dim.lo && c < dim.hi;
      index += uint64_t(c) * uint64_t(dim.step);
      at += (c - dim.lo) * dim.stride;
    }
    lo = begin + uint64_t(row.lo), hi = begin + uint64_t(row.hi);
    return inside;
  }
  bool here(uint64_t position) const { return inside && position >= lo && position < hi; }
  uint64_t index_of(uint64_t position) const { return index + (position - begin) * uint64_t(box_.dims.back().step); }
  std::byte* address_of(uint64_t position) const { return at + int64_t(position - lo) * box_.dims.back().stride; }

  uint64_t begin = 0, end = 0;  // positions of the row
  uint64_t lo = 0, hi = 0;      // those of them that are in the box, if the row is
  bool inside = false;
  uint64_t index = 0;
  std::byte* at = nullptr;

 private:
  const Box& box_;
};

}  // namespace mcr::delta
