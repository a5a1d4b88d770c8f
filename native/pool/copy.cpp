#include "copy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel.h"

namespace mcr {
namespace {

constexpr size_t kPiece = 1 << 20;         // bytes a thread takes at least: small enough that a descheduled thread holds nobody up
constexpr size_t kStreamFrom = 32 << 20;   // bytes from which on the copy would not stay in a cache anyway
constexpr size_t kStreamPiece = 16 << 10;  // bytes below which one is not streamed: half-written lines at its ends cost more
constexpr size_t kPerThread = 4 << 20;     // bytes below which a thread (about 30 us to start) does not pay

void plain(std::byte* to, const std::byte* from, size_t n) { std::memcpy(to, from, n); }

#if defined(__x86_64__)
// Stores past the caches: the lines written are not read first, a third of the memory traffic of a plain copy. (memcpy does so too, but
// only for single calls larger than the pieces that threads share.)
__attribute__((target("avx2"))) void stream(std::byte* to, const std::byte* from, size_t n) {
  const size_t head = std::min(n, size_t(-reinterpret_cast<uintptr_t>(to) & 31));
  std::memcpy(to, from, head);
  size_t i = head;
  for (; i + 128 <= n; i += 128) {
    _mm_prefetch(reinterpret_cast<const char*>(from + i + 1024), _MM_HINT_NTA);
    _mm_prefetch(reinterpret_cast<const char*>(from + i + 1088), _MM_HINT_NTA);
    const auto* s = reinterpret_cast<const __m256i*>(from + i);
    auto* d = reinterpret_cast<__m256i*>(to + i);
    const __m256i a = _mm256_loadu_si256(s), b = _mm256_loadu_si256(s + 1), c = _mm256_loadu_si256(s + 2), e = _mm256_loadu_si256(s + 3);
    _mm256_stream_si256(d, a);
    _mm256_stream_si256(d + 1, b);
    _mm256_stream_si256(d + 2, c);
    _mm256_stream_si256(d + 3, e);
  }
  std::memcpy(to + i, from + i, n - i);
  _mm_sfence();  // before anybody is told that the bytes are there
}
const bool kCanStream = __builtin_cpu_supports("avx2");
#else
constexpr auto stream = plain;
constexpr bool kCanStream = false;
#endif

}  // namespace

void copy_segments(std::span<const Segment> segments, unsigned threads) {
  size_t total = 0;
  for (const Segment& s : segments) total += s.bytes;
  threads = threads ? unsigned(std::min<size_t>(threads, total / kPerThread)) : threads_for(total, kPerThread);
  const bool streaming = kCanStream && total >= kStreamFrom;
  const auto copy = [streaming](const Segment& s) { (streaming && s.bytes >= kStreamPiece ? stream : plain)(s.to, s.from, s.bytes); };
  if (threads <= 1) {
    for (const Segment& s : segments)
      if (s.bytes) copy(s);
    return;
  }
  const size_t piece = streaming ? kPiece : std::max(kPiece, total / threads / 4);
  std::vector<Segment> pieces;
  pieces.reserve(total / piece + segments.size());
  for (const Segment& s : segments)
    for (size_t at = 0; at < s.bytes; at += piece) pieces.push_back({s.to + at, s.from + at, std::min(piece, s.bytes - at)});
  parallel(pieces.size(), threads, [&](size_t i) { return copy(pieces[i]), true; });
}

}  // namespace mcr
