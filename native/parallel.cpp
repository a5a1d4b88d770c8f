#include "parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <system_error>
#include <thread>

namespace mcr {
namespace {

constexpr unsigned kMaxThreads = 8;  // memory bandwidth, not cores, is the limit beyond

std::atomic<unsigned> forced{0};

unsigned usable_cores() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof set, &set) ? 1 : unsigned(std::max(1, CPU_COUNT(&set)));
}

// Shared with the helpers, who may first run when the work is done: on a busy machine that is normal, and not waited for.
struct Job {
  std::function<bool(size_t)> piece;
  size_t pieces;
  std::atomic<size_t> next{0}, done{0};
  std::atomic<bool> good{true};
  void work() {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
      if (good.load(std::memory_order_relaxed) && !piece(i)) good.store(false, std::memory_order_relaxed);
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == pieces) done.notify_all();
    }
  }
};

}  // namespace

void set_cores(unsigned cores) { forced = cores; }

unsigned threads_for(size_t bytes, size_t per_thread) {
  const size_t wanted = bytes / per_thread;
  if (wanted <= 1) return 1;
  const unsigned cores = forced.load(std::memory_order_relaxed);
  return unsigned(std::min<size_t>(wanted, cores ? cores : std::min(usable_cores(), kMaxThreads)));
}

bool parallel(size_t pieces, unsigned threads, const std::function<bool(size_t)>& piece) {
  threads = unsigned(std::min<size_t>(threads, pieces));
  if (threads <= 1) {
    for (size_t i = 0; i < pieces; ++i)
      if (!piece(i)) return false;
    return true;
  }
  auto job = std::make_shared<Job>(piece, pieces);
  try {
    for (unsigned t = 1; t < threads; ++t) std::thread([job] { job->work(); }).detach();
  } catch (const std::system_error&) {
    // No more threads to be had: those that started, and this one, do the work.
  }
  job->work();
  for (size_t n; (n = job->done.load(std::memory_order_acquire)) < pieces;) job->done.wait(n, std::memory_order_acquire);
  return job->good;
}

}  // namespace mcr
