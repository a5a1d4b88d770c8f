#include "copy.h"

#include <sched.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace mcr {
namespace {

constexpr size_t kPiece = 1 << 20;        // bytes a thread takes at least: small enough that a descheduled thread holds nobody up
constexpr size_t kStreamFrom = 32 << 20;  // bytes from which on the copy would not stay in a cache anyway
constexpr size_t kPerThread = 4 << 20;    // bytes below which a thread (about 30 us to start) does not pay
constexpr unsigned kMaxThreads = 8;       // memory bandwidth, not cores, is the limit beyond

unsigned usable_cores() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof set, &set) ? 1 : unsigned(std::max(1, CPU_COUNT(&set)));
}

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
  if (!threads) threads = std::min(usable_cores(), kMaxThreads);
  threads = unsigned(std::min<size_t>(threads, total / kPerThread));
  const bool streaming = kCanStream && total >= kStreamFrom;
  const auto copy = streaming ? stream : plain;
  if (threads <= 1) {
    for (const Segment& s : segments)
      if (s.bytes) copy(s.to, s.from, s.bytes);
    return;
  }
  // Shared with the helpers, who may first run when the work is done: on a busy machine that is normal, and not waited for.
  struct Job {
    std::vector<Segment> pieces;
    decltype(&plain) copy;
    std::atomic<size_t> next{0}, done{0};
    void work() {
      for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces.size();) {
        copy(pieces[i].to, pieces[i].from, pieces[i].bytes);
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == pieces.size()) done.notify_all();
      }
    }
  };
  auto job = std::make_shared<Job>();
  job->copy = copy;
  const size_t piece = streaming ? kPiece : std::max(kPiece, total / threads / 4);
  job->pieces.reserve(total / piece + segments.size());
  for (const Segment& s : segments)
    for (size_t at = 0; at < s.bytes; at += piece) job->pieces.push_back({s.to + at, s.from + at, std::min(piece, s.bytes - at)});
  try {
    for (unsigned t = 1; t < threads; ++t) std::thread([job] { job->work(); }).detach();
  } catch (const std::system_error&) {
    // No more threads to be had: those that started, and this one, do the work.
  }
  job->work();
  for (size_t n; (n = job->done.load(std::memory_order_acquire)) < job->pieces.size();) job->done.wait(n, std::memory_order_acquire);
}

}  // namespace mcr
