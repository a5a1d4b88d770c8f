// The entropy coder is an asymmetric numeral system with ranges (rANS): four states in turn, 32 bits wide, that give and take 16 bits at a time.
#include "delta/symbols.h"

#include <algorithm>
#include <array>

namespace mcr::delta {
namespace {

enum Form : uint8_t { kPlain, kSame, kRanged };

constexpr unsigned kScale = 12;  // frequencies are out of 2^12
constexpr uint32_t kTotal = 1u << kScale, kLow = 1u << 16;
constexpr size_t kStates = 4, kFew = 24;  // symbols; below, a table costs more than it saves

using Frequencies = std::array<uint32_t, 256>;

// Frequencies out of kTotal, at least 1 for what there is.
Frequencies scaled(const Frequencies& counts, size_t n) {
  Frequencies f{};
  uint32_t sum = 0;
  for (size_t s = 0; s < 256; ++s) {
    if (!counts[s]) continue;
    f[s] = std::max<uint32_t>(1, uint32_t((uint64_t{counts[s]} * kTotal + n / 2) / n));
    sum += f[s];
  }
  // What is too much or too little goes where a part of it matters least.
  while (sum != kTotal) {
    const bool more = sum < kTotal;
    size_t best = 256;
    double least = 0;
    for (size_t s = 0; s < 256; ++s) {
      if (!f[s] || (!more && f[s] == 1)) continue;
      const double loss = more ? -double(counts[s]) / (f[s] + 0.5) : double(counts[s]) / (f[s] - 0.5);
      if (best == 256 || loss < least) best = s, least = loss;
    }
    f[best] += more ? 1 : -1;
    sum += more ? 1 : -1;
  }
  return f;
}

// [first, last, frequencies of those and all between them]
void put_table(const Frequencies& f, Bytes& out) {
  size_t first = 0, last = 255;
  while (!f[first]) ++first;
  while (!f[last]) --last;
  out.push_back(uint8_t(first));
  out.push_back(uint8_t(last));
  for (size_t s = first; s <= last; ++s) put_number(f[s], out);
}

bool get_table(const uint8_t*& at, const uint8_t* end, Frequencies& f) {
  f = {};
  if (end - at < 2) return false;
  const size_t first = *at++, last = *at++;
  uint32_t sum = 0;
  for (size_t s = first; s <= last; ++s) {
    if (!get_number(at, end, f[s]) || f[s] > kTotal) return false;
    sum += f[s];
  }
  return sum == kTotal;
}

void put_ranged(const uint8_t* symbols, size_t n, const Frequencies& f, Bytes& out) {
  Frequencies start{};
  for (size_t s = 1; s < 256; ++s) start[s] = start[s - 1] + f[s - 1];
  put_table(f, out);
  std::vector<uint16_t> words;  // last one first
  words.reserve(n / 2 + 8);
  uint32_t state[kStates] = {kLow, kLow, kLow, kLow};
  for (size_t i = n; i-- > 0;) {
    uint32_t& x = state[i % kStates];
    const uint32_t freq = f[symbols[i]];
    if (x >= uint64_t{kLow >> kScale << 16} * freq) {
      words.push_back(uint16_t(x));
      x >>= 16;
    }
    x = (x / freq << kScale) + x % freq + start[symbols[i]];
  }
  const size_t at = out.size();
  out.resize(at + sizeof state + 2 * words.size());
  std::memcpy(&out[at], state, sizeof state);
  std::reverse(words.begin(), words.end());
  if (!words.empty()) std::memcpy(&out[at + sizeof state], words.data(), 2 * words.size());
}

struct Slot {
  uint16_t freq, bias;
  uint8_t symbol;
};

bool get_ranged(const uint8_t* at, const uint8_t* end, size_t n, uint8_t* symbols) {
  Frequencies f;
  if (!get_table(at, end, f)) return false;
  std::array<Slot, kTotal> slots;
  uint32_t slot = 0;
  for (size_t s = 0; s < 256; ++s)
    for (uint32_t k = 0; k < f[s]; ++k) slots[slot++] = {uint16_t(f[s]), uint16_t(k), uint8_t(s)};
  uint32_t state[kStates];
  if (size_t(end - at) < sizeof state) return false;
  std::memcpy(state, at, sizeof state);
  at += sizeof state;
  auto step = [&](uint32_t x, uint8_t* to) {
    const Slot s = slots[x & (kTotal - 1)];
    *to = s.symbol;
    return s.freq * (x >> kScale) + s.bias;
  };
  auto refill = [&](uint32_t& x) {
    uint16_t word;
    std::memcpy(&word, at, 2);
    const bool low = x < kLow;
    x = low ? x << 16 | word : x;
    at += low ? 2 : 0;
  };
  size_t i = 0;
  for (; i + kStates <= n && size_t(end - at) >= 2 * kStates; i += kStates) {
    for (size_t k = 0; k < kStates; ++k) state[k] = step(state[k], symbols + i + k);
    for (size_t k = 0; k < kStates; ++k) refill(state[k]);
  }
  for (; i < n; ++i) {
    uint32_t& x = state[i % kStates];
    x = step(x, symbols + i);
    if (x < kLow) {
      if (end - at < 2) return false;
      refill(x);
    }
  }
  return at == end && std::all_of(std::begin(state), std::end(state), [](uint32_t x) { return x == kLow; });
}

}  // namespace

void put_number(uint32_t v, Bytes& out) {
  for (; v >= 128; v >>= 7) out.push_back(uint8_t(v | 128));
  out.push_back(uint8_t(v));
}

bool get_number(const uint8_t*& at, const uint8_t* end, uint32_t& v) {
  uint64_t all = 0;
  for (unsigned shift = 0; shift < 35; shift += 7) {
    if (at == end) return false;
    all |= uint64_t{*at & 127u} << shift;
    if (!(*at++ & 128)) {
      v = uint32_t(all);
      return all == v;
    }
  }
  return false;
}

void put_symbols(const uint8_t* symbols, size_t n, Bytes& out) {
  if (!n) return;
  std::array<Frequencies, 4> parts{};  // so that a symbol does not wait for the same one before it
  size_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (size_t k = 0; k < 4; ++k) ++parts[k][symbols[i + k]];
  for (; i < n; ++i) ++parts[0][symbols[i]];
  Frequencies counts;
  for (size_t s = 0; s < 256; ++s) counts[s] = parts[0][s] + parts[1][s] + parts[2][s] + parts[3][s];
  if (counts[symbols[0]] == n) {
    out.push_back(kSame);
    out.push_back(symbols[0]);
    return;
  }
  const size_t begin = out.size();
  if (n >= kFew) {
    out.push_back(kRanged);
    put_ranged(symbols, n, scaled(counts, n), out);
    if (out.size() - begin < n + 1) return;
    out.resize(begin);
  }
  out.push_back(kPlain);
  out.insert(out.end(), symbols, symbols + n);
}

bool get_symbols(const uint8_t* at, size_t nbytes, size_t n, uint8_t* symbols) {
  if (!n) return nbytes == 0;
  if (!nbytes) return false;
  const uint8_t* end = at + nbytes;
  switch (*at++) {
    case kPlain:
      if (size_t(end - at) != n) return false;
      std::memcpy(symbols, at, n);
      return true;
    case kSame:
      if (end - at != 1) return false;
      std::memset(symbols, *at, n);
      return true;
    case kRanged:
      return get_ranged(at, end, n, symbols);
    default:
      return false;
  }
}

}  // namespace mcr::delta
