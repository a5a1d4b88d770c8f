#include "arena.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "wire.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace mcr {
namespace {

int populate(std::byte* p, size_t n) {
  if (::madvise(p, n, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  for (size_t i = 0; i < n; i += kPageSize) reinterpret_cast<volatile char*>(p)[i] = 0;  // an older kernel; nobody uses these pages yet
  return 0;
}

}  // namespace

Arena::Arena(uint64_t bytes, uint64_t step) : size_(bytes), step_(step) {
  fd_.reset(::memfd_create("mooncake_ray", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd_) throw_errno("memfd_create");
  if (::ftruncate(fd_.get(), off_t(bytes))) throw_errno("ftruncate");
  if (::fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) throw_errno("F_ADD_SEALS");
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd_.get());
  ro_.reset(::open(path, O_RDONLY | O_CLOEXEC));
  if (!ro_) throw_errno("reopen read-only");
  event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_) throw_errno("eventfd");
  map_ = Mapping(fd_.get(), 0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
  ::madvise(map_.data(), bytes, MADV_HUGEPAGE);  // where shared memory may be huge (shmem_enabled=advise); elsewhere 4 KiB pages
  thread_ = std::jthread([this](std::stop_token s) { run(s); });
}

Arena::~Arena() {
  thread_.request_stop();
  wake_.notify_all();
}

void Arena::want(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  bytes = std::min(bytes, size_);
  if (bytes <= wanted_) return;
  wanted_ = bytes;
  wake_.notify_all();
}

uint64_t Arena::drain() {
  uint64_t count;
  [[maybe_unused]] auto n = ::read(event_.get(), &count, sizeof count);
  std::lock_guard lock(mutex_);
  return populated_ - std::exchange(reported_, populated_);
}

int Arena::failed() {
  std::lock_guard lock(mutex_);
  return error_;
}

void Arena::run(std::stop_token stop) {
  std::unique_lock lock(mutex_);
  while (wake_.wait(lock, stop, [&] { return populated_ < wanted_ && !error_; })) {
    const uint64_t at = populated_, n = std::min(step_, size_ - at);
    lock.unlock();
    const int error = populate(map_.data() + at, n);
    lock.lock();
    if (error) error_ = error;
    else populated_ += n;
    const uint64_t one = 1;
    [[maybe_unused]] auto w = ::write(event_.get(), &one, sizeof one);
  }
}

}  // namespace mcr
