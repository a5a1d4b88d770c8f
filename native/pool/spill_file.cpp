#include "spill_file.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace mcr {
namespace {

constexpr uint64_t kPiece = 8 << 20;  // bytes a system call: an interrupted process ends within one

template <class F>
std::string fully(uint64_t bytes, const char* what, F&& piece) {
  for (uint64_t at = 0; at < bytes;) {
    const ssize_t n = piece(at, size_t(std::min(kPiece, bytes - at)));
    if (n > 0) at += uint64_t(n);
    else if (n == 0) return std::string(what) + ": the file ends early";
    else if (errno != EINTR) return std::string(what) + ": " + std::strerror(errno);
  }
  return "";
}

}  // namespace

std::string write_fully(int fd, const std::byte* from, uint64_t bytes, uint64_t offset) {
  return fully(bytes, "write", [&](uint64_t at, size_t n) { return ::pwrite(fd, from + at, n, off_t(offset + at)); });
}

std::string read_fully(int fd, std::byte* to, uint64_t bytes, uint64_t offset) {
  return fully(bytes, "read", [&](uint64_t at, size_t n) { return ::pread(fd, to + at, n, off_t(offset + at)); });
}

SpillFile::SpillFile(const std::string& path, double reserve) : path_(path), reserve_(reserve) {
  auto open = [&](int flags) { return Fd(::open(path.c_str(), flags | O_CLOEXEC, 0600)); };
  writer_fd_ = open(O_RDWR | O_CREAT | O_DIRECT);
  direct_ = bool(writer_fd_);
  if (!direct_ && errno == EINVAL) writer_fd_ = open(O_RDWR | O_CREAT);
  if (!writer_fd_) throw std::system_error(errno, std::generic_category(), path);
  reader_fd_ = open(O_RDONLY | (direct_ ? O_DIRECT : 0));
  if (!reader_fd_) throw std::system_error(errno, std::generic_category(), path);
  event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_) throw_errno("eventfd");
  for (Lane* lane : {&writes_, &reads_}) lane->thread = std::jthread([this, lane](std::stop_token stop) { serve(*lane, stop); });
}

SpillFile::~SpillFile() {
  for (Lane* lane : {&writes_, &reads_}) {
    lane->thread.request_stop();
    lane->wake.notify_all();
  }
  for (Lane* lane : {&writes_, &reads_}) lane->thread.join();
}

void SpillFile::submit(Job job) {
  Lane& lane = job.kind == Job::kRead ? reads_ : writes_;  // a hole is made before its place is written again
  std::lock_guard lock(lane.mutex);
  lane.jobs.push_back(std::move(job));
  lane.wake.notify_all();
}

void SpillFile::truncate(uint64_t bytes) {
  struct stat st;
  if (::fstat(writer_fd_.get(), &st) || uint64_t(st.st_size) <= bytes) return;  // too short: reads are to say so
  [[maybe_unused]] auto r = ::ftruncate(writer_fd_.get(), off_t(bytes));        // what stays too long is written over
}

std::vector<SpillFile::Job> SpillFile::done() {
  uint64_t count;
  [[maybe_unused]] auto n = ::read(event_.get(), &count, sizeof count);
  std::lock_guard lock(done_mutex_);
  return std::exchange(done_, {});
}

void SpillFile::serve(Lane& lane, std::stop_token stop) {
  std::unique_lock lock(lane.mutex);
  while (lane.wake.wait(lock, stop, [&] { return !lane.jobs.empty(); }) && !stop.stop_requested()) {
    Job job = std::move(lane.jobs.front());
    lane.jobs.pop_front();
    lock.unlock();
    run(job);
    if (job.kind != Job::kPunch) {
      std::lock_guard done(done_mutex_);
      done_.push_back(std::move(job));
      const uint64_t one = 1;
      [[maybe_unused]] auto w = ::write(event_.get(), &one, sizeof one);
    }
    lock.lock();
  }
}

void SpillFile::run(Job& job) {
  if (job.kind == Job::kPunch) {
    // Where the file system cannot, the place is only used again.
    ::fallocate(writer_fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(job.offset), off_t(job.bytes));
    return;
  }
  if (job.kind == Job::kRead) {
    job.error = read_fully(reader_fd_.get(), job.memory, job.bytes, job.offset);
  } else {
    job.error = disk_is_full(job.bytes);
    if (job.error.empty()) job.error = write_fully(writer_fd_.get(), job.memory, job.bytes, job.offset);
  }
  if (!direct_) ::posix_fadvise(writer_fd_.get(), off_t(job.offset), off_t(job.bytes), POSIX_FADV_DONTNEED);
  if (!job.error.empty()) job.error += " (" + path_ + ")";
}

std::string SpillFile::disk_is_full(uint64_t bytes) const {
  struct statvfs fs;
  if (::fstatvfs(writer_fd_.get(), &fs) || !fs.f_blocks) return "";  // then the write tells
  const double left = double(fs.f_bavail) * double(fs.f_frsize) - double(bytes), keep = reserve_ * double(fs.f_blocks) * double(fs.f_frsize);
  return left >= keep ? "" : "write: the disk is all but full";
}

}  // namespace mcr
