#include "broker.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

namespace mcr {
namespace {

constexpr uint64_t kReadAhead = 64 << 20;  // bytes

}  // namespace

Broker::Broker(const BrokerConfig& config)
    : config_(config),
      table_({.capacity = config.capacity,
              .inline_budget = std::max<uint64_t>(1 << 20, config.capacity / 64),
              .quota = config.quota,
              .high = config.high,
              .low = config.low,
              .disk = config.spill_dir.empty() ? 0 : config.spill_limit,
              .read_ahead = std::min(kReadAhead, config.capacity / 8)}),
      started_(now_ns()),
      directory_(config.spill_dir) {
  listener_ = listen_abstract(config.name);  // first: whoever is second must not touch memory
  if (::getrandom(pool_id_, sizeof pool_id_, 0) != sizeof pool_id_) throw_errno("getrandom");
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) throw_errno("epoll_create1");
  stop_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop_) throw_errno("eventfd");
  table_.tick(started_);
  watch(listener_.get(), EPOLLIN, EPOLL_CTL_ADD);
  watch(stop_.get(), EPOLLIN, EPOLL_CTL_ADD);
  const uint64_t share = config.capacity / config.nodes.size() / kPageSize * kPageSize;
  for (int node : config.nodes) add_arena(std::min(config.arena, std::max<uint64_t>(share, kPageSize)), node);
  if (config.watch_pid) {
    watched_ = pidfd_of(config.watch_pid);
    if (watched_) watch(watched_.get(), EPOLLIN, EPOLL_CTL_ADD);
    else stopping_ = true;  // it is gone already
  }
  idle_since_ = started_;
  if (!config.spill_dir.empty()) recover();
  grow();
}

void Broker::stop() {
  const uint64_t one = 1;
  [[maybe_unused]] auto n = ::write(stop_.get(), &one, sizeof one);
}

bool Broker::try_watch(int fd, uint32_t events, int op) {
  epoll_event e{};
  e.events = events;
  e.data.fd = fd;
  return ::epoll_ctl(epoll_.get(), op, fd, &e) == 0;
}

void Broker::watch(int fd, uint32_t events, int op) {
  if (!try_watch(fd, events, op)) throw_errno("epoll_ctl");
}

int64_t Broker::empty_deadline() const {
  return idle_since_ ? idle_since_ + int64_t((ever_used_ ? config_.linger_s : config_.first_wait_s) * 1e9) : INT64_MAX;
}

bool Broker::done() const { return stopping_ || now_ns() >= empty_deadline(); }

int Broker::timeout_ms() const {
  const int64_t at = std::min({parking_.next_deadline(), empty_deadline(), retry_disk_ ? retry_disk_ : INT64_MAX});
  if (at == INT64_MAX) return -1;
  return int(std::clamp<int64_t>((at - now_ns()) / 1'000'000 + 1, 0, 60'000));
}

void Broker::run() {
  while (!done()) {
    epoll_event events[64];
    const int n = ::epoll_wait(epoll_.get(), events, 64, timeout_ms());
    if (n < 0 && errno != EINTR) throw_errno("epoll_wait");
    table_.tick(now_ns());
    for (int i = 0; i < n; ++i) {
      const int fd = events[i].data.fd;
      if (fd == listener_.get()) {
        accept_all();
      } else if (fd == stop_.get() || fd == watched_.get()) {
        stopping_ = true;
      } else if (auto p = by_pidfd_.find(fd); p != by_pidfd_.end()) {
        // Looked at again: the event may be of a descriptor that was closed in this round, and whose number a new pidfd has.
        pollfd dead{fd, POLLIN, 0};
        if (::poll(&dead, 1, 0) != 1) continue;
        // What a process sent before it died counts: a return value may have been sealed by the last message of a worker that exits.
        const SessionId s = p->second;
        for (int conn : std::vector<int>(peers_.at(s).conns)) read_out(conn);
        end_session(s);
      } else if (auto c = conns_.find(fd); c != conns_.end()) {
        if (events[i].events & EPOLLOUT) flush_events(c->second);
        if (events[i].events & ~uint32_t(EPOLLOUT)) readable(fd);
      } else if (spill_ && fd == spill_->done_fd()) {
        spill_progress();
      } else {
        arena_progress(fd);
      }
      apply_effects();
    }
    expire();
    if (std::exchange(queue_moved_, false)) serve_creates();
    make_room();
    apply_effects();
    grow();
  }
  leave_disk();
}

// ---- sockets

void Broker::accept_all() {
  for (;;) {
    Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) return;
    pid_t pid;
    if (!same_user(fd.get(), &pid)) continue;
    const int raw = fd.get();
    watch(raw, EPOLLIN, EPOLL_CTL_ADD);
    conns_[raw].fd = std::move(fd);
  }
}

void Broker::close_conn(int fd) {
  auto it = conns_.find(fd);
  if (it == conns_.end()) return;
  if (it->second.parked) unpark(it->second.parked);
  const SessionId s = it->second.session;
  conns_.erase(it);
  auto p = peers_.find(s);
  if (p == peers_.end()) return;
  std::erase(p->second.conns, fd);
  if (p->second.events_fd == fd) {
    p->second.events_fd = -1;
    table_.listen(s, false);
  }
  // Without a pidfd the last socket is all there is to go by.
  if (p->second.bye || (!p->second.pidfd && p->second.conns.empty())) end_session(s);
}

// All that has come, not only a client's share of a round.
void Broker::read_out(int fd) {
  for (pollfd more{fd, POLLIN, 0}; conns_.contains(fd) && ::poll(&more, 1, 0) == 1;) readable(fd);
}

void Broker::end_session(SessionId s) {
  auto it = peers_.find(s);
  if (it == peers_.end()) return;
  Peer peer = std::move(it->second);
  peers_.erase(it);
  if (peer.pidfd) by_pidfd_.erase(peer.pidfd.get());
  for (int fd : peer.conns) {
    auto c = conns_.find(fd);
    if (c == conns_.end()) continue;
    if (c->second.parked) unpark(c->second.parked);
    conns_.erase(c);
  }
  table_.close_session(s);
  if (!idle_since_ && !somebody_is_here()) idle_since_ = now_ns();
}

bool Broker::somebody_is_here() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& p) { return !p.second.away; });
}

