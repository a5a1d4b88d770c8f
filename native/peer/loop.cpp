#include "loop.h"

#include <linux/errqueue.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <ctime>

#include "server.h"

namespace mcr::peer {
namespace {

constexpr uint64_t kListening = 0, kWake = 1;          // what epoll names beside connections
constexpr size_t kMaxUnproved = 256;                   // connections of a server that have not shown that they know the secret
constexpr int64_t kPause = 100'000'000;                // ns until the next try to accept
constexpr uint64_t kTurn = 4 << 20;                    // bytes sent to one before the next has its turn
constexpr size_t kMaxOut = 4096, kMaxOwned = 2 << 20;  // pieces and bytes that wait to be sent, from which on no request is taken
std::atomic<uint64_t> serials{kWake};

}  // namespace

void Conn::reply(Op op, Code code, uint64_t aux, std::string_view body) {
  Out o;
  const Frame f{uint32_t(body.size()), uint16_t(op), uint16_t(code), aux};
  o.own.append(bytes_of(f)).append(body);
  o.left = o.own.size();
  owned += o.own.size();
  out.push_back(std::move(o));
}

Loop::Loop(Server& server, Fd listening)
    : server_(server), listening_(std::move(listening)), epoll_(::epoll_create1(EPOLL_CLOEXEC)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !wake_) throw_errno("epoll");
  epoll_event e{EPOLLIN, {.u64 = kWake}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &e)) throw_errno("epoll_ctl");
  e.data.u64 = kListening;
  if (listening_ && ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listening_.get(), &e)) throw_errno("epoll_ctl");
}

void Loop::go() {
  thread_ = std::thread([this] { run(); });
}

Loop::~Loop() { stop(); }

void Loop::stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
}

void Loop::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] auto n = ::write(wake_.get(), &one, sizeof one);
}

void Loop::adopt(Fd fd) {
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return;
    adopted_.push_back(std::move(fd));
  }
  wake();
}

void Loop::post(uint64_t conn, std::string bytes, bool answer) {
  {
    std::lock_guard lock(mutex_);
    inbox_.push_back({conn, std::move(bytes), answer});
  }
  wake();
}

void Loop::poke() {
  {
    std::lock_guard lock(mutex_);
    poked_ = true;
  }
  wake();
}

void Loop::run() {
  epoll_event events[64];
  for (;;) {
    int timeout = -1;
    if (next_check_ != INT64_MAX) timeout = int(std::clamp<int64_t>((next_check_ - now_ns()) / 1'000'000 + 1, 0, 60'000));
    const int n = ::epoll_wait(epoll_.get(), events, std::size(events), timeout);
    for (int i = 0; i < n; ++i) {
      const uint64_t who = events[i].data.u64;
      if (who == kListening) accept_all();
      else if (who == kWake) take_inbox();
      else if (auto c = conns_.find(who); c != conns_.end()) handle(*c->second, events[i].events);
    }
    {
      std::lock_guard lock(mutex_);
      if (stopped_) break;
    }
    if (const int64_t now = now_ns(); now >= next_check_) check_deadlines(now);
  }
  listening_.reset();
  for (auto& [_, c] : conns_) server_.ended(*c);
  conns_.clear();
  std::lock_guard lock(mutex_);
  adopted_.clear();
}

void Loop::take_inbox() {
  uint64_t count;
  [[maybe_unused]] auto n = ::read(wake_.get(), &count, sizeof count);
  std::vector<Message> inbox;
  std::vector<Fd> adopted;
  bool poked;
  {
    std::lock_guard lock(mutex_);
    inbox.swap(inbox_);
    adopted.swap(adopted_);
    poked = std::exchange(poked_, false);
  }
  for (Fd& fd : adopted) start(std::move(fd));
  for (Message& m : inbox) {
    const auto found = conns_.find(m.conn);
    if (found == conns_.end()) continue;
    Conn& c = *found->second;
    Out o;
    o.own = std::move(m.bytes);
    o.left = o.own.size();
    c.owned += o.left;
    if (o.left) c.out.push_back(std::move(o));
    if (m.answer) c.busy = false;
    if (c.events && c.owned > kMaxOwned) c.dead = true;  // it does not listen
    settle(c);
  }
  if (poked) look_at_waiters();
}

void Loop::accept_all() {
  for (;;) {
    Fd fd(::accept4(listening_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      server_.place(std::move(fd));
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EAGAIN) return;
    epoll_event e{0, {.u64 = kListening}};
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listening_.get(), &e);
    paused_ = true;
    return due(now_ns() + kPause);
  }
}

void Loop::start(Fd fd) {
  // Strangers never keep out who knows the secret: the newest takes the place of the oldest, which has had the most time.
  if (unproved_.size() >= std::max<size_t>(1, kMaxUnproved / server_.loops_.size())) drop(*conns_.at(*unproved_.begin()));
  ++server_.connections_;
  auto c = std::make_unique<Conn>();
  c->serial = ++serials;
  const int one = 1, idle = 20, interval = 5, probes = 3;
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  ::setsockopt(fd.get(), SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  std::memcpy(c->challenge.magic, kMagic, sizeof kMagic);
  c->challenge.version = kVersion;
  if (::getrandom(c->challenge.nonce, sizeof c->challenge.nonce, 0) != sizeof c->challenge.nonce) c->dead = true;
  c->fd = std::make_shared<const Fd>(std::move(fd));
  c->deadline = now_ns() + server_.options_.handshake_ns;
  due(c->deadline);
  Out o;
  o.own = bytes_of(c->challenge);
  o.left = o.own.size();
  c->owned = o.own.size();
  c->out.push_back(std::move(o));
  c->armed = EPOLLIN | EPOLLRDHUP;
  epoll_event e{c->armed, {.u64 = c->serial}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, c->fd->get(), &e)) c->dead = true;
  unproved_.insert(c->serial);
  Conn& there = *(conns_[c->serial] = std::move(c));
  settle(there);
}

void Loop::handle(Conn& c, uint32_t events) {
  if (events & (EPOLLHUP | EPOLLRDHUP) || (events & EPOLLERR && !hear_errors(c))) c.dead = true;
  if (!c.dead && events & EPOLLIN) receive(c);
  settle(c);
}

// Sends what there is, goes on with requests that have come, and says what to wait for. The connection may be gone afterwards.
void Loop::settle(Conn& c) {
  while (!c.dead) {
    const size_t before = c.in.size();
    parse(c);
    if (c.dead || c.out.empty()) break;
    send(c);
    if (!c.out.empty() || before == c.in.size()) break;
  }
  if (c.dead) drop(c);
  else arm(c);
}

void Loop::drop(Conn& c) {
  server_.ended(c);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, c.fd->get(), nullptr);  // a helper may keep it a moment longer
  unproved_.erase(c.serial);
  conns_.erase(c.serial);
}

void Loop::receive(Conn& c) {
  static thread_local char buffer[64 << 10];
  while (c.in.size() < sizeof(Frame) + kMaxRequest) {
    const ssize_t n = ::recv(c.fd->get(), buffer, sizeof buffer, 0);
    if (n > 0) c.in.append(buffer, size_t(n));
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) c.dead = true;
    if (n < ssize_t(sizeof buffer)) return;
  }
}

