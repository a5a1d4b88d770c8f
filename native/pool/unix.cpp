#include "unix.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>

#include <cerrno>
#include <cstring>

namespace mcr {

void throw_errno(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

Mapping::Mapping(int fd, uint64_t offset, size_t length, int prot, int flags) : length_(length) {
  void* p = ::mmap(nullptr, length, prot, flags, fd, static_cast<off_t>(offset));
  if (p == MAP_FAILED) length_ = 0, throw_errno("mmap");
  base_ = static_cast<std::byte*>(p);
}

Mapping::~Mapping() {
  if (base_) ::munmap(base_, length_);
}

namespace {

socklen_t abstract_address(const std::string& name, sockaddr_un* a) {
  *a = {};
  a->sun_family = AF_UNIX;
  if (name.empty() || name.size() >= sizeof a->sun_path) throw std::system_error(ENAMETOOLONG, std::generic_category(), "broker name");
  std::memcpy(a->sun_path + 1, name.data(), name.size());
  return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

Fd seqpacket(int flags) {
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
  if (!fd) throw_errno("socket");
  return fd;
}

}  // namespace

Fd listen_abstract(const std::string& name) {
  sockaddr_un a;
  const socklen_t n = abstract_address(name, &a);
  Fd fd = seqpacket(SOCK_NONBLOCK);
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&a), n)) throw_errno("bind");
  if (::listen(fd.get(), 256)) throw_errno("listen");
  return fd;
}

Fd connect_abstract(const std::string& name) {
  sockaddr_un a;
  const socklen_t n = abstract_address(name, &a);
  Fd fd = seqpacket(0);
  while (::connect(fd.get(), reinterpret_cast<sockaddr*>(&a), n))
    if (errno != EINTR) throw_errno("connect");
  return fd;
}

int send_message(int fd, const void* head, size_t head_len, const void* body, size_t body_len, std::span<const int> fds, int flags) {
  iovec v[2] = {{const_cast<void*>(head), head_len}, {const_cast<void*>(body), body_len}};
  alignas(cmsghdr) char control[CMSG_SPACE(16 * sizeof(int))] = {};
  msghdr m{};
  m.msg_iov = v;
  m.msg_iovlen = body_len ? 2 : 1;
  if (!fds.empty()) {
    if (fds.size() > 16) return EINVAL;
    m.msg_control = control;
    m.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(h), fds.data(), fds.size_bytes());
  }
  while (::sendmsg(fd, &m, MSG_NOSIGNAL | flags) < 0)
    if (errno != EINTR) return errno;
  return 0;
}

ssize_t recv_message(int fd, void* buf, size_t len, std::vector<Fd>* fds, int flags, bool interruptible) {
  iovec v{buf, len};
  alignas(cmsghdr) char control[CMSG_SPACE(16 * sizeof(int))];
  msghdr m{};
  m.msg_iov = &v;
  m.msg_iovlen = 1;
  m.msg_control = control;  // always, so that descriptors nobody expected are closed and not lost
  m.msg_controllen = sizeof control;
  ssize_t n;
  while ((n = ::recvmsg(fd, &m, MSG_CMSG_CLOEXEC | flags)) < 0)
    if (errno != EINTR || interruptible) return -errno;
  for (cmsghdr* h = CMSG_FIRSTHDR(&m); h; h = CMSG_NXTHDR(&m, h)) {
    if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int raw;
      std::memcpy(&raw, CMSG_DATA(h) + i * sizeof raw, sizeof raw);
      Fd owned(raw);
      if (fds) fds->push_back(std::move(owned));
    }
  }
  if (m.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) return -EMSGSIZE;
  return n;
}

Fd pidfd_of(pid_t pid) { return Fd(pid > 0 ? int(::syscall(SYS_pidfd_open, pid, 0)) : -1); }

bool same_user(int socket_fd, pid_t* pid) {
  ucred u{};
  socklen_t n = sizeof u;
  if (::getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &u, &n)) return false;
  *pid = u.pid;
  return u.uid == ::geteuid();
}

int64_t now_ns() {
  timespec t;
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

}  // namespace mcr
