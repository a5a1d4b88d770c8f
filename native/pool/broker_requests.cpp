// The broker: what clients ask for.
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <set>

#include "broker.h"
#include "json.h"

namespace mcr {
namespace {

constexpr size_t kLabelMax = 256;  // bytes; labels go into messages to others

int64_t deadline_of(int64_t timeout_ns) {
  const int64_t now = now_ns();
  return timeout_ns < 0 || timeout_ns > INT64_MAX - now ? INT64_MAX : now + timeout_ns;
}

std::vector<ObjectId> ids_in(const std::byte* body, size_t count) {
  std::vector<ObjectId> ids(count);
  if (count) std::memcpy(ids.data(), body, count * sizeof(ObjectId));
  return ids;
}

}  // namespace

// ---- requests that may wait

void Broker::park(Conn& c, Parked p) {
  p.since = now_ns();
  p.deadline = deadline_of(p.request.timeout_ns);
  c.parked = parking_.add(std::move(p));
}

void Broker::unpark(uint64_t serial) {
  const Parked* p = parking_.find(serial);
  if (!p) return;
  if (p->request.op == uint16_t(Op::kCreate)) queue_moved_ = true;
  if (auto c = conns_.find(p->fd); c != conns_.end()) c->second.parked = 0;
  parking_.remove(serial);
}

// In order of arrival: the head waits for its turn even if a smaller one behind it would fit. Who waits for its own group's quota holds up
// that group only.
void Broker::serve_creates() {
  std::set<uint32_t> blocked;
  for (uint64_t serial : std::vector<uint64_t>(parking_.creates().begin(), parking_.creates().end())) {
    const Parked* p = parking_.find(serial);
    if (!p) continue;
    const uint32_t group = table_.group(conns_.at(p->fd).session);
    if (blocked.contains(group)) continue;
    const Status st = try_create(*p);
    if (st == Status::kFull) return;
    if (st == Status::kQuota) blocked.insert(group);
    else unpark(serial);
  }
}

Status Broker::try_create(const Parked& p) {
  const SessionId s = conns_.at(p.fd).session;
  const ObjectId id = p.request.id;
  Location at;
  Status st = table_.create(s, id, p.request.size, &at, p.note, int(p.request.key.kind) - 1);
  if (st == Status::kFull && p.request.size > largest_extent()) st = Status::kTooLarge;  // however much is freed
  if (st == Status::kFull || st == Status::kQuota) return st;
  if (st == Status::kOk) {
    if (!reply_found(p.fd, st, at)) table_.abort(s, id);
  } else {
    std::string why;
    if (st == Status::kTooLarge) why = table_.why_full(p.request.size, s) + "; no arena has more than " + std::to_string(largest_extent()) + " bytes";
    reply_status(p.fd, st, why);
  }
  return st;
}

// Answers a get or a wait if it can be answered now, or must be (`last`).
bool Broker::try_wait(const Parked& p, bool last) {
  const SessionId s = conns_.at(p.fd).session;
  if (p.request.op == uint16_t(Op::kGet)) {
    const ObjectId id = p.request.id;
    const bool unsealed = table_.presence(id) == Table::Presence::kLeased;
    if (unsealed && !last) return false;
    Location at;
    const Status st = unsealed ? Status::kTimeout : table_.get(s, id, &at, !last && parking_.creates().empty());
    if (st == Status::kWait) return false;
    const bool pinned = st == Status::kOk || st == Status::kOnDisk;
    if (!pinned && st != Status::kInline) reply_status(p.fd, st);
    else if (!reply_found(p.fd, st, at) && pinned) table_.release(s, id);
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
  std::string why = table_.why_full(p.request.size, conns_.at(p.fd).session);
  for (auto& a : arenas_)
    if (int e = a->failed()) why += std::string("; the machine gives no more memory: ") + std::strerror(e);
  reply_status(p.fd, Status::kFull, why);
}

void Broker::expire() {
  for (uint64_t serial : parking_.expired(now_ns())) {
    const Parked* there = parking_.find(serial);
    if (!there) continue;
    const Parked p = *there;
    unpark(serial);  // first: a failing reply closes the connection
    give_up(p);
  }
}

// ---- requests

void Broker::hello(Conn& c, const Request& q, std::string_view names, std::vector<Fd>& fds) {
  const int fd = c.fd.get();
  if (q.size != kProtocolVersion) {
    reply_status(fd, Status::kBad, "this broker speaks protocol version " + std::to_string(kProtocolVersion) + ", the client " + std::to_string(q.size));
    return close_conn(fd);
  }
  pid_t pid = 0;
  same_user(fd, &pid);
  SessionId s = q.id.hi;
  if (auto p = peers_.find(s); p != peers_.end() && p->second.away && p->second.pid == pid) {
    p->second.away = false;
    table_.resume(s, q.id.lo);
  } else {
    do
      if (::getrandom(&s, sizeof s, 0) != sizeof s) throw_errno("getrandom");
    while (!s || peers_.contains(s));
    Peer& fresh = peers_[s];
    fresh.pid = pid;
    // The client's own pidfd is right across pid namespaces and cannot name a reused pid.
    if (fds.empty() || !watch_process(s, fresh, std::move(fds.front()))) watch_process(s, fresh, pidfd_of(pid));
    const size_t end = std::min(names.find('\0'), names.size());
    const std::string_view group = end < names.size() ? names.substr(end + 1) : std::string_view();
    table_.open_session(s, pid, std::string(names.substr(0, std::min(end, kLabelMax))), group.substr(0, kLabelMax),
                        config_.spill_dir.empty() ? 0 : process_start(pid));
  }
  peers_.at(s).conns.push_back(fd);
  c.session = s;
  idle_since_ = 0;
  ever_used_ = true;
  Reply r;
  r.aux = s;
  r.size = table_.limits().capacity;
  r.arena = arenas_.size();
  r.offset = config_.nodes.size();
  r.count = sizeof pool_id_;
  reply(fd, r, {reinterpret_cast<const char*>(pool_id_), sizeof pool_id_});
}

void Broker::attach(Conn& c, const Request& q) {
  const int fd = c.fd.get();
  const SessionId s = q.id.hi;
  auto p = peers_.find(s);
  const bool events = q.flags & kEvents;
  if (p == peers_.end() || p->second.away || (events && p->second.events_fd >= 0)) {
    reply_status(fd, Status::kBad, "no such session, or it listens already");
    return close_conn(fd);
  }
  p->second.conns.push_back(fd);
  c.session = s;
  reply_status(fd, Status::kOk);
  if (!events || !conns_.contains(fd)) return;
  c.events = true;
  p->second.events_fd = fd;
  table_.listen(s, true, q.flags & kAskLast);
}

void Broker::send_arena(int fd, uint64_t index) {
  if (index >= arenas_.size()) return reply_status(fd, Status::kMissing);
  const Arena& a = *arenas_[index];
  Reply r;
  r.arena = index;
  r.size = a.size();
  r.aux = a.pages() == HugePages::kHugetlb;
  const int two[] = {a.rw_fd(), a.ro_fd()};
  reply(fd, r, {}, two);
}

void Broker::send_report(int fd, bool detail) {
  auto number = [](const char* name, uint64_t v) { return ",\"" + std::string(name) + "\":" + std::to_string(v); };
  std::string arenas;
  for (uint32_t i = 0; i < arenas_.size(); ++i) {
    const Arena& a = *arenas_[i];
    static constexpr const char* kPages[] = {"thp", "hugetlb", "4k"};
    arenas += (arenas.empty() ? "{" : ",{") + number("index", i).substr(1) + number("size_bytes", a.size()) +
              number("populated_bytes", table_.populated_bytes(i)) + number("used_bytes", table_.arena_used(i)) +
              number("largest_free_bytes", table_.arena_largest_free(i)) + ",\"huge_pages\":\"" + kPages[int(a.pages())] +
              "\",\"numa_node\":" + std::to_string(a.node()) + "}";
  }
  const int64_t now = now_ns(), oldest = parking_.oldest();
  const std::string text = "{" + table_.report(detail) + number("waiting_creates", parking_.count(Op::kCreate)) +
                           number("waiting_gets", parking_.count(Op::kGet)) + number("waiting_waits", parking_.count(Op::kWait)) +
                           number("oldest_wait_s", oldest == INT64_MAX ? 0 : uint64_t(now - oldest) / 1'000'000'000) +
                           number("uptime_s", uint64_t(now - started_) / 1'000'000'000) + number("generation", generation_) +
                           number("pid", uint64_t(::getpid())) + number("protocol", kProtocolVersion) +
                           (journal_ ? ",\"journal\":true" : ",\"journal\":false") + ",\"spill_dir\":" +
                           (directory_.taken() ? quoted(directory_.path()) : "\"\"") + ",\"arenas\":[" + arenas + "]}";
  if (!detail) return reply_status(fd, Status::kOk, text);
  Fd file(::memfd_create("mooncake_ray_report", MFD_CLOEXEC));
  if (!file || !write_fully(file.get(), reinterpret_cast<const std::byte*>(text.data()), text.size(), 0).empty())
    return reply_status(fd, Status::kFull, "no memory for the report");
  const int one[] = {file.get()};
  Reply r;
  r.size = text.size();
  reply(fd, r, {}, one);
}

void Broker::handle(Conn& c, const Request& q, const std::byte* body, size_t len, std::vector<Fd>& fds) {
  const int fd = c.fd.get();
  const SessionId s = c.session;
  const std::string_view text{reinterpret_cast<const char*>(body), len};
  switch (Op(q.op)) {
    case Op::kHello:
      return hello(c, q, text, fds);
    case Op::kAttach:
      return attach(c, q);
    case Op::kArena:
      return send_arena(fd, q.size);
    case Op::kGrow:
      if (q.size > std::max(config_.most, table_.limits().capacity))
        return reply_status(fd, Status::kTooLarge, "this pool may grow to " + std::to_string(std::max(config_.most, config_.capacity)) + " bytes");
      table_.set_capacity(std::max(q.size / kPageSize * kPageSize, table_.limits().capacity));
      return reply_status(fd, Status::kOk);
    case Op::kCreate: {
      Parked p{fd, q, {}, std::string(text)};
      Status st = Status::kFull;
      if (parking_.creates().empty() || q.timeout_ns == 0) st = try_create(p);
      if (st != Status::kFull && st != Status::kQuota) return;
      if (q.timeout_ns == 0) return give_up(p);
      queue_moved_ = true;
      return park(c, std::move(p));
    }
    case Op::kSeal: {
      const Status st = table_.seal(s, q.id, q.key, q.flags & kHandover, ids_in(body, q.count));
      if (!(q.flags & kOneWay)) reply_status(fd, st);
      return;
    }
    case Op::kPutInline:
      return reply_status(fd, table_.put_inline(s, q.id, text, q.key, q.flags & kHandover));
    case Op::kGet: {
      Parked p{fd, q, {q.id}, {}};
      if (!try_wait(p, q.timeout_ns == 0)) park(c, std::move(p));
      return;
    }
    case Op::kWait: {
      Parked p{fd, q, ids_in(body, q.count), {}};
      if (!try_wait(p, q.timeout_ns == 0)) park(c, std::move(p));
      return;
    }
    case Op::kStats:
      return send_report(fd, q.flags & kDetail);
    case Op::kAbort:
      table_.abort(s, q.id);
      return;
    case Op::kRelease:
      for (ObjectId id : ids_in(body, q.count)) table_.release(s, id);
      return;
    case Op::kDelete:
      for (ObjectId id : ids_in(body, q.count)) table_.remove(id);
      return;
    case Op::kWatch:
      for (ObjectId id : ids_in(body, q.count)) table_.watch(s, id);
      return;
    case Op::kInquire:
      return table_.inquire(s, q.key);
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