bool Broker::watch_process(SessionId s, Peer& p, Fd pidfd) {
  if (!pidfd || !try_watch(pidfd.get(), EPOLLIN, EPOLL_CTL_ADD)) return false;
  by_pidfd_[pidfd.get()] = s;
  p.pidfd = std::move(pidfd);
  return true;
}

void Broker::readable(int fd) {
  alignas(8) static thread_local std::byte buf[kMaxMessage];
  for (int round = 0; round < 16; ++round) {  // bounded: no client starves the others
    auto it = conns_.find(fd);
    if (it == conns_.end()) return;
    std::vector<Fd> fds;
    const ssize_t n = recv_message(fd, buf, sizeof buf, &fds, MSG_DONTWAIT);
    if (n == -EAGAIN || n == -EWOULDBLOCK) return;
    Request q;
    if (n < ssize_t(sizeof q)) return close_conn(fd);  // end of file, an error, or a message too short to be one
    std::memcpy(&q, buf, sizeof q);
    const size_t len = size_t(n) - sizeof q;
    const bool bytes = q.op == uint16_t(Op::kPutInline) || q.op == uint16_t(Op::kHello) || q.op == uint16_t(Op::kCreate);
    const bool known = q.op >= uint16_t(Op::kHello) && q.op <= uint16_t(Op::kLast);
    const bool joining = q.op == uint16_t(Op::kHello) || q.op == uint16_t(Op::kAttach);
    if (!known || len != size_t(q.count) * (bytes ? 1 : sizeof(ObjectId)) || joining == (it->second.session != 0) || it->second.parked ||
        it->second.events)
      return close_conn(fd);
    const std::byte* body = buf + sizeof q;
    std::vector<std::byte> kept;
    if (const SessionId s = it->second.session; s && q.flags & kAfter && peers_.at(s).conns.front() != fd) {
      kept.assign(body, body + len);  // the buffer is used again
      body = kept.data();
      read_out(peers_.at(s).conns.front());
      if (it = conns_.find(fd); it == conns_.end()) return;  // the session is over
    }
    handle(it->second, q, body, len, fds);
    apply_effects();
  }
}

bool Broker::reply(int fd, const Reply& r, std::string_view body, std::span<const int> fds) {
  // One request is outstanding on a socket, so its reply fits; a client that broke that rule is cut off.
  if (!send_message(fd, &r, sizeof r, body.data(), body.size(), fds, MSG_DONTWAIT)) return true;
  close_conn(fd);
  return false;
}

void Broker::reply_status(int fd, Status s, std::string_view text) {
  Reply r;
  r.status = uint16_t(s);
  r.count = uint32_t(text.size());
  reply(fd, r, text);
}

bool Broker::reply_found(int fd, Status s, const Location& at) {
  Reply r;
  r.status = uint16_t(s);
  r.arena = at.arena;
  r.offset = at.offset;
  r.size = at.size;
  if (at.inlined) r.count = uint32_t(at.inlined->size());
  if (s == Status::kOnDisk) {
    const int file[] = {spill_->read_fd()};
    return reply(fd, r, {}, file);
  }
  r.aux = at.inlined ? 0 : table_.populated_bytes(at.arena);
  return reply(fd, r, at.inlined ? std::string_view(*at.inlined) : std::string_view());
}

void Broker::push_event(SessionId s, const ClaimKey& key) {
  auto p = peers_.find(s);
  if (p == peers_.end() || p->second.events_fd < 0) return;
  Event e{key};
  Conn& c = conns_.at(p->second.events_fd);
  c.out.emplace_back(reinterpret_cast<const char*>(&e), sizeof e);
  flush_events(c);
}

void Broker::flush_events(Conn& c) {
  while (!c.out.empty()) {
    const int err = send_message(c.fd.get(), c.out.front().data(), c.out.front().size(), nullptr, 0, {}, MSG_DONTWAIT);
    if (err == EAGAIN || err == EWOULDBLOCK) {
      if (!std::exchange(c.armed, true)) watch(c.fd.get(), EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
      return;
    }
    if (err) {
      c.out.clear();  // the peer is going; its end of file follows
      break;
    }
    c.out.pop_front();
  }
  if (std::exchange(c.armed, false)) watch(c.fd.get(), EPOLLIN, EPOLL_CTL_MOD);
}

}  // namespace mcr
