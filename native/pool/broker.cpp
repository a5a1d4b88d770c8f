#include "broker.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

namespace mcr {
namespace {

constexpr size_t kLabelMax = 256;             // bytes; labels go into messages to others
constexpr uint64_t kPopulateStep = 32 << 20;  // bytes; a step holds the arena's thread 10-20 ms

int64_t now_ns() {
  timespec t;
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

int64_t deadline_of(int64_t timeout_ns) {
  const int64_t now = now_ns();
  return timeout_ns < 0 || timeout_ns > INT64_MAX - now ? INT64_MAX : now + timeout_ns;
}

void fill_random(void* p, size_t n) {
  if (::getrandom(p, n, 0) != ssize_t(n)) throw_errno("getrandom");
}

std::vector<ObjectId> ids_in(const std::byte* body, size_t count) {
  std::vector<ObjectId> ids(count);
  if (count) std::memcpy(ids.data(), body, count * sizeof(ObjectId));
  return ids;
}

}  // namespace

Broker::Broker(const BrokerConfig& config)
    : config_(config), table_({.capacity = config.capacity, .inline_budget = std::max<uint64_t>(1 << 20, config.capacity / 64)}) {
  listener_ = listen_abstract(config.name);  // first: whoever is second must not touch memory
  fill_random(pool_id_, sizeof pool_id_);
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) throw_errno("epoll_create1");
  stop_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop_) throw_errno("eventfd");
  arenas_.push_back(std::make_unique<Arena>(config.capacity, kPopulateStep));
  table_.add_arena();
  watch(listener_.get(), EPOLLIN, EPOLL_CTL_ADD);
  watch(stop_.get(), EPOLLIN, EPOLL_CTL_ADD);
  for (auto& a : arenas_) watch(a->progress_fd(), EPOLLIN, EPOLL_CTL_ADD);
  if (config.watch_pid) {
    watched_ = pidfd_of(config.watch_pid);
    if (watched_) watch(watched_.get(), EPOLLIN, EPOLL_CTL_ADD);
    else stopping_ = true;  // it is gone already
  }
  idle_since_ = now_ns();
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

bool Broker::done() const {
  if (stopping_) return true;
  if (!idle_since_) return false;
  return now_ns() - idle_since_ >= int64_t((ever_used_ ? config_.linger_s : config_.first_wait_s) * 1e9);
}

int Broker::timeout_ms() const {
  int64_t at = INT64_MAX;
  for (const auto& [serial, p] : parked_) at = std::min(at, p.deadline);
  if (idle_since_) at = std::min(at, idle_since_ + int64_t((ever_used_ ? config_.linger_s : config_.first_wait_s) * 1e9));
  if (at == INT64_MAX) return -1;
  return int(std::clamp<int64_t>((at - now_ns()) / 1'000'000 + 1, 0, 60'000));
}

void Broker::run() {
  while (!done()) {
    epoll_event events[64];
    const int n = ::epoll_wait(epoll_.get(), events, 64, timeout_ms());
    if (n < 0 && errno != EINTR) throw_errno("epoll_wait");
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
      } else {
        for (uint32_t a = 0; a < arenas_.size(); ++a) {
          if (arenas_[a]->progress_fd() != fd) continue;
          if (uint64_t more = arenas_[a]->drain()) table_.extend(a, more);
          if (arenas_[a]->failed()) table_.stop_growing();
        }
      }
      apply_effects();
    }
    expire();
    if (std::exchange(queue_moved_, false)) serve_creates();
    apply_effects();
    grow();
  }
}

// Populated memory stays ahead of what is used, so that an allocation never waits for the kernel to clear pages.
void Broker::grow() {
  uint64_t want = table_.used_bytes() + table_.used_bytes() / 4 + config_.prefault;
  if (!creates_.empty()) want = std::max(want, table_.populated_bytes() + parked_.at(creates_.front()).request.size + kPopulateStep);
  for (auto& a : arenas_) a->want(want);
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
  if (peers_.empty()) idle_since_ = now_ns();
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
    const bool bytes = q.op == uint16_t(Op::kPutInline) || q.op == uint16_t(Op::kHello);
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

bool Broker::reply(int fd, const Reply& r, std::string_view body) {
  // One request is outstanding on a socket, so its reply fits; a client that broke that rule is cut off.
  if (!send_message(fd, &r, sizeof r, body.data(), body.size(), {}, MSG_DONTWAIT)) return true;
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
  r.aux = table_.populated_bytes();
  if (at.inlined) r.count = uint32_t(at.inlined->size());
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

void Broker::apply_effects() {
  for (;;) {
    Table::Effects fx = table_.take_effects();
    if (fx.queries.empty() && fx.changed.empty() && !fx.freed) return;
    for (auto& [s, key] : fx.queries) push_event(s, key);
    for (ObjectId id : fx.changed) {
      auto [b, e] = waiting_.equal_range(id);
      std::vector<uint64_t> serials;
      for (; b != e; ++b) serials.push_back(b->second);
      for (uint64_t serial : serials)
        if (auto p = parked_.find(serial); p != parked_.end() && try_wait(p->second, false)) unpark(serial);
    }
    if (fx.freed) serve_creates();
  }
}

// In order of arrival: the head waits for its turn even if a smaller one behind it would fit.
void Broker::serve_creates() {
  while (!creates_.empty()) {
    const uint64_t serial = creates_.front();
    if (!try_create(parked_.at(serial))) return;
    unpark(serial);
  }
}

// ---- requests that may wait

void Broker::park(Conn& c, const Request& q, std::vector<ObjectId> ids) {
  const uint64_t serial = next_serial_++;
  c.parked = serial;
  if (q.op == uint16_t(Op::kCreate)) creates_.push_back(serial);
  else
    for (ObjectId id : ids) waiting_.emplace(id, serial);
  parked_.emplace(serial, Parked{c.fd.get(), q, std::move(ids), deadline_of(q.timeout_ns)});
}

void Broker::unpark(uint64_t serial) {
  auto it = parked_.find(serial);
  if (it == parked_.end()) return;
  if (creates_.remove(serial)) queue_moved_ = true;
  for (ObjectId id : it->second.ids) {
    auto [b, e] = waiting_.equal_range(id);
    while (b != e) b = b->second == serial ? waiting_.erase(b) : std::next(b);
  }
  if (auto c = conns_.find(it->second.fd); c != conns_.end()) c->second.parked = 0;
  parked_.erase(it);
}

bool Broker::try_create(const Parked& p) {
  const SessionId s = conns_.at(p.fd).session;
  Location at;
  const Status st = table_.create(s, p.request.id, p.request.size, &at);
  if (st == Status::kFull) return false;
  if (st == Status::kOk) {
    const ObjectId id = p.request.id;
    if (!reply_found(p.fd, st, at)) table_.abort(s, id);
  } else reply_status(p.fd, st, st == Status::kTooLarge ? table_.why_full(p.request.size) : "");
  return true;
}

// Answers a get or a wait if it can be answered now, or must be (`last`).
bool Broker::try_wait(const Parked& p, bool last) {
  const SessionId s = conns_.at(p.fd).session;
  if (p.request.op == uint16_t(Op::kGet)) {
    const auto presence = table_.presence(p.request.id);
    if (presence == Table::Presence::kLeased && !last) return false;
    Location at;
    const Status st = presence == Table::Presence::kLeased ? Status::kTimeout : table_.get(s, p.request.id, &at);
    if (st != Status::kOk && st != Status::kInline) reply_status(p.fd, st);
    else if (const ObjectId id = p.request.id; !reply_found(p.fd, st, at) && st == Status::kOk) table_.release(s, id);
    return true;
  }
  std::string ready(p.ids.size(), '\0');
  uint64_t count = 0;
  for (size_t i = 0; i < p.ids.size(); ++i) count += ready[i] = table_.presence(p.ids[i]) == Table::Presence::kReadable;
  if (count < p.request.size && !last) return false;
  Reply r;
  r.count = uint32_t(ready.size());
  r.size = count;
  reply(p.fd, r, ready);
  return true;
}

void Broker::give_up(const Parked& p) {
  if (p.request.op != uint16_t(Op::kCreate)) {
    try_wait(p, true);
    return;
  }
  std::string why = table_.why_full(p.request.size);
  for (auto& a : arenas_)
    if (int e = a->failed()) why += std::string("; the machine gives no more memory: ") + std::strerror(e);
  reply_status(p.fd, Status::kFull, why);
}

void Broker::expire() {
  const int64_t now = now_ns();
  std::vector<uint64_t> late;
  for (const auto& [serial, p] : parked_)
    if (p.deadline <= now) late.push_back(serial);
  for (uint64_t serial : late) {
    auto it = parked_.find(serial);
    if (it == parked_.end()) continue;
    const Parked p = it->second;
    unpark(serial);  // first: a failing reply closes the connection
    give_up(p);
  }
}

// ---- requests

void Broker::hello(Conn& c, const Request& q, std::string label, std::vector<Fd>& fds) {
  const int fd = c.fd.get();
  if (q.size != kProtocolVersion) {
    reply_status(fd, Status::kBad, "this broker speaks protocol version " + std::to_string(kProtocolVersion) + ", the client " + std::to_string(q.size));
    return close_conn(fd);
  }
  pid_t pid = 0;
  same_user(fd, &pid);
  SessionId s;
  do fill_random(&s, sizeof s);
  while (!s || peers_.contains(s));
  Peer& p = peers_[s];
  // The client's own pidfd is right across pid namespaces and cannot name a reused pid.
  p.pidfd = fds.empty() ? Fd() : std::move(fds.front());
  if (!p.pidfd || !try_watch(p.pidfd.get(), EPOLLIN, EPOLL_CTL_ADD)) {
    p.pidfd = pidfd_of(pid);
    if (p.pidfd) watch(p.pidfd.get(), EPOLLIN, EPOLL_CTL_ADD);
  }
  if (p.pidfd) by_pidfd_[p.pidfd.get()] = s;
  p.conns.push_back(fd);
  c.session = s;
  label.resize(std::min(label.size(), kLabelMax));
  table_.open_session(s, pid, std::move(label));
  idle_since_ = 0;
  ever_used_ = true;
  Reply r;
  r.aux = s;
  r.size = config_.capacity;
  r.arena = arenas_.size();
  r.count = sizeof pool_id_;
  reply(fd, r, {reinterpret_cast<const char*>(pool_id_), sizeof pool_id_});
  for (size_t a = 0; a < arenas_.size() && conns_.contains(fd); ++a) {
    Reply m;
    m.status = uint16_t(Status::kArena);
    m.arena = a;
    m.size = arenas_[a]->size();
    const int two[] = {arenas_[a]->rw_fd(), arenas_[a]->ro_fd()};
    if (send_message(fd, &m, sizeof m, nullptr, 0, two, MSG_DONTWAIT)) return close_conn(fd);
  }
}

void Broker::attach(Conn& c, const Request& q) {
  const int fd = c.fd.get();
  const SessionId s = q.id.hi;
  auto p = peers_.find(s);
  const bool events = q.flags & kEvents;
  if (p == peers_.end() || (events && p->second.events_fd >= 0)) {
    reply_status(fd, Status::kBad, "no such session, or it listens already");
    return close_conn(fd);
  }
  p->second.conns.push_back(fd);
  c.session = s;
  reply_status(fd, Status::kOk);
  if (!events || !conns_.contains(fd)) return;
  c.events = true;
  p->second.events_fd = fd;
  table_.listen(s, true);
}

void Broker::handle(Conn& c, const Request& q, const std::byte* body, size_t len, std::vector<Fd>& fds) {
  const int fd = c.fd.get();
  const SessionId s = c.session;
  switch (Op(q.op)) {
    case Op::kHello:
      return hello(c, q, {reinterpret_cast<const char*>(body), len}, fds);
    case Op::kAttach:
      return attach(c, q);
    case Op::kCreate: {
      if (creates_.empty() || q.timeout_ns == 0) {
        Location at;
        const Status st = table_.create(s, q.id, q.size, &at);
        if (st == Status::kOk) {
          if (!reply_found(fd, st, at)) table_.abort(s, q.id);
          return;
        }
        if (st != Status::kFull) return reply_status(fd, st, st == Status::kTooLarge ? table_.why_full(q.size) : "");
      }
      if (q.timeout_ns == 0) return give_up({fd, q, {}, 0});
      return park(c, q, {});
    }
    case Op::kSeal: {
      const Status st = table_.seal(s, q.id, q.key, q.flags & kHandover, ids_in(body, q.count));
      if (!(q.flags & kOneWay)) reply_status(fd, st);
      return;
    }
    case Op::kPutInline:
      return reply_status(fd, table_.put_inline(s, q.id, {reinterpret_cast<const char*>(body), len}, q.key, q.flags & kHandover));
    case Op::kGet: {
      const Parked p{fd, q, {q.id}, 0};
      if (!try_wait(p, q.timeout_ns == 0)) park(c, q, {q.id});
      return;
    }
    case Op::kWait: {
      const Parked p{fd, q, ids_in(body, q.count), 0};
      if (!try_wait(p, q.timeout_ns == 0)) park(c, q, p.ids);
      return;
    }
    case Op::kStats:
      return reply_status(fd, Status::kOk, table_.stats_json());
    case Op::kAbort:
      table_.abort(s, q.id);
      return;
    case Op::kRelease:
      for (ObjectId id : ids_in(body, q.count)) table_.release(s, id);
      return;
    case Op::kDelete:
      for (ObjectId id : ids_in(body, q.count)) table_.remove(id);
      return;
    case Op::kUnclaim:
      return table_.unclaim(s, q.key);
    case Op::kAdopt:
      return table_.adopt(s, q.key);
    case Op::kDisown:
      return table_.disown(s, q.key, q.flags & kMine);
    case Op::kBye:
      // Memory is only given back by a client that says it has no views; one that has some is believed when it is dead.
      if (!table_.holds_anything(s)) peers_.at(s).bye = true;
      return close_conn(fd);
  }
}

}  // namespace mcr
