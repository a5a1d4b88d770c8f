#include "sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

namespace mcr::peer {
namespace {

constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian(const uint8_t* p) { return uint32_t(p[0]) << 24 | uint32_t(p[1]) << 16 | uint32_t(p[2]) << 8 | p[3]; }

}  // namespace

void Sha256::block(const uint8_t* p) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) w[i] = big_endian(p + 4 * i);
  for (int i = 16; i < 64; ++i) {
    const uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + w[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  uint32_t v[8];
  std::copy_n(state_, 8, v);
  for (int i = 0; i < 64; ++i) {
    const uint32_t choose = (v[4] & v[5]) ^ (~v[4] & v[6]), majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
    const uint32_t one = v[7] + (std::rotr(v[4], 6) ^ std::rotr(v[4], 11) ^ std::rotr(v[4], 25)) + choose + kRound[i] + w[i];
    const uint32_t two = (std::rotr(v[0], 2) ^ std::rotr(v[0], 13) ^ std::rotr(v[0], 22)) + majority;
    std::copy_backward(v, v + 7, v + 8);
    v[4] += one;
    v[0] = one + two;
  }
  for (int i = 0; i < 8; ++i) state_[i] += v[i];
}

void Sha256::update(const void* data, size_t bytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  while (bytes) {
    const size_t at = bytes_ % 64, n = std::min(64 - at, bytes);
    std::memcpy(pending_ + at, p, n);
    bytes_ += n, p += n, bytes -= n;
    if (at + n == 64) block(pending_);
  }
}

Digest Sha256::finish() {
  const uint64_t bits = bytes_ * 8;
  const uint8_t end = 0x80, zero = 0;
  update(&end, 1);
  while (bytes_ % 64 != 56) update(&zero, 1);
  uint8_t length[8];
  for (int i = 0; i < 8; ++i) length[i] = uint8_t(bits >> (56 - 8 * i));
  update(length, 8);
  Digest d;
  for (int i = 0; i < 32; ++i) d[size_t(i)] = uint8_t(state_[i / 4] >> (24 - 8 * (i % 4)));
  return d;
}

Digest sha256(std::string_view data) {
  Sha256 h;
  h.update(data.data(), data.size());
  return h.finish();
}

Digest hmac_sha256(std::string_view key, std::string_view data) {
  uint8_t block[64] = {};
  if (key.size() > sizeof block) {
    const Digest d = sha256(key);
    std::copy(d.begin(), d.end(), block);
  } else {
    std::copy(key.begin(), key.end(), block);
  }
  Sha256 inner, outer;
  for (uint8_t& b : block) b ^= 0x36;
  inner.update(block, sizeof block);
  inner.update(data.data(), data.size());
  const Digest d = inner.finish();
  for (uint8_t& b : block) b ^= 0x36 ^ 0x5c;
  outer.update(block, sizeof block);
  outer.update(d.data(), d.size());
  return outer.finish();
}

bool same(const Digest& a, const Digest& b) {
  volatile uint8_t different = 0;
  for (size_t i = 0; i < a.size(); ++i) different = uint8_t(different | (a[i] ^ b[i]));
  return different == 0;
}

}  // namespace mcr::peer
