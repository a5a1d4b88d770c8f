// The peer server: its life, its sessions, and what its node tells it.
#include "server.h"

#include <sys/mman.h>
#include <sys/socket.h>

#include "address.h"
#include "session.h"

namespace mcr::peer {
namespace {

constexpr unsigned kHelpers = 2;  // threads that talk to the broker, which may take its time, or the disk's

}  // namespace

Server::Server(std::shared_ptr<Client> client, const std::string& host, uint16_t port, std::string secret, Options options)
    : client_(std::move(client)), secret_(std::move(secret)), options_(options) {
  if (secret_.empty()) throw std::invalid_argument("the secret must not be empty");
  Address a = resolve(host, port);
  if (a.unspecified()) throw std::invalid_argument("a peer server listens on one address, not on all (\"" + host + "\")");
  Fd fd(::socket(a.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) throw_errno("socket");
  const int one = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (::bind(fd.get(), a.get(), a.length)) throw_errno("bind");
  if (::listen(fd.get(), 256)) throw_errno("listen");
  if (::getsockname(fd.get(), a.get(), &a.length)) throw_errno("getsockname");
  port_ = a.port();
  know_arenas();
  for (unsigned i = 0; i < std::max(1u, options_.threads); ++i) loops_.push_back(std::make_unique<Loop>(*this, i ? Fd() : std::move(fd)));
  try {
    for (auto& l : loops_) l->go();
    for (unsigned i = 0; i < kHelpers; ++i) helpers_.emplace_back([this] { help(); });
  } catch (...) {
    close();
    throw;
  }
}

Server::~Server() { close(); }

void Server::close() {
  std::lock_guard once(close_mutex_);
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  asked_.notify_all();
  work_.notify_all();
  for (auto& t : helpers_) t.join();
  helpers_.clear();
  for (auto& l : loops_) l->stop();
  std::lock_guard lock(mutex_);
  jobs_.clear();  // which have connections
}

// ---- connections and sessions

void Server::place(Fd fd) {
  loops_[next_loop_++ % loops_.size()]->adopt(std::move(fd));
}

void Server::authenticate(Conn& c, Loop& loop, const Proof& p) {
  Welcome w{};
  Digest mac;
  std::memcpy(mac.data(), p.mac, sizeof p.mac);
  if (p.version != kVersion || p.events > 1 || !same(mac, proof_mac(secret_, c.challenge, p))) {
    w.status = 1;
  } else {
    std::memcpy(w.pool_id, client_->pool_id(), sizeof w.pool_id);
    mac = welcome_mac(secret_, c.challenge, p, w);
    std::memcpy(w.mac, mac.data(), sizeof w.mac);
    c.events = p.events;
    std::lock_guard lock(mutex_);
    auto& s = sessions_[std::string(bytes_of(p.session))];
    if (!s) {
      s = std::make_shared<Session>();
      s->token = bytes_of(p.session);
      s->me = name_in(p.me);
      s->number = next_session_++;
      numbered_[s->number] = s;
    }
    ++s->connections;
    if (c.events) s->events.push_back({&loop, c.serial});
    c.session = s;
  }
  Out o;
  o.own = bytes_of(w);
  o.left = o.own.size();
  c.owned += o.left;
  c.out.push_back(std::move(o));
}

void Server::ended(Conn& c) {
  --connections_;
  if (!c.session) {
    ++refused_;
    return;
  }
  std::unordered_map<ObjectId, Session::Pin> pins;  // these end outside the lock
  std::unordered_map<uint64_t, std::shared_ptr<View>> copies;
  std::lock_guard lock(mutex_);
  Session& s = *c.session;
  std::erase_if(s.events, [&](const Target& t) { return t.conn == c.serial; });
  for (Target& t : s.asking)
    if (t.conn == c.serial) t.loop = nullptr;  // the answer still has its turn
  if (--s.connections) return;
  s.over = true;
  pins.swap(s.pins);
  copies.swap(s.copies);
  for (ObjectId id : s.replicas)
    if (auto r = replicas_.find(id); r != replicas_.end() && r->second.erase(s.number) && r->second.empty()) replicas_.erase(r);
  const bool again = std::any_of(numbered_.begin(), numbered_.end(), [&](auto& n) { return n.second.get() != &s && n.second->me == s.me; });
  if (!again) tracker_.forget(s.me);
  else
    for (ObjectId id : s.pulling) tracker_.finish(id, s.me, false);
  asks_.push_back({s.number, "", ""});
  asked_.notify_one();
  sessions_.erase(s.token);
  numbered_.erase(s.number);
}

// ---- what the node tells

void Server::describe(std::string text) {
  if (text.size() > kMaxText) throw std::invalid_argument("a description has at most " + std::to_string(kMaxText) + " bytes, got " + std::to_string(text.size()));
  know_arenas();
  std::lock_guard lock(mutex_);
  description_ = std::move(text);
}

void Server::offer(ObjectId id, Client::Place at, uint64_t bytes) {
  if (!arena(at.arena)) know_arenas();
  std::lock_guard lock(mutex_);
  offers_[id] = {at, bytes, 0};
}

void Server::progress(ObjectId id, uint64_t bytes) {
  {
    std::lock_guard lock(mutex_);
    const auto o = offers_.find(id);
    if (o == offers_.end()) throw std::invalid_argument("no such object is being offered");
    if (bytes > o->second.bytes) throw std::invalid_argument("progress of " + std::to_string(bytes) + " bytes in an object of " + std::to_string(o->second.bytes));
    o->second.available = std::max(o->second.available, bytes);
  }
  poke_all();
}

// Whoever reads what was offered goes on, now with a pin of the sealed object, if that still is where it was.
void Server::retract(ObjectId id) {
  auto view = std::make_shared<View>();
  Client::Place at;
  bool there = false;
  try {
    there = client_->get(id, 0, false, view.get()) == Status::kOk && view->in_arena(&at.arena, &at.offset);
  } catch (const BrokerGone&) {  // nothing of it is left
  }
  {
    std::lock_guard lock(mutex_);
    const auto o = offers_.find(id);
    if (o == offers_.end()) return;
    there = there && at.arena == o->second.at.arena && at.offset == o->second.at.offset;
    offers_.erase(o);
    for (auto& [_, s] : numbered_)
      if (auto p = s->pins.find(id); p != s->pins.end() && !p->second.view) {
        if (there) p->second.view = view;
        else p->second.lost = true;
      }
  }
  poke_all();
}

void Server::gone(ObjectId id) {
  std::lock_guard lock(mutex_);
  tracker_.gone(id);
  const auto r = replicas_.find(id);
  if (r == replicas_.end()) return;
  const Frame f{sizeof id, uint16_t(Op::kGone), 0, 0};
  for (uint64_t number : r->second) {
    Session& s = *numbered_.at(number);
    s.replicas.erase(id);
    for (const Target& t : s.events) t.loop->post(t.conn, std::string(bytes_of(f)).append(bytes_of(id)), false);
  }
  replicas_.erase(r);
}

void Server::poke_all() {
  for (auto& l : loops_) l->poke();
}

bool Server::next_request(int64_t timeout_ns, Ask* ask) {
  std::unique_lock lock(mutex_);
  asked_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return closed_ || !asks_.empty(); });
  if (asks_.empty()) return false;
  *ask = std::move(asks_.front());
  asks_.pop_front();
  return true;
}

