// Small owners and wrappers of what the kernel gives: file descriptors, mappings, SEQPACKET messages with descriptors.
#pragma once
#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace mcr {

[[noreturn]] void throw_errno(const char* what);

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  Fd& operator=(Fd&& o) noexcept {
    if (this != &o) reset(std::exchange(o.fd_, -1));
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, uint64_t offset, size_t length, int prot, int flags);  // throws std::system_error
  Mapping(Mapping&& o) noexcept : base_(std::exchange(o.base_, nullptr)), length_(std::exchange(o.length_, 0)) {}
  Mapping& operator=(Mapping&& o) noexcept {
    std::swap(base_, o.base_);
    std::swap(length_, o.length_);
    return *this;
  }
  ~Mapping();
  std::byte* data() const { return base_; }
  size_t size() const { return length_; }

 private:
  std::byte* base_ = nullptr;
  size_t length_ = 0;
};

// The broker's address is a name in the abstract namespace: nothing on disk, one broker a network namespace and name.
Fd listen_abstract(const std::string& name);   // throws; EADDRINUSE when a broker has it
Fd connect_abstract(const std::string& name);  // throws; ECONNREFUSED when there is none

// Sends one message of two parts. Returns 0, or the errno.
int send_message(int fd, const void* head, size_t head_len, const void* body = nullptr, size_t body_len = 0, std::span<const int> fds = {}, int flags = 0);
// Receives one message. Returns its length; 0 at end of file; -errno (-EINTR only if `interruptible`). Excess is an error (-EMSGSIZE).
ssize_t recv_message(int fd, void* buf, size_t len, std::vector<Fd>* fds = nullptr, int flags = 0, bool interruptible = false);

Fd pidfd_of(pid_t pid);  // empty where the process is gone
bool same_user(int socket_fd, pid_t* pid);
int64_t now_ns();  // on the monotonic clock

}  // namespace mcr
