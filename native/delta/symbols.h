// Bytes that are not equally frequent, in about as many bits as there is information in them; and numbers as such bytes.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace mcr::delta {

using Bytes = std::vector<uint8_t>;

// Appends a form of the n symbols that `get_symbols` reads: the shortest of several.
void put_symbols(const uint8_t* symbols, size_t n, Bytes& out);

// Reads n symbols from exactly that many bytes. False if they are not what `put_symbols` makes.
bool get_symbols(const uint8_t* at, size_t nbytes, size_t n, uint8_t* symbols);

// Numbers by themselves, 7 bits in a byte.
void put_number(uint32_t v, Bytes& out);
bool get_number(const uint8_t*& at, const uint8_t* end, uint32_t& v);

// A number is a symbol, which says how long it is and begins with its first bits, and the rest of its bits as they are.
constexpr unsigned kLead = 2;  // bits after the first 1 that the symbol holds

struct Coded {
  uint8_t symbol;
  uint8_t bits;  // how many follow
};
inline Coded coded(uint64_t v) {
  if (v < (2u << kLead)) return {uint8_t(v), 0};
  const unsigned bits = unsigned(std::bit_width(v)) - 1 - kLead;
  return {uint8_t((bits << kLead) + (v >> bits)), uint8_t(bits)};
}
inline unsigned bits_after(uint8_t symbol) { return symbol < (2u << kLead) ? 0 : (symbol >> kLead) - 1; }
inline uint64_t first_of(uint8_t symbol) {
  const unsigned bits = bits_after(symbol);
  return (uint64_t{symbol} - (uint64_t{bits} << kLead)) << bits;
}

// Bits one after another, the first of them lowest.
class BitWriter {
 public:
  Bytes out;
  void put(uint64_t v, unsigned n) {  // the lowest n <= 61 bits of v
    if (n > 32) {
      put_some(uint32_t(v), 32);
      v >>= 32, n -= 32;
    }
    put_some(uint32_t(v) & uint32_t((uint64_t{1} << n) - 1), n);
  }
  void end() {
    for (; fill_ > 0; word_ >>= 8, fill_ -= std::min(fill_, 8u)) out.push_back(uint8_t(word_));
  }

 private:
  void put_some(uint32_t v, unsigned n) {
    word_ |= uint64_t{v} << fill_;
    fill_ += n;
    if (fill_ < 32) return;
    const size_t at = out.size();
    out.resize(at + 4);
    const uint32_t low = uint32_t(word_);
    std::memcpy(&out[at], &low, 4);
    word_ >>= 32, fill_ -= 32;
  }
  uint64_t word_ = 0;
  unsigned fill_ = 0;
};

class BitReader {
 public:
  BitReader(const uint8_t* at, size_t nbytes) : at_(at), end_(at + nbytes) {}
  // Zeros after the end; whether that happened is asked at the end.
  uint64_t get(unsigned n) {
    if (n > 32) {
      const uint64_t low = get_some(32);
      return low | get_some(n - 32) << 32;
    }
    return get_some(n);
  }
  // Whether as many bytes were there as were read.
  bool whole() const { return at_ == end_ && fill_ < 8 && !over_ && !word_; }

 private:
  uint64_t get_some(unsigned n) {
    while (fill_ < n) {
      if (end_ - at_ >= 4 && fill_ <= 32) {
        uint32_t some;
        std::memcpy(&some, at_, 4);
        word_ |= uint64_t{some} << fill_;
        at_ += 4, fill_ += 32;
        break;
      }
      if (at_ == end_) {
        over_ = true;
        fill_ = n;
        break;
      }
      word_ |= uint64_t{*at_++} << fill_;
      fill_ += 8;
    }
    const uint64_t v = word_ & ((uint64_t{1} << n) - 1);
    word_ >>= n;
    fill_ -= n;
    return v;
  }
  const uint8_t* at_;
  const uint8_t* end_;
  uint64_t word_ = 0;
  unsigned fill_ = 0;
  bool over_ = false;
};

}  // namespace mcr::delta
