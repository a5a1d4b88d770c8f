#include "delta/classes.h"

#include <array>

#include "delta/loops.h"

namespace mcr::delta {
namespace {

constexpr uint64_t kBlock = 4096;   // elements that are looked at together
constexpr uint64_t kSample = 4096;  // elements by which limits are chosen
constexpr uint64_t kNever = uint64_t{1} << 62;  // more elements than there are
constexpr uint64_t kFew = 100;      // changes that a class is worth its frequencies for

template <class T>
T load(const std::byte* at) {
  T v;
  std::memcpy(&v, at, sizeof v);
  return v;
}

template <class T>
T folded(T step) {
  return T(T(step << 1) ^ T(0 - (step >> (8 * sizeof(T) - 1))));
}

// The elements of a block by their class, from 0 on: class k has those that are at least limit k - 1 and less than limit k.
class Block {
 public:
  Block(const std::byte* old, uint64_t n, int log, const uint64_t* limits, int count) : old_(old), n_(n), log_(log), limits_(limits), count_(count) {
    loops.at_least[log](old, n, 0, more_);  // all
  }
  uint64_t words() const { return (n_ + 63) / 64; }
  void next() {
    std::swap(rest_, more_);
    if (class_ < count_)
      loops.at_least[log_](old_, n_, limits_[class_], more_);
    else
      std::fill_n(more_, words(), 0);
    ++class_;
    loops.without(rest_, more_, words(), members, counts);
  }
  uint64_t members[kBlock / 64];  // of the class
  uint8_t counts[kBlock / 64];

