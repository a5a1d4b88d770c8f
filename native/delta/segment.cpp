#include "delta/segment.h"

#include <array>

#include "delta/loops.h"
#include "delta/terms.h"

namespace mcr::delta {
namespace {

// Which of them the first byte says.
enum Form : uint8_t {
  kSparse,  // [u32 gap bytes][u32 value bytes][gap symbols][value symbols][the bits after either]: the distance from the change before, and the step
  kRaw,     // all steps
  kPlanes,  // for each byte of an element: [u32 bytes][symbols]: that byte of all steps
  kClassed, // see classes.cpp
};

constexpr uint64_t kBlock = 4096;   // elements that are compared at a time
constexpr uint64_t kDenseFrom = 4;  // more changes than one in so many are coded densely
alignas(64) constexpr std::array<std::byte, kBlock * 8> kZeros{};

// Small steps of either sign as small numbers.
template <class T>
T folded(T step) {
  return T(T(step << 1) ^ T(0 - (step >> (8 * sizeof(T) - 1))));
}
template <class T>
T unfolded(T v) {
  return T(T(v >> 1) ^ T(0 - (v & 1)));
}

void put_u32(size_t at, size_t v, Bytes& out) {
  const uint32_t small = uint32_t(v);
  std::memcpy(&out[at], &small, 4);
}

template <class T>
T load(const std::byte* at) {
  T v;
  std::memcpy(&v, at, sizeof v);
  return v;
}

}  // namespace

uint64_t segment_elements(uint64_t row_elements) {
  if (!row_elements || row_elements > kMostElements) return kMostElements;
  return kMostElements / row_elements * row_elements;
}

template <class T>
void Encoder::dense(const std::byte* old, const std::byte* now, uint64_t n, Bytes& out) {
  const size_t begin = out.size();
  auto step = [&](uint64_t i) { return T(load<T>(now + i * sizeof(T)) - (old ? load<T>(old + i * sizeof(T)) : T{0})); };
  out.push_back(kPlanes);
  plane_.resize(n);
  for (size_t plane = 0; plane < sizeof(T); ++plane) {
    for (uint64_t i = 0; i < n; ++i) plane_[i] = uint8_t(folded(step(i)) >> (8 * plane));
    const size_t at = out.size();
    out.resize(at + 4);
    put_symbols(plane_.data(), n, out);
    put_u32(at, out.size() - at - 4, out);
  }
  if (out.size() - begin <= n * sizeof(T)) return;
  out.resize(begin);
  out.push_back(kRaw);
  out.resize(begin + 1 + n * sizeof(T));
  for (uint64_t i = 0; i < n; ++i) {
    const T s = step(i);
    std::memcpy(&out[begin + 1 + i * sizeof(T)], &s, sizeof s);
  }
}

template <class T>
Change Encoder::sparse(const std::byte* old, const std::byte* now, uint64_t n, uint64_t most, const Box& index, uint64_t first) {
  Change change;
  Walk walk(index);
  uint64_t end = 0;   // of the walk's row, as a position of the segment
  uint64_t next = 0;  // the first position after the last change
  bits_ = {};
  for (uint64_t at = 0; at < n; at += kBlock) {
    const uint64_t m = std::min(kBlock, n - at);
    uint64_t differ[kBlock / 64];
    const std::byte *a = old ? old + at * sizeof(T) : kZeros.data(), *b = now + at * sizeof(T);
    if (!loops.differ[std::countr_zero(sizeof(T))](a, b, m, differ)) continue;
    if (gaps_.size() < change.changed + m) {
      const size_t size = std::max<size_t>(change.changed + m, 2 * gaps_.size());
      gaps_.resize(size), values_.resize(size);
    }
    for (uint64_t w = 0; w * 64 < m; ++w)
      for (uint64_t left = differ[w]; left; left &= left - 1) {
        const uint64_t j = w * 64 + uint64_t(std::countr_zero(left)), position = at + j;
        const T was = load<T>(a + j * sizeof(T)), is = load<T>(b + j * sizeof(T));
        const uint64_t gap = position - next, value = T(folded(T(is - was)) - 1);
        const Coded g = coded(gap), v = coded(value);
        gaps_[change.changed] = g.symbol, values_[change.changed] = v.symbol;
        ++change.changed;
        bits_.put(gap, g.bits);
        bits_.put(value, v.bits);
        next = position + 1;
        if (position >= end) {
          walk.seek(first + position);
          end = walk.end - first;
        }
        const uint64_t i = walk.index_of(first + position);
        change.digest += term(is, i) - term(was, i);
      }
    if (change.changed > most) break;
  }
  bits_.end();
  return change;
}

template <class T>
Change Encoder::encode(const std::byte* old, const std::byte* now, uint64_t n, const Box& index, uint64_t first, Classing classing, Bytes& out) {
  const uint64_t most = std::max<uint64_t>(n / kDenseFrom, 16);
  Change change = sparse<T>(old, now, n, most, index, first);
  if (!change.changed) return change;
  if (change.changed <= most) {
    const size_t begin = out.size(), head = begin + 1;
    out.push_back(kSparse);
    out.resize(head + 8);
    put_symbols(gaps_.data(), change.changed, out);
    const size_t middle = out.size();
    put_symbols(values_.data(), change.changed, out);
    put_u32(head, middle - head - 8, out);
    put_u32(head + 4, out.size() - middle, out);
    out.insert(out.end(), bits_.out.begin(), bits_.out.end());
    if (classing.mantissa >= 0 && old) {
      other_.assign(1, kClassed);
      if (classes_.encode(old, now, n, change.changed, std::countr_zero(sizeof(T)), classing, other_) && other_.size() < out.size() - begin) {
        out.resize(begin);
        out.insert(out.end(), other_.begin(), other_.end());
      }
    }
    if (out.size() - begin <= n * sizeof(T)) return change;
    out.resize(begin);
  }
  dense<T>(old, now, n, out);
  return recount<T>(old, now, n, index, first);
}

// Of many changes: all elements are looked at.
template <class T>
Change Encoder::recount(const std::byte* old, const std::byte* now, uint64_t n, const Box& index, uint64_t first) {
  constexpr int kLog = std::countr_zero(sizeof(T));
  Change change;
  Walk walk(index);
  uint64_t differ[kBlock / 64];
  const bool adjacent = index.dims.back().step == 1;
  for (uint64_t at = 0, m; at < n; at += m) {
    if (first + at >= walk.end) walk.seek(first + at);
    m = std::min({kBlock, n - at, walk.end - first - at});
    const std::byte *a = old ? old + at * sizeof(T) : kZeros.data(), *b = now + at * sizeof(T);
    if (!loops.differ[kLog](a, b, m, differ)) continue;
    for (uint64_t w = 0; w * 64 < m; ++w) change.changed += uint64_t(std::popcount(differ[w]));
    const uint64_t i = walk.index_of(first + at);
    if (adjacent) {
      change.digest += loops.digest[kLog](b, m, i) - loops.digest[kLog](a, m, i);
    } else {
      for (uint64_t j = 0; j < m; ++j) {
        const uint64_t k = i + j * uint64_t(index.dims.back().step);
        change.digest += term(load<T>(b + j * sizeof(T)), k) - term(load<T>(a + j * sizeof(T)), k);
      }
    }
  }
  return change;
}

Change Encoder::encode(const std::byte* old, const std::byte* now, uint64_t n, int log, const Box& index, uint64_t first, Classing classing,
                       Bytes& out) {
  switch (log) {
    case 0: return encode<uint8_t>(old, now, n, index, first, classing, out);
    case 1: return encode<uint16_t>(old, now, n, index, first, classing, out);
    case 2: return encode<uint32_t>(old, now, n, index, first, classing, out);
    default: return encode<uint64_t>(old, now, n, index, first, classing, out);
  }
}

// ---- decoding: nothing of what comes is believed

bool Decoder::sparse(const uint8_t* at, size_t nbytes, uint64_t changed) {
  if (nbytes < 8) return false;
  uint32_t sizes[2];
  std::memcpy(sizes, at, 8);
  at += 8, nbytes -= 8;
  if (uint64_t{sizes[0]} + sizes[1] > nbytes) return false;
  symbols_.resize(changed), more_.resize(changed), positions_.resize(changed), steps_.resize(changed);
  if (!get_symbols(at, sizes[0], changed, symbols_.data())) return false;
  at += sizes[0], nbytes -= sizes[0];
  if (!get_symbols(at, sizes[1], changed, more_.data())) return false;
  at += sizes[1], nbytes -= sizes[1];
  BitReader bits(at, nbytes);
  const unsigned width = 8u << log_;
  const uint64_t mask = ~uint64_t{0} >> (64 - width);
  uint64_t next = 0;
  for (uint64_t i = 0; i < changed; ++i) {
    const uint8_t g = symbols_[i], v = more_[i];
    if (bits_after(g) > 32 || bits_after(v) >= width) return false;
    const uint64_t position = next + first_of(g) + bits.get(bits_after(g));
    const uint64_t value = first_of(v) + bits.get(bits_after(v)) + 1;
    if (position >= n_ || value - 1 >= mask) return false;
    positions_[i] = uint32_t(position);
    steps_[i] = unfolded(value) & mask;
    next = position + 1;
  }
  return bits.whole();
}

bool Decoder::classed(const uint8_t* at, size_t nbytes, uint64_t changed, const std::byte* old) {
  if (!old || !classes_.decode(at, nbytes, old, n_, changed, log_, positions_, steps_)) return false;
  const uint64_t mask = ~uint64_t{0} >> (64 - (8u << log_));
  for (uint64_t& step : steps_) {
    if (step >= mask) return false;
    step = unfolded(step + 1) & mask;
  }
  return true;
}

bool Decoder::planes(const uint8_t* at, size_t nbytes) {
  const size_t size = size_t{1} << log_;
  raw_.assign(n_ << log_, 0);
  symbols_.resize(n_);
  for (size_t plane = 0; plane < size; ++plane) {
    uint32_t length;
    if (nbytes < 4) return false;
    std::memcpy(&length, at, 4);
    at += 4, nbytes -= 4;
    if (length > nbytes || !get_symbols(at, length, n_, symbols_.data())) return false;
    at += length, nbytes -= length;
    for (uint64_t i = 0; i < n_; ++i) raw_[(i << log_) + plane] = symbols_[i];
  }
  auto unfold = [&]<class T>(T) {
    for (uint64_t i = 0; i < n_; ++i) {
      const T step = unfolded(load<T>(reinterpret_cast<std::byte*>(&raw_[i << log_])));
      std::memcpy(&raw_[i << log_], &step, sizeof step);
    }
  };
  switch (log_) {
    case 0: unfold(uint8_t{}); break;
    case 1: unfold(uint16_t{}); break;
    case 2: unfold(uint32_t{}); break;
    default: unfold(uint64_t{});
  }
  return nbytes == 0;
}

bool Decoder::decode(const uint8_t* at, size_t nbytes, uint64_t n, uint64_t changed, int log, const std::byte* old) {
  n_ = n, log_ = log, dense_ = false;
  positions_.clear(), steps_.clear();
  if (!nbytes || n > kMostElements || !changed || changed > n) return false;
  const uint8_t form = *at++;
  --nbytes;
  if (form == kSparse) return sparse(at, nbytes, changed);
  if (form == kClassed) return classed(at, nbytes, changed, old);
  dense_ = true;
  if (form == kPlanes) {
    if (!planes(at, nbytes)) return false;
  } else {
    if (form != kRaw || nbytes != n << log) return false;
    raw_.assign(at, at + nbytes);
  }
  uint64_t there = 0;
  each([&](uint64_t, uint64_t, uint64_t) { ++there; });
  return there == changed;
}

bool needs_old(const uint8_t* at, size_t nbytes) { return nbytes && *at == kClassed; }

}  // namespace mcr::delta
