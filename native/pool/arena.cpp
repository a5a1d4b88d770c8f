#include "arena.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "wire.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace mcr {
namespace {

constexpr int kPreferred = 1;  // MPOL_PREFERRED: other nodes' memory rather than none

int populate(std::byte* p, size_t n) {
  if (::madvise(p, n, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  for (size_t i = 0; i < n; i += kPageSize) reinterpret_cast<volatile char*>(p)[i] = 0;  // an older kernel; nobody uses these pages yet
  return 0;
}

bool shared_memory_may_be_huge() {
  Fd fd(::open("/sys/kernel/mm/transparent_hugepage/shmem_enabled", O_RDONLY | O_CLOEXEC));
  char text[128] = {};
  if (!fd || ::read(fd.get(), text, sizeof text - 1) <= 0) return false;
  return !std::strstr(text, "[never]") && !std::strstr(text, "[deny]");
}

}  // namespace

Arena::Arena(uint64_t bytes, uint64_t step, HugePages pages, int node)
    : size_(pages == HugePages::kHugetlb ? (bytes + kHugePage - 1) / kHugePage * kHugePage : bytes),
      step_(step),
      pages_(pages == HugePages::kAuto && !shared_memory_may_be_huge() ? HugePages::kNever : pages),
      node_(node) {
  const bool hugetlb = pages_ == HugePages::kHugetlb;
  fd_.reset(::memfd_create("mooncake_ray", MFD_CLOEXEC | MFD_ALLOW_SEALING | (hugetlb ? MFD_HUGETLB | MFD_HUGE_2MB : 0)));
  if (!fd_) throw_errno("memfd_create");
  if (::ftruncate(fd_.get(), off_t(size_))) throw_errno("ftruncate");
  if (::fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) throw_errno("F_ADD_SEALS");
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd_.get());
  ro_.reset(::open(path, O_RDONLY | O_CLOEXEC));
  if (!ro_) throw_errno("reopen read-only");
  event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_) throw_errno("eventfd");
  try {
    map_ = Mapping(fd_.get(), 0, size_, PROT_READ | PROT_WRITE, MAP_SHARED);
  } catch (const std::system_error& e) {
    if (!hugetlb) throw;
    throw std::system_error(e.code(), std::to_string(size_ / kHugePage) + " reserved huge pages of 2 MiB (vm.nr_hugepages)");
  }
  if (pages_ == HugePages::kAuto) ::madvise(map_.data(), size_, MADV_HUGEPAGE);
  if (node >= 0) {
    std::vector<unsigned long> nodes(16);
    nodes.at(size_t(node) / 64) = 1ul << (node % 64);
    if (::syscall(SYS_mbind, map_.data(), size_, kPreferred, nodes.data(), nodes.size() * 64, 0)) throw_errno("mbind");
  }
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