 private:
  const std::byte* old_;
  uint64_t n_;
  int log_;
  const uint64_t* limits_;
  int count_, class_ = 0;
  uint64_t buffers_[2][kBlock / 64];
  uint64_t *rest_ = buffers_[0], *more_ = buffers_[1];
};

template <class T>
int class_of(T value, const uint64_t* limits, int count) {
  const uint64_t size = value & (T(~T{0}) >> 1);
  int k = 0;
  while (k < count && size >= limits[k]) ++k;
  return k;
}

// Limits between powers of two, the highest of which a tenth of the elements exceeds.
template <class T>
int choose(const std::byte* old, uint64_t n, int mantissa, uint64_t* limits, int most) {
  std::array<uint32_t, 4096> counts{};
  const uint64_t step = std::max<uint64_t>(1, n / kSample);
  constexpr T kMagnitude = T(~T{0}) >> 1;
  uint64_t there = 0;
  for (uint64_t i = 0; i < n; i += step, ++there) {
    const uint64_t exponent = uint64_t(load<T>(old + i * sizeof(T)) & kMagnitude) >> mantissa;
    ++counts[std::min<uint64_t>(exponent, counts.size() - 1)];
  }
  size_t top = counts.size() - 1;
  for (uint64_t above = counts[top]; top > 0 && above * 10 < there; above += counts[--top]) {
  }
  const int count = int(std::min<size_t>(size_t(most), top));
  for (int k = 0; k < count; ++k) limits[k] = uint64_t(top - size_t(count - 1 - k)) << mantissa;
  return count;
}

}  // namespace

// Distances from each change to the next, whatever their class.
template <class T>
void Classes::together(const std::byte* old, const std::byte* now, uint64_t n) {
  uint64_t differ[kBlock / 64], next = 0;
  for (uint64_t at = 0; at < n; at += kBlock) {
    const uint64_t m = std::min(kBlock, n - at);
    const std::byte *a = old + at * sizeof(T), *b = now + at * sizeof(T);
    if (!loops.differ[std::countr_zero(sizeof(T))](a, b, m, differ)) continue;
    for (uint64_t w = 0; w * 64 < m; ++w)
      for (uint64_t left = differ[w]; left; left &= left - 1) {
        const uint64_t j = w * 64 + uint64_t(std::countr_zero(left));
        const T was = load<T>(a + j * sizeof(T)), step = T(load<T>(b + j * sizeof(T)) - was);
        streams_[kAll].distance(at + j - next);
        streams_[class_of(was, limits_, count_)].step(T(folded(step) - 1));
        next = at + j + 1;
      }
  }
}

// Distances from each change to the next of its class, in elements of that class.
template <class T>
void Classes::apart(const std::byte* old, const std::byte* now, uint64_t n) {
  constexpr int kLog = std::countr_zero(sizeof(T));
  uint64_t differ[kBlock / 64], since[kMost + 1] = {};  // elements of each class since its last change
  for (uint64_t at = 0; at < n; at += kBlock) {
    const uint64_t m = std::min(kBlock, n - at);
    const std::byte *a = old + at * sizeof(T), *b = now + at * sizeof(T);
    loops.differ[kLog](a, b, m, differ);
    Block block(a, m, kLog, limits_, count_);
    for (int k = 0; k <= count_; ++k) {
      block.next();
      uint64_t passed = since[k];
      for (uint64_t w = 0; w < block.words(); ++w) {
        const uint64_t members = block.members[w];
        uint64_t begin = 0;  // members of the word that were counted
        for (uint64_t left = differ[w] & members; left; left &= left - 1) {
          const int j = std::countr_zero(left);
          const uint64_t before = uint64_t(std::popcount(members & ((uint64_t{1} << j) - 1))), i = (w * 64 + uint64_t(j)) * sizeof(T);
          streams_[k].distance(passed + before - begin);
          streams_[k].step(T(folded(T(load<T>(b + i) - load<T>(a + i))) - 1));
          begin = before + 1;
          passed = 0;
        }
        passed += block.counts[w] - begin;
      }
      since[k] = passed;
    }
  }
}

// [u8 limits][limits][for each class, and for all of them: the numbers of distances and of steps, of bytes of distance symbols, of their bits, of
// step symbols, and of theirs; those]
template <class T>
bool Classes::encode(const std::byte* old, const std::byte* now, uint64_t n, uint64_t changed, Classing classing, Bytes& out) {
  const int most = int(std::min<uint64_t>(kMost, changed / kFew));
  if (!most || classing.mantissa < 0 || classing.mantissa + 2 > int(8 * sizeof(T))) return false;
  count_ = choose<T>(old, n, classing.mantissa, limits_, most);
  if (!count_) return false;
  for (Numbers& s : streams_) s = {};
  if (classing.apart)
    apart<T>(old, now, n);
  else
    together<T>(old, now, n);
  out.push_back(uint8_t(count_));
  for (int k = 0; k < count_; ++k) {
    const T limit = T(limits_[k]);
    out.resize(out.size() + sizeof limit);
    std::memcpy(&out[out.size() - sizeof limit], &limit, sizeof limit);
  }
  for (int k = 0; k <= count_ + 1; ++k) {
    Numbers& s = streams_[k <= count_ ? k : kAll];
    s.distance_bits.end(), s.step_bits.end();
    gaps_.clear(), values_.clear();
    put_symbols(s.distances.data(), s.distances.size(), gaps_);
    put_symbols(s.steps.data(), s.steps.size(), values_);
    const Bytes* parts[] = {&gaps_, &s.distance_bits.out, &values_, &s.step_bits.out};
    put_number(uint32_t(s.distances.size()), out);
    put_number(uint32_t(s.steps.size()), out);
    for (const Bytes* part : parts) put_number(uint32_t(part->size()), out);
    for (const Bytes* part : parts) out.insert(out.end(), part->begin(), part->end());
  }
  return true;
}

bool Classes::encode(const std::byte* old, const std::byte* now, uint64_t n, uint64_t changed, int log, Classing classing, Bytes& out) {
  switch (log) {
    case 0: return encode<uint8_t>(old, now, n, changed, classing, out);
    case 1: return encode<uint16_t>(old, now, n, changed, classing, out);
    case 2: return encode<uint32_t>(old, now, n, changed, classing, out);
    default: return encode<uint64_t>(old, now, n, changed, classing, out);
  }
}

// ---- decoding

bool Classes::numbers(const uint8_t*& at, const uint8_t* end, uint32_t count, const uint32_t* bytes, int width, std::vector<uint64_t>& to) {
  if (uint64_t{bytes[0]} + bytes[1] > uint64_t(end - at)) return false;
  gaps_.resize(count);
  if (!get_symbols(at, bytes[0], count, gaps_.data())) return false;
  BitReader bits(at + bytes[0], bytes[1]);
  at += size_t{bytes[0]} + bytes[1];
  for (const uint8_t symbol : gaps_) {
    if (int(bits_after(symbol)) >= width) return false;
    to.push_back(first_of(symbol) + bits.get(bits_after(symbol)));
  }
  return bits.whole();
}

template <class T>
bool Classes::together(const std::byte* old, uint64_t n, std::vector<uint32_t>& positions, std::vector<uint64_t>& values) {
  uint64_t next[kMost + 1], position = 0;
  std::copy_n(first_, count_ + 1, next);
  for (size_t i = 0; i < positions.size(); ++i, ++position) {
    position += distances_[i];
    if (position >= n) return false;
    const int k = class_of(load<T>(old + position * sizeof(T)), limits_, count_);
    if (next[k] == first_[k + 1]) return false;
    positions[i] = uint32_t(position);
    values[i] = steps_[next[k]++];
  }
  return true;
}

bool Classes::apart(const std::byte* old, uint64_t n, int log, std::vector<uint32_t>& positions, std::vector<uint64_t>& values) {
  uint64_t next[kMost + 1], due[kMost + 1];  // the next change of each class, and how many elements of it come before
  for (int k = 0; k <= count_; ++k) {
    next[k] = first_[k];
    due[k] = next[k] < first_[k + 1] ? distances_[next[k]] : kNever;
  }
  uint64_t made = 0, all[kBlock / 64], step[kBlock];
  for (uint64_t from = 0; from < n; from += kBlock) {
    Block block(old + (from << log), std::min(kBlock, n - from), log, limits_, count_);
    std::fill_n(all, block.words(), 0);
    for (int k = 0; k <= count_; ++k) {
      block.next();
      uint64_t left = due[k];
      for (uint64_t w = 0; w < block.words(); ++w) {
        const uint64_t there = block.counts[w];
        if (left < there) {
          uint64_t members = block.members[w], passed = 0;
          do {
            for (; passed < left; ++passed) members &= members - 1;
            const int j = std::countr_zero(members);
            all[w] |= uint64_t{1} << j;
            step[w * 64 + uint64_t(j)] = steps_[next[k]];
            left = ++next[k] < first_[k + 1] ? left + 1 + distances_[next[k]] : kNever;
          } while (left < there);
        }
        left -= there;
      }
      due[k] = left;
    }
    for (uint64_t w = 0; w < block.words(); ++w)
      for (uint64_t bits = all[w]; bits; bits &= bits - 1, ++made) {
        const uint64_t in_block = w * 64 + uint64_t(std::countr_zero(bits));
        positions[made] = uint32_t(from + in_block);
        values[made] = step[in_block];
      }
  }
  return made == positions.size();
}

bool Classes::decode(const uint8_t* at, size_t nbytes, const std::byte* old, uint64_t n, uint64_t changed, int log,
                     std::vector<uint32_t>& positions, std::vector<uint64_t>& values) {
  const uint8_t* end = at + nbytes;
  const size_t item = size_t{1} << log;
  if (at == end) return false;
  count_ = *at++;
  if (!count_ || count_ > kMost || size_t(end - at) < size_t(count_) * item) return false;
  for (int k = 0; k < count_; ++k, at += item) {
    limits_[k] = 0;
    std::memcpy(&limits_[k], at, item);
    if (k && limits_[k] <= limits_[k - 1]) return false;
  }
  distances_.clear(), steps_.clear();
  bool is_apart = false;
  for (int k = 0; k <= count_ + 1; ++k) {
    uint32_t distances, steps, bytes[4];
    if (!get_number(at, end, distances) || !get_number(at, end, steps)) return false;
    for (uint32_t& b : bytes)
      if (!get_number(at, end, b)) return false;
    first_[k] = steps_.size();
    if (distances > changed - distances_.size() || steps > changed - steps_.size()) return false;
    // Either every class has as many distances as steps, or all distances come last.
    is_apart |= k <= count_ && distances;
    if (k <= count_ ? is_apart && distances_.size() + distances != steps_.size() + steps : steps || (is_apart && distances)) return false;
    if (!numbers(at, end, distances, bytes, 32, distances_) || !numbers(at, end, steps, bytes + 2, 8 << log, steps_)) return false;
  }
  if (at != end || distances_.size() != changed || steps_.size() != changed) return false;
  positions.resize(changed), values.resize(changed);
  if (is_apart) return apart(old, n, log, positions, values);
  switch (log) {
    case 0: return together<uint8_t>(old, n, positions, values);
    case 1: return together<uint16_t>(old, n, positions, values);
    case 2: return together<uint32_t>(old, n, positions, values);
    default: return together<uint64_t>(old, n, positions, values);
  }
}

}  // namespace mcr::delta
