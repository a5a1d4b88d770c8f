// The broker's side of an arena: an anonymous, sealed memfd that is populated from its start, in steps, on a thread of its own.
//
// Nothing is ever remapped or punched out: a registration of the whole arena (RDMA, CUDA) stays right for its life. The memory goes back
// to the machine when the last mapping and descriptor are gone, whoever died how.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "unix.h"

namespace mcr {

enum class HugePages {
  kAuto,     // transparent ones where the machine allows them for shared memory
  kHugetlb,  // reserved ones of 2 MiB, or none of it
  kNever,
};

class Arena {
 public:
  static constexpr uint64_t kHugePage = 2 << 20;  // bytes

  // `node`: NUMA node whose memory is preferred; -1: the kernel chooses. Throws std::system_error.
  Arena(uint64_t bytes, uint64_t step, HugePages pages, int node);
  ~Arena();
  Arena(const Arena&) = delete;

  uint64_t size() const { return size_; }
  std::byte* data() const { return map_.data(); }
  int rw_fd() const { return fd_.get(); }
  int ro_fd() const { return ro_.get(); }
  HugePages pages() const { return pages_; }  // what it has: kAuto only where the machine allows it
  int node() const { return node_; }

  // Asks the thread to populate at least that many bytes from the start. Never shrinks.
  void want(uint64_t bytes);
  // Readable (eventfd) after progress. `drain` resets it and returns how many bytes are populated since the last call.
  int progress_fd() const { return event_.get(); }
  uint64_t drain();
  // The kernel would not give more than what is populated; 0, or its errno.
  int failed();

 private:
  void run(std::stop_token stop);

  const uint64_t size_, step_;
  const HugePages pages_;
  const int node_;
  Fd fd_, ro_, event_;
  Mapping map_;
  std::mutex mutex_;
  std::condition_variable_any wake_;
  uint64_t wanted_ = 0, populated_ = 0, reported_ = 0;
  int error_ = 0;
  std::jthread thread_;  // last: it uses the rest
};

}  // namespace mcr
