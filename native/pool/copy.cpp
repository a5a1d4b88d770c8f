#include "copy.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

namespace mcr {
namespace {

constexpr size_t kPiece = 1 << 20;        // bytes a thread takes at a time: small enough that a descheduled thread holds nobody up
constexpr size_t kPerThread = 4 << 20;    // bytes below which a thread (about 30 us to start) does not pay
constexpr unsigned kMaxThreads = 8;       // memory bandwidth, not cores, is the limit beyond

unsigned usable_cores() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof set, &set) ? 1 : unsigned(std::max(1, CPU_COUNT(&set)));
}

}  // namespace

void copy_segments(std::span<const Segment> segments, unsigned threads) {
  size_t total = 0;
  for (const Segment& s : segments) total += s.bytes;
  if (!threads) threads = std::min(usable_cores(), kMaxThreads);
  threads = unsigned(std::min<size_t>(threads, total / kPerThread));
  if (threads <= 1) {
    for (const Segment& s : segments)
      if (s.bytes) std::memcpy(s.to, s.from, s.bytes);
    return;
  }
  std::vector<Segment> pieces;
  pieces.reserve(total / kPiece + segments.size());
  for (const Segment& s : segments)
    for (size_t at = 0; at < s.bytes; at += kPiece) pieces.push_back({s.to + at, s.from + at, std::min(kPiece, s.bytes - at)});
  std::atomic<size_t> next{0};
  auto work = [&] {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces.size();) std::memcpy(pieces[i].to, pieces[i].from, pieces[i].bytes);
  };
  std::vector<std::jthread> helpers;
  try {
    for (unsigned t = 1; t < threads; ++t) helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // No more threads to be had: those that started, and this one, do the work.
  }
  work();
}

}  // namespace mcr
