// The peer server: what pullers ask for.
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "server.h"
#include "session.h"

namespace mcr::peer {
namespace {

template <class T>
bool take(std::string_view* from, T* out) {
  if (from->size() < sizeof *out) return false;
  std::memcpy(out, from->data(), sizeof *out);
  from->remove_prefix(sizeof *out);
  return true;
}

std::string framed(Op op, Code code, uint64_t aux, std::string_view body = {}) {
  const Frame f{uint32_t(body.size()), uint16_t(op), uint16_t(code), aux};
  return std::string(bytes_of(f)).append(body);
}

Code code_of(Status s) {
  switch (s) {
    case Status::kOk: return Code::kOk;
    case Status::kTimeout: return Code::kNotYet;
    case Status::kMissing: return Code::kMissing;
    default: return Code::kLost;
  }
}

}  // namespace

bool Server::request(Conn& c, Loop& loop, const Frame& f, std::string_view body) {
  switch (Op(f.op)) {
    case Op::kPin:
    case Op::kUnpin: {
      uint32_t count = 0;
      const bool unpin = Op(f.op) == Op::kUnpin;
      const size_t head = unpin ? sizeof(UnpinRequest) : sizeof(PinRequest);
      if (body.size() < head) return false;
      std::memcpy(&count, body.data(), sizeof count);
      if (count > kMaxPins || body.size() != head + count * sizeof(ObjectId)) return false;
      c.busy = true;
      {
        std::lock_guard lock(mutex_);
        jobs_.push_back({&loop, c.serial, c.session, std::string(body), Op(f.op), c.out.empty() ? c.fd : nullptr});
      }
      work_.notify_one();
      return true;
    }
    case Op::kWait:
      if (!take(&body, &c.wait) || !body.empty()) return false;
      c.waiting = true;
      c.wait_deadline = now_ns() + std::clamp<int64_t>(c.wait.timeout_ns, 0, 3600'000'000'000);
      try_wait(c, c.wait.timeout_ns <= 0);
      return true;
    case Op::kRead:
      return read(c, loop, body);
    case Op::kDescribe: {
      if (!body.empty()) return false;
      std::lock_guard lock(mutex_);
      c.reply(Op::kDescribe, Code::kOk, 0, description_);
      return true;
    }
    case Op::kExchange:
      return exchange(c, loop, body);
    case Op::kGone:
      return false;
  }
  return false;
}

// Answers a wait that can be answered, or must be (`last`).
bool Server::try_wait(Conn& c, bool last) {
  uint64_t available = 0;
  Code code = Code::kOk;
  {
    std::lock_guard lock(mutex_);
    const auto p = c.session->pins.find(c.wait.id);
    if (auto o = offers_.find(c.wait.id); o != offers_.end()) available = o->second.available;
    else if (p != c.session->pins.end() && p->second.view && !p->second.lost) available = p->second.bytes;
    else code = p == c.session->pins.end() ? Code::kMissing : Code::kLost;
    if (code == Code::kOk && available <= c.wait.beyond && !last) return false;
  }
  c.waiting = false;
  c.wait_deadline = INT64_MAX;
  c.reply(Op::kWait, code, available);
  return true;
}

// Whether some of it is of an object that is offered, and has not come yet.
bool Server::on_its_way(const Range& r) const {
  return std::any_of(offers_.begin(), offers_.end(), [&](const auto& one) {
    const Offer& o = one.second;
    return o.at.arena == r.region && o.at.offset + o.available < r.offset + r.bytes && r.offset < o.at.offset + o.bytes;
  });
}

bool Server::read(Conn& c, Loop& loop, std::string_view body) {
  const size_t n = body.size() / sizeof(Range);
  if (!n || n > kMaxRanges || body.size() % sizeof(Range)) return false;
  std::vector<Out> outs;
  outs.reserve(n);
  uint64_t total = 0;
  size_t bad = n;
  {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < n && bad == n; ++i) {
      Range r;
      take(&body, &r);
      Out o;
      o.left = r.bytes;
      if (r.region < kCopies) {
        if (r.region >= arenas_.size() && !c.learnt) {
          c.again = c.learnt = c.busy = true;
          jobs_.push_back({&loop, c.serial, c.session, "", Op::kRead, nullptr});
          work_.notify_one();
          return true;
        }
        auto a = r.region < arenas_.size() ? arenas_[r.region] : nullptr;
        if (!a || r.bytes > a->map.size() || r.offset > a->map.size() - r.bytes) bad = i;
        else if (r.bytes && on_its_way(r)) {
          c.again = c.blocked = true;
          return true;
        } else {
          o.memory = a->map.data() + r.offset;
          o.lent = r.bytes >= kLent;
          o.keep = std::move(a);
        }
      } else {
        const auto v = c.session->copies.find(r.region);
        if (v == c.session->copies.end() || r.bytes > v->second->size() || r.offset > v->second->size() - r.bytes) bad = i;
        else {
          o.memory = v->second->data() + r.offset;
          o.keep = v->second;
        }
      }
      if (r.bytes) outs.push_back(std::move(o));
      if (__builtin_add_overflow(total, r.bytes, &total)) bad = i;
    }
  }
  if (bad < n) {
    c.reply(Op::kRead, Code::kBad, bad);
    return true;
  }
  c.reply(Op::kRead, Code::kOk, total);
  for (Out& o : outs) c.out.push_back(std::move(o));
  return true;
}

bool Server::exchange(Conn& c, Loop& loop, std::string_view body) {
  uint32_t name = 0;
  if (!take(&body, &name) || name == 0 || name > kNameMax || name > body.size() || body.size() - name > kMaxText) return false;
  std::lock_guard lock(mutex_);
  c.session->asking.push_back({&loop, c.serial});
  c.busy = true;
  asks_.push_back({c.session->number, std::string(body.substr(0, name)), std::string(body.substr(name))});
  asked_.notify_one();
  return true;
}

// ---- what needs the broker

void Server::help() {
  for (;;) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [&] { return closed_ || !jobs_.empty(); });
      if (closed_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    std::string reply;
    try {
      if (job.op == Op::kRead) know_arenas();
      else if (!(job.op == Op::kUnpin ? unpin(job, &reply) : pin(job, &reply))) reply = framed(job.op, Code::kBad, 0);
    } catch (const std::exception&) {  // the broker is gone, or there is no memory
      if (job.op != Op::kRead) reply = framed(job.op, Code::kLost, 0);
    }
    if (job.fd) answer_at_once(job, &reply);
    job.loop->post(job.conn, std::move(reply), true);
  }
}

