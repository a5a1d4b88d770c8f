#include "delta/digest.h"

#include <atomic>
#include <cstring>

#include "delta/loops.h"
#include "delta/terms.h"
#include "parallel.h"

namespace mcr::delta {
namespace {

constexpr uint64_t kPiece = 1 << 20;  // elements

// Elements that are apart are brought together first, some at a time.
template <class T>
uint64_t strided(const std::byte* at, size_t n, int64_t stride, uint64_t index, int64_t step) {
  uint64_t sum = 0;
  if (step != 1) {
    for (size_t j = 0; j < n; ++j, at += stride, index += uint64_t(step)) {
      T v;
      std::memcpy(&v, at, sizeof v);
      sum += term(v, index);
    }
    return sum;
  }
  T some[512];
  while (n) {
    const size_t m = std::min(n, std::size(some));
    for (size_t j = 0; j < m; ++j, at += stride) std::memcpy(&some[j], at, sizeof(T));
    sum += loops.digest[std::countr_zero(sizeof(T))](some, m, index);
    n -= m, index += m;
  }
  return sum;
}

uint64_t row(const Box& box, const Walk& walk, uint64_t from, uint64_t to) {
  const Box::Dim& d = box.dims.back();
  const std::byte* at = walk.address_of(from);
  const size_t n = size_t(to - from);
  const uint64_t index = walk.index_of(from);
  if (d.step == 1 && d.stride == int64_t{1} << box.log) return loops.digest[box.log](at, n, index);
  switch (box.log) {
    case 0: return strided<uint8_t>(at, n, d.stride, index, d.step);
    case 1: return strided<uint16_t>(at, n, d.stride, index, d.step);
    case 2: return strided<uint32_t>(at, n, d.stride, index, d.step);
    default: return strided<uint64_t>(at, n, d.stride, index, d.step);
  }
}

}  // namespace

uint64_t digest(Box box) {
  if (box.empty()) return 0;
  for (Box::Dim& d : box.dims) {  // only what is in the box
    box.index += uint64_t(d.lo) * uint64_t(d.step);
    d.extent = d.hi - d.lo;
    d.lo = 0, d.hi = d.extent;
  }
  box.simplify();
  const uint64_t n = uint64_t(box.elements());
  std::atomic<uint64_t> sum{0};
  parallel(size_t((n + kPiece - 1) / kPiece), threads_for(size_t(n) << box.log), [&](size_t piece) {
    const uint64_t end = std::min(n, (piece + 1) * kPiece);
    Walk walk(box);
    uint64_t mine = 0;
    for (uint64_t at = piece * kPiece; at < end; at = walk.end) {
      walk.seek(at);
      mine += row(box, walk, at, std::min(end, walk.end));
    }
    sum.fetch_add(mine, std::memory_order_relaxed);
    return true;
  });
  return sum;
}

uint64_t checksum(const void* at, size_t nbytes) {
  const size_t words = nbytes / 4;
  uint64_t sum = loops.digest[2](at, words, 0);
  if (nbytes % 4) {
    uint32_t last = 0;
    std::memcpy(&last, static_cast<const std::byte*>(at) + 4 * words, nbytes % 4);
    sum += term(last, uint64_t(words));
  }
  return sum;
}

}  // namespace mcr::delta