void Loop::parse(Conn& c) {
  size_t at = 0;
  while (!c.dead && !c.busy && !c.waiting && !c.blocked && c.out.size() < kMaxOut && c.owned < kMaxOwned) {
    const std::string_view rest = std::string_view(c.in).substr(at);
    if (!c.session) {
      if (rest.size() < sizeof(Proof)) break;
      Proof p;
      std::memcpy(&p, rest.data(), sizeof p);
      at += sizeof p;
      server_.authenticate(c, *this, p);
      if (!c.session) {  // it may read why
        send(c);
        c.dead = true;
      } else {
        c.deadline = INT64_MAX;
        unproved_.erase(c.serial);
      }
      continue;
    }
    Frame f;
    if (rest.size() < sizeof f) break;
    std::memcpy(&f, rest.data(), sizeof f);
    if (f.bytes > kMaxRequest || f.code || f.op == 0 || f.op >= uint16_t(Op::kGone) || c.events) {
      c.dead = true;
      break;
    }
    if (rest.size() < sizeof f + f.bytes) break;
    at += sizeof f + f.bytes;
    ++server_.requests_;  // who has the answer finds it counted
    if (!server_.request(c, *this, f, rest.substr(sizeof f, f.bytes))) c.dead = true;
    if (std::exchange(c.again, false)) {
      at -= sizeof f + f.bytes;
      --server_.requests_;
    } else {
      c.learnt = false;
    }
    if (c.waiting) due(c.wait_deadline);
  }
  c.in.erase(0, at);
}

void Loop::send(Conn& c) {
  uint64_t budget = kTurn;
  while (!c.out.empty() && budget && !c.dead)
    if (!send_some(c, &budget)) break;
  if (c.out.empty()) {
    if (c.session) c.deadline = INT64_MAX;
  } else if (c.session && (budget != kTurn || c.deadline == INT64_MAX)) {
    c.deadline = now_ns() + server_.options_.stall_ns;
    due(c.deadline);
  }
}

// Whether to have the kernel send straight from the arena (MSG_ZEROCOPY). It then says, by the socket's error queue, when it needs the memory no
// more, and whether it made a copy after all, as it does on the way to this machine itself, by loopback or veth: there it is asked no more.
// Nobody waits for the former: who reads unpins after the last byte has come, and if that is not so, what has come counts for nothing.
//
// sendfile, which also leaves out the copy, was measured over veth at 0.85 of the rate of plain sends: it looks up each page of 4 KiB in the
// page cache, and hands TCP not more than 16 of them at a time.
bool Loop::lends(Conn& c, const Out& o) {
  if (!o.lent || server_.options_.zero_copy == Server::Options::ZeroCopy::kNever) return false;
  if (c.lending == Conn::Lending::kUntried) {
    const int one = 1;
    c.lending = ::setsockopt(c.fd->get(), SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) ? Conn::Lending::kOff : Conn::Lending::kOn;
  }
  return c.lending == Conn::Lending::kOn;
}