// The connection is this thread's until the loop hears that it has been answered. What the socket does not take now, the loop sends.
void Server::answer_at_once(const Job& job, std::string* reply) {
  const ssize_t n = ::send(job.fd->get(), reply->data(), reply->size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n <= 0) return;  // it will learn why
  count_sent(uint64_t(n));
  reply->erase(0, size_t(n));
}

// What comes inline is appended to `reply`, and its view is held until the request is done.
Entry Server::pin_one(Session& s, ObjectId id, bool inlined, std::string* reply, std::vector<std::shared_ptr<View>>* held) {
  Entry e;
  {
    std::lock_guard lock(mutex_);
    if (auto o = offers_.find(id); o != offers_.end() && !s.over) {
      auto& p = s.pins[id];
      if (!p.count || p.lost) p = {nullptr, o->second.at, o->second.at.arena, o->second.bytes, p.count, p.count && p.lost};
      ++p.count;
      e.region = p.region, e.offset = p.at.offset, e.size = p.bytes, e.available = o->second.available;
      return e;
    }
  }
  auto view = std::make_shared<View>();
  const Status status = client_->get(id, 0, false, view.get());
  if (status != Status::kOk) {
    e.code = uint16_t(code_of(status));
    return e;
  }
  e.size = e.available = view->size();
  if (inlined && e.size <= kInlinePin) {
    e.code = uint16_t(Code::kInline);
    e.inlined = uint32_t(e.size);
    reply->append(reinterpret_cast<const char*>(view->data()), e.size);
    held->push_back(std::move(view));
    return e;
  }
  Client::Place at;
  const bool in_arena = view->in_arena(&at.arena, &at.offset);
  if (in_arena && !arena(at.arena)) know_arenas();
  std::shared_ptr<View> before;  // ends outside the lock
  std::lock_guard lock(mutex_);
  auto& p = s.pins[id];
  if (!p.count || p.lost || !p.view) {
    before = std::move(p.view);
    p = {view, at, in_arena ? at.arena : next_copy_++, e.size, p.count, p.count && p.lost};
    if (!in_arena) s.copies[p.region] = view;
  }
  ++p.count;
  e.region = p.region;
  e.offset = p.at.offset;
  return e;
}

