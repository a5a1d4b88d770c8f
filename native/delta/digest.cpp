#include "delta/digest.h"

#include <atomic>
#include <cstring>

#include "delta/loops.h"
#include "delta/shares.h"
#include "delta/terms.h"

namespace mcr::delta {
namespace {

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

std::vector<uint64_t> digests(std::vector<Box> boxes) {
  Shares shares;
  for (Box& box : boxes) {
    if (box.empty()) {
      shares.add(0, 0);
      continue;
    }
    for (Box::Dim& d : box.dims) {  // only what is in the box
      box.index += uint64_t(d.lo) * uint64_t(d.step);
      d.extent = d.hi - d.lo;
      d.lo = 0, d.hi = d.extent;
    }
    box.simplify();
    shares.add(uint64_t(box.elements()), size_t{1} << box.log);
  }
  std::vector<uint64_t> out(boxes.size());
  shares.run([&](size_t number, uint64_t from, uint64_t to) {
    Walk walk(boxes[number]);
    uint64_t mine = 0;
    for (uint64_t at = from; at < to; at = walk.end) {
      walk.seek(at);
      mine += row(boxes[number], walk, at, std::min(to, walk.end));
    }
    std::atomic_ref(out[number]).fetch_add(mine, std::memory_order_relaxed);
  });
  return out;
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
