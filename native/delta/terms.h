// The content digest of one element: 64 bits of its value and of where it is in its whole tensor. Sums of these, modulo 2^64, are digests.
#pragma once
#include <bit>
#include <cstdint>

namespace mcr::delta {

static_assert(std::endian::native == std::endian::little);

// Of an index: what is the same for all indices with these upper 32 bits.
struct Seed {
  uint32_t add, turn;
  explicit constexpr Seed(uint64_t index) : add(uint32_t(index >> 32) * 0x7FEB352Du), turn(uint32_t(index >> 32) * 0x846CA68Bu) {}
};

// `bits`: the element, zero-extended. Its two halves enter both factors, so that no value leaves the product what it was but by chance.
inline uint64_t term(uint64_t bits, uint32_t index, Seed seed) {
  uint32_t u = index * 0x9E3779B1u + seed.add;
  u ^= u >> 15;
  u *= 0xD168AAADu;
  u ^= u >> 15;
  const uint32_t lo = uint32_t(bits), hi = uint32_t(bits >> 32);
  const uint32_t a = lo * 0xAF723597u + hi * 0x31848BABu + u;
  const uint32_t b = lo * 0x2C1B3C6Du + hi * 0x297A2D39u + (u << 16 | u >> 16) + seed.turn;
  return uint64_t(a) * b;
}
inline uint64_t term(uint64_t bits, uint64_t index) { return term(bits, uint32_t(index), Seed(index)); }

}  // namespace mcr::delta