bool Server::pin(const Job& job, std::string* reply) {
  std::string_view body = job.body;
  PinRequest q;
  if (!take(&body, &q)) return false;
  Session& s = *job.session;
  const std::string bad = name_in(q.bad);
  const size_t head = sizeof(Frame) + q.count * sizeof(Entry);
  reply->assign(head, '\0');
  std::vector<std::shared_ptr<View>> held;
  std::vector<ObjectId> kept;
  for (uint32_t i = 0; i < q.count; ++i) {
    ObjectId id;
    take(&body, &id);
    Entry e = pin_one(s, id, q.inlined && reply->size() - head <= kInlineReply - kInlinePin, reply, &held);
    if (q.kept && Code(e.code) == Code::kInline) kept.push_back(id);
    if (!e.code && e.size >= kRelayMin && e.available == e.size && !s.me.empty()) {
      std::lock_guard lock(mutex_);
      if (s.over) break;
      set_name(e.source, tracker_.assign(id, s.me, bad));
      s.pulling.insert(id);
    }
    std::memcpy(reply->data() + sizeof(Frame) + i * sizeof e, &e, sizeof e);
  }
  keep(s, kept);
  std::unordered_map<ObjectId, Session::Pin> late;  // nobody is there any more who would unpin them
  {
    std::lock_guard lock(mutex_);
    if (s.over) late.swap(s.pins), s.copies.clear();
  }
  const Frame f{uint32_t(reply->size() - sizeof f), uint16_t(Op::kPin), 0, 0};
  std::memcpy(reply->data(), &f, sizeof f);
  return true;
}

// That session has a replica of each. Whoever listens to the broker calls gone() when one ceases to exist.
void Server::keep(Session& s, const std::vector<ObjectId>& ids) {
  if (ids.empty()) return;
  {
    std::lock_guard lock(mutex_);
    if (s.over) return;
    for (ObjectId id : ids) {
      s.replicas.insert(id);
      replicas_[id].insert(s.number);
    }
  }
  client_->watch(ids);
}

bool Server::unpin(const Job& job, std::string* reply) {
  std::string_view body = job.body;
  UnpinRequest q;
  if (!take(&body, &q)) return false;
  Session& s = *job.session;
  std::vector<std::shared_ptr<View>> over;
  std::vector<ObjectId> watch;
  // A pin is worth something as long as the broker that gave it lives.
  bool all = client_->usable() && client_->broker_lives();
  {
    std::lock_guard lock(mutex_);
    for (uint32_t i = 0; i < q.count; ++i) {
      ObjectId id;
      take(&body, &id);
      const auto p = s.pins.find(id);
      const bool pinned = p != s.pins.end();
      all = all && pinned && !p->second.lost;
      if (pinned && !--p->second.count) {
        over.push_back(std::move(p->second.view));
        s.copies.erase(p->second.region);
        s.pins.erase(p);
      }
      const bool kept = q.kept && (all || !pinned) && !s.over;  // what came inline was never pinned
      if (s.pulling.erase(id)) tracker_.finish(id, s.me, kept);
      if (kept) watch.push_back(id);
    }
  }
  keep(s, watch);
  *reply = framed(Op::kUnpin, Code::kOk, all);
  return true;
}

}  // namespace mcr::peer