bool Loop::send_some(Conn& c, uint64_t* budget) {
  const bool lent = lends(c, c.out.front());
  iovec v[64];
  size_t n = 0;
  uint64_t total = 0;
  for (auto o = c.out.begin(); o != c.out.end() && n < std::size(v) && total < *budget && lends(c, *o) == lent; ++o, ++n) {
    const void* p = o->memory ? static_cast<const void*>(o->memory) : o->own.data() + o->at;
    v[n] = {const_cast<void*>(p), size_t(std::min(o->left, *budget - total))};
    total += v[n].iov_len;
  }
  msghdr m{};
  m.msg_iov = v;
  m.msg_iovlen = n;
  const ssize_t sent = ::sendmsg(c.fd->get(), &m, MSG_NOSIGNAL | (n < c.out.size() ? MSG_MORE : 0) | (lent ? MSG_ZEROCOPY : 0));
  if (sent < 0) {
    if (errno == EINTR) return true;
    if (lent && errno == ENOBUFS) {  // no more memory may be locked, or nobody heard what is said of it
      c.lending = Conn::Lending::kOff;
      return true;
    }
    c.dead = errno != EAGAIN;
    return false;
  }
  server_.count_sent(uint64_t(sent), lent);
  *budget -= uint64_t(sent);
  for (uint64_t rest = uint64_t(sent);;) {
    if (c.out.empty()) break;
    Out& o = c.out.front();
    const uint64_t k = std::min(rest, o.left);
    if (o.left && !k) break;
    o.left -= k, rest -= k;
    if (o.memory) o.memory += k;
    else o.at += k;
    if (o.left) break;
    c.owned -= o.own.size();
    c.out.pop_front();
  }
  return uint64_t(sent) == total;
}

bool Loop::hear_errors(Conn& c) {
  for (;;) {
    alignas(cmsghdr) char control[256];
    msghdr m{};
    m.msg_control = control;
    m.msg_controllen = sizeof control;
    if (::recvmsg(c.fd->get(), &m, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) {
      if (errno == EINTR) continue;
      int error = 0;
      socklen_t size = sizeof error;
      return errno == EAGAIN && !::getsockopt(c.fd->get(), SOL_SOCKET, SO_ERROR, &error, &size) && !error;
    }
    for (cmsghdr* h = CMSG_FIRSTHDR(&m); h; h = CMSG_NXTHDR(&m, h)) {
      sock_extended_err e;
      if (!(h->cmsg_level == SOL_IP && h->cmsg_type == IP_RECVERR) && !(h->cmsg_level == SOL_IPV6 && h->cmsg_type == IPV6_RECVERR)) continue;
      std::memcpy(&e, CMSG_DATA(h), sizeof e);
      if (e.ee_errno || e.ee_origin != SO_EE_ORIGIN_ZEROCOPY) return false;
      if (e.ee_code & SO_EE_CODE_ZEROCOPY_COPIED && server_.options_.zero_copy != Server::Options::ZeroCopy::kAlways) c.lending = Conn::Lending::kOff;
    }
  }
}

void Loop::look_at_waiters() {
  std::vector<uint64_t> done;
  for (auto& [serial, c] : conns_)
    if (std::exchange(c->blocked, false) || (c->waiting && server_.try_wait(*c, false))) done.push_back(serial);
  for (uint64_t serial : done)
    if (auto c = conns_.find(serial); c != conns_.end()) settle(*c->second);
}

void Loop::check_deadlines(int64_t now) {
  next_check_ = INT64_MAX;
  if (std::exchange(paused_, false)) {
    epoll_event e{EPOLLIN, {.u64 = kListening}};
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listening_.get(), &e);
  }
  std::vector<uint64_t> moved;
  for (auto& [serial, c] : conns_) {
    if (c->deadline <= now) c->dead = true;
    if (c->waiting && c->wait_deadline <= now) server_.try_wait(*c, true);
    else if (c->waiting) due(c->wait_deadline);
    due(c->deadline);
    if (c->dead || !c->out.empty()) moved.push_back(serial);
  }
  for (uint64_t serial : moved)
    if (auto c = conns_.find(serial); c != conns_.end()) settle(*c->second);
}

void Loop::arm(Conn& c) {
  const bool full = c.busy || c.waiting || c.blocked || c.out.size() >= kMaxOut || c.owned >= kMaxOwned || c.in.size() >= sizeof(Frame) + kMaxRequest;
  const uint32_t want = EPOLLRDHUP | (full ? 0u : uint32_t(EPOLLIN)) | (c.out.empty() ? 0u : uint32_t(EPOLLOUT));
  if (want == std::exchange(c.armed, want)) return;
  epoll_event e{want, {.u64 = c.serial}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, c.fd->get(), &e);
}

}  // namespace mcr::peer
