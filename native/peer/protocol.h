// What goes between two engines: a handshake of fixed messages, then frames. Little endian; TCP.
//
//   server → puller   Challenge
//   puller → server   Proof, whose mac is HMAC-SHA256(secret, "mooncake_ray peer" ‖ version (u32) ‖ 'C' ‖ the challenge's nonce ‖ Proof up to the mac)
//   server → puller   Welcome, whose mac is the same with 'S' ‖ the challenge's nonce ‖ the proof's nonce ‖ session ‖ Welcome up to the mac
//
// Each end has put a nonce of its own into what the other had to know the secret for, and no message of one role is one of the other. Then the
// puller sends requests, each a Frame with a body, and the server answers them in order, with a frame of the same op. The answer to kRead has no
// body: `aux` bytes follow it, those of the ranges one after the other. On an event connection the server sends kGone, and nobody else anything.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "pool/wire.h"
#include "sha256.h"

namespace mcr::peer {

static_assert(std::endian::native == std::endian::little);

constexpr uint32_t kVersion = 1;
constexpr char kMagic[8] = {'M', 'C', 'R', 'P', 'E', 'E', 'R', '\n'};
constexpr uint32_t kMaxRequest = 256 << 10;  // bytes of a request's body
constexpr uint32_t kMaxReply = 1 << 20;      // bytes of a reply's body
constexpr uint32_t kMaxPins = 4096;          // ids in one kPin or kUnpin
constexpr uint32_t kMaxRanges = 8192;        // ranges in one kRead
constexpr uint32_t kMaxText = 64 << 10;      // bytes of a description or of an exchange's blob
constexpr uint32_t kInlinePin = 64 << 10;    // bytes; objects up to this size come inside the reply to kPin
constexpr uint32_t kInlineReply = 512 << 10; // bytes of objects inside one reply; what does not fit is pinned as larger ones are
constexpr uint64_t kCopies = 1ull << 32;     // regions from here on are no arenas
constexpr uint64_t kRelayMin = 1 << 20;      // bytes; smaller objects always come from their home
constexpr size_t kNameMax = 64;              // bytes of a peer's "host:port", padded with zeros

struct Challenge {
  char magic[8];
  uint32_t version;
  uint32_t zero;
  uint8_t nonce[32];
};
struct Proof {
  uint8_t nonce[32];
  uint8_t session[16];  // chosen by the puller; the same on all its connections to this server
  uint32_t version;
  uint32_t events;      // 1: this connection only carries kGone
  char me[kNameMax];    // the puller's own server, or empty
  uint8_t mac[32];
};
struct Welcome {
  uint32_t status;  // 0, or 1: refused; then the rest is zero, and the connection ends
  uint32_t zero;
  uint8_t pool_id[16];
  uint8_t mac[32];
};

enum class Op : uint16_t {
  kPin = 1,   // PinRequest, ids → an Entry an id, then the bytes of those that are kInline
  kUnpin,     // UnpinRequest, ids → aux 1: all of them were pinned since their kPin, 0: not
  kWait,      // WaitRequest → aux: how much is there now
  kRead,      // Ranges → aux bytes; those that are still being received there are waited for
  kDescribe,  // → text
  kExchange,  // u32 length of the name, name, blob → blob
  kGone,      // from the server: the id of an object that the puller keeps a replica of
  kLast = kGone
};

enum class Code : uint16_t {  // of a reply, and of each entry
  kOk = 0,
  kInline,
  kNotYet,   // exists, unsealed
  kMissing,
  kLost,     // it was, and its bytes are gone
  kBad,      // the request makes no sense; aux: the number of the range, where it is one
  kRefused,  // exchange: nobody answers
};

struct Frame {
  uint32_t bytes = 0;  // of the body
  uint16_t op = 0;
  uint16_t code = 0;
  uint64_t aux = 0;
};
struct PinRequest {
  uint32_t count = 0;
  uint16_t inlined = 0;     // 1: small objects may come inside the reply
  uint16_t kept = 0;        // 1: the puller keeps a replica of each of those, as a kUnpin would tell
  char bad[kNameMax] = {};  // a source that failed, or empty
};
struct Entry {
  uint16_t code = 0;
  uint16_t zero = 0;
  uint32_t inlined = 0;  // bytes
  uint64_t region = 0, offset = 0, size = 0, available = 0;
  char source[kNameMax] = {};  // read from there; empty: from this server
};
struct UnpinRequest {
  uint32_t count = 0;
  uint32_t kept = 0;  // 1: the puller has a replica of each now
};
struct WaitRequest {
  ObjectId id;
  uint64_t beyond = 0;
  int64_t timeout_ns = 0;
};
struct Range {
  uint64_t region = 0, offset = 0, bytes = 0;
};
static_assert(sizeof(Challenge) == 48 && sizeof(Proof) == 152 && sizeof(Welcome) == 56 && sizeof(Frame) == 16 && sizeof(PinRequest) == 72 &&
              sizeof(Entry) == 104 && sizeof(UnpinRequest) == 8 && sizeof(WaitRequest) == 32 && sizeof(Range) == 24);
static_assert(kMaxPins * sizeof(Entry) + kInlineReply <= kMaxReply && kMaxRanges * sizeof(Range) <= kMaxRequest);

template <class T>
std::string_view bytes_of(const T& t, size_t n = sizeof(T)) {
  return {reinterpret_cast<const char*>(&t), n};
}

// Of `proof`, whose mac does not matter; of `welcome` likewise.
inline Digest proof_mac(std::string_view secret, const Challenge& c, const Proof& p) {
  std::string m = "mooncake_ray peer";
  m.append(bytes_of(kVersion)).append("C").append(bytes_of(c.nonce)).append(bytes_of(p, offsetof(Proof, mac)));
  return hmac_sha256(secret, m);
}
inline Digest welcome_mac(std::string_view secret, const Challenge& c, const Proof& p, const Welcome& w) {
  std::string m = "mooncake_ray peer";
  m.append(bytes_of(kVersion)).append("S").append(bytes_of(c.nonce)).append(bytes_of(p.nonce)).append(bytes_of(p.session));
  m.append(bytes_of(w, offsetof(Welcome, mac)));
  return hmac_sha256(secret, m);
}

inline std::string name_in(const char (&field)[kNameMax]) { return {field, ::strnlen(field, kNameMax)}; }
inline void set_name(char (&field)[kNameMax], std::string_view name) {
  std::memset(field, 0, kNameMax);
  std::memcpy(field, name.data(), name.size() < kNameMax ? name.size() : kNameMax);
}

}  // namespace mcr::peer