void Server::answer(uint64_t session, std::string_view blob) {
  if (blob.size() > kMaxText) throw std::invalid_argument("an answer has at most " + std::to_string(kMaxText) + " bytes, got " + std::to_string(blob.size()));
  std::lock_guard lock(mutex_);
  const auto n = numbered_.find(session);
  if (n == numbered_.end()) return;  // it is over
  Session& s = *n->second;
  if (s.asking.empty()) throw std::invalid_argument("session " + std::to_string(session) + " has asked nothing");
  const Target t = s.asking.front();
  s.asking.pop_front();
  const Frame f{uint32_t(blob.size()), uint16_t(Op::kExchange), 0, 0};
  if (t.loop) t.loop->post(t.conn, std::string(bytes_of(f)).append(blob), true);
}

Server::Stats Server::stats() {
  std::lock_guard lock(mutex_);
  Stats s{connections_, sessions_.size(), 0, sent_, refused_, requests_, offers_.size(), 0, lent_};
  for (auto& [_, x] : sessions_) s.pins += x->pins.size();
  for (auto& [_, r] : replicas_) s.replicas += r.size();
  return s;
}

// ---- arenas. This server's own maps of them: those of the client go when that is closed.

std::shared_ptr<Server::Arena> Server::arena(uint32_t index) {
  std::lock_guard lock(mutex_);
  return index < arenas_.size() ? arenas_[index] : nullptr;
}

void Server::know_arenas() {
  for (const Client::ArenaInfo& a : client_->map_arenas()) {
    if (arena(a.index)) continue;
    auto fresh = std::make_shared<Arena>();
    fresh->map = Mapping(a.ro_fd, 0, a.bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE);
    std::lock_guard lock(mutex_);
    if (a.index >= arenas_.size()) arenas_.resize(a.index + 1);
    if (!arenas_[a.index]) arenas_[a.index] = std::move(fresh);
  }
}

}  // namespace mcr::peer
