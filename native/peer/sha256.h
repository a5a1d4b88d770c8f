// SHA-256 (FIPS 180-4) and HMAC (RFC 2104) with it: what the handshake between peers is made of. Not for bulk data.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace mcr::peer {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void update(const void* data, size_t bytes);
  Digest finish();  // once

 private:
  void block(const uint8_t* p);
  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t pending_[64] = {};
  uint64_t bytes_ = 0;
};

Digest sha256(std::string_view data);
Digest hmac_sha256(std::string_view key, std::string_view data);
// Takes as long whatever differs.
bool same(const Digest& a, const Digest& b);

}  // namespace mcr::peer
