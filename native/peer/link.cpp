#include "link.h"

#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "address.h"
#include "pool/client.h"

namespace mcr::peer {
namespace {

int64_t deadline_of(int64_t timeout_ns) {
  const int64_t now = now_ns();
  return timeout_ns > INT64_MAX - now ? INT64_MAX : now + std::max<int64_t>(timeout_ns, 0);
}

template <class T>
T as(std::string_view bytes) {
  T t;
  std::memcpy(&t, bytes.data(), sizeof t);
  return t;
}

std::string_view raw(const std::vector<ObjectId>& ids) { return {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(ObjectId)}; }

}  // namespace

void Link::fail(PeerError::Kind kind, int error, const std::string& why) {
  throw PeerError(kind, std::string(op_) + " at " + peer_ + ": " + why, op_, error, peer_);
}

void Link::close() {
  if (!closed_.exchange(true) && fd_) ::shutdown(fd_.get(), SHUT_RDWR);
}

void Link::wait_for(short events, int64_t deadline) {
  for (;;) {
    const int64_t left = deadline == INT64_MAX ? INT64_MAX : deadline - now_ns();
    if (left <= 0) fail(PeerError::kOther, ETIMEDOUT, "not done before the deadline");
    pollfd p{fd_.get(), events, 0};
    const int n = ::poll(&p, 1, int(std::min<int64_t>(left / 1'000'000 + 1, 60'000)));
    if (n > 0) return;
    if (n < 0 && errno != EINTR) fail(PeerError::kLost, errno, std::strerror(errno));
    if (n < 0 && Client::interrupted && Client::interrupted()) throw Interrupted();
  }
}

void Link::send_all(std::string_view bytes, int64_t deadline) {
  while (!bytes.empty()) {
    const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) bytes.remove_prefix(size_t(n));
    else if (errno == EAGAIN) wait_for(POLLOUT, deadline);
    else if (errno != EINTR) fail(PeerError::kLost, errno, std::strerror(errno));
  }
}

void Link::receive_all(void* to, size_t bytes, int64_t deadline) {
  auto* p = static_cast<char*>(to);
  while (bytes) {
    const ssize_t n = ::recv(fd_.get(), p, bytes, MSG_DONTWAIT);
    if (n > 0) p += n, bytes -= size_t(n);
    else if (n == 0) fail(PeerError::kLost, ECONNRESET, "the peer hung up");
    else if (errno == EAGAIN) wait_for(POLLIN, deadline);
    else if (errno != EINTR) fail(PeerError::kLost, errno, std::strerror(errno));
  }
}

std::unique_ptr<Link> Link::connect(const std::string& host, uint16_t port, const std::string& secret, const Options& o) {
  if (o.session.size() != 16) throw std::invalid_argument("a session is 16 bytes, got " + std::to_string(o.session.size()));
  if (o.me.size() > kNameMax) throw std::invalid_argument("a peer's name has at most " + std::to_string(kNameMax) + " bytes, got " + std::to_string(o.me.size()));
  if (secret.empty()) throw std::invalid_argument("the secret must not be empty");
  const int64_t deadline = deadline_of(o.timeout_ns);
  const Address to = resolve(host, port);
  std::unique_ptr<Link> l(new Link);
  l->peer_ = (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + std::to_string(port);
  l->fd_.reset(::socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!l->fd_) l->fail(PeerError::kOther, errno, std::strerror(errno));
  if (!o.source_address.empty()) {
    const Address from = resolve(o.source_address, 0);
    if (::bind(l->fd_.get(), from.get(), from.length)) l->fail(PeerError::kOther, errno, std::string("from ") + o.source_address + ": " + std::strerror(errno));
  }
  const int one = 1;
  ::setsockopt(l->fd_.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  if (::connect(l->fd_.get(), to.get(), to.length)) {
    if (errno != EINPROGRESS) l->fail(PeerError::kLost, errno, std::strerror(errno));
    l->wait_for(POLLOUT, deadline);
    int error = 0;
    socklen_t n = sizeof error;
    ::getsockopt(l->fd_.get(), SOL_SOCKET, SO_ERROR, &error, &n);
    if (error) l->fail(PeerError::kLost, error, std::strerror(error));
  }
  Challenge c;
  l->receive_all(&c, sizeof c, deadline);
  if (std::memcmp(c.magic, kMagic, sizeof kMagic)) l->fail(PeerError::kLost, EPROTO, "what listens there is no peer of this kind");
  if (c.version != kVersion)
    l->fail(PeerError::kRefused, EPROTO, "it speaks version " + std::to_string(c.version) + ", this end " + std::to_string(kVersion));
  Proof p{};
  if (::getrandom(p.nonce, sizeof p.nonce, 0) != sizeof p.nonce) l->fail(PeerError::kOther, errno, "no random numbers");
  std::memcpy(p.session, o.session.data(), sizeof p.session);
  p.version = kVersion;
  p.events = o.events;
  set_name(p.me, o.me);
  Digest mac = proof_mac(secret, c, p);
  std::memcpy(p.mac, mac.data(), sizeof p.mac);
  l->send_all(bytes_of(p), deadline);
  Welcome w;
  l->receive_all(&w, sizeof w, deadline);
  if (w.status) l->fail(PeerError::kRefused, EACCES, "it refuses: its secret is another one");
  mac = welcome_mac(secret, c, p, w);
  Digest theirs;
  std::memcpy(theirs.data(), w.mac, sizeof w.mac);
  if (!same(mac, theirs)) l->fail(PeerError::kRefused, EACCES, "it does not know the secret");
  l->pool_id_ = bytes_of(w.pool_id);
  l->events_ = o.events;
  return l;
}

Frame Link::ask(Op op, std::initializer_list<std::string_view> parts, int64_t deadline, Body* body) {
  Frame f;
  f.op = uint16_t(op);
  std::string message(sizeof f, '\0');
  for (std::string_view p : parts) message.append(p);
  f.bytes = uint32_t(message.size() - sizeof f);
  std::memcpy(message.data(), &f, sizeof f);
  if (f.bytes > kMaxRequest) throw std::invalid_argument("a request has at most " + std::to_string(kMaxRequest) + " bytes, got " + std::to_string(f.bytes));
  send_all(message, deadline);
  receive_all(&f, sizeof f, deadline);
  if (f.op != uint16_t(op) || f.bytes > kMaxReply) fail(PeerError::kLost, EPROTO, "its answer makes no sense");
  Body b{std::make_shared_for_overwrite<char[]>(f.bytes), f.bytes};
  receive_all(b.bytes.get(), b.size, deadline);
  if (body) *body = std::move(b);
  return f;
}

std::string Link::describe(int64_t timeout_ns) {
  Guard g(*this, "describe");
  Body body;
  ask(Op::kDescribe, {}, deadline_of(timeout_ns), &body);
  g.done = true;
  return std::string(body.text());
}

std::vector<Pinned> Link::pin(const std::vector<ObjectId>& ids, int64_t timeout_ns, const std::string& bad, bool inlined, bool kept) {
  if (ids.size() > kMaxPins) throw std::invalid_argument("pin at most " + std::to_string(kMaxPins) + " objects at a time, got " + std::to_string(ids.size()));
  if (bad.size() > kNameMax) throw std::invalid_argument("a peer's name has at most " + std::to_string(kNameMax) + " bytes, got " + std::to_string(bad.size()));
  Guard g(*this, "pin");
  PinRequest q;
  q.count = uint32_t(ids.size());
  q.inlined = inlined;
  q.kept = kept;
  set_name(q.bad, bad);
  Body body;
  const Frame f = ask(Op::kPin, {bytes_of(q), raw(ids)}, deadline_of(timeout_ns), &body);
  if (Code(f.code) == Code::kLost) fail(PeerError::kLost, ECONNRESET, "its pool is gone");
  const std::string_view rest = body.text();
  if (Code(f.code) != Code::kOk || rest.size() < ids.size() * sizeof(Entry)) fail(PeerError::kLost, EPROTO, "its answer makes no sense");
  std::vector<Pinned> all(ids.size());
  std::string_view bytes = rest.substr(ids.size() * sizeof(Entry));
  for (size_t i = 0; i < all.size(); ++i) {
    const Entry e = as<Entry>(rest.substr(i * sizeof(Entry)));
    Pinned& p = all[i];
    if (e.code > uint16_t(Code::kLost) || e.inlined > bytes.size() || (Code(e.code) == Code::kInline && e.size != e.inlined) || e.available > e.size)
      fail(PeerError::kLost, EPROTO, "its answer makes no sense");
    p = {Code(e.code), e.region, e.offset, e.size, e.available, bytes.substr(0, e.inlined), name_in(e.source), body.bytes};
    bytes.remove_prefix(e.inlined);
  }
  g.done = true;
  return all;
}

bool Link::unpin(const std::vector<ObjectId>& ids, int64_t timeout_ns, bool kept) {
  if (ids.size() > kMaxPins) throw std::invalid_argument("unpin at most " + std::to_string(kMaxPins) + " objects at a time, got " + std::to_string(ids.size()));
  Guard g(*this, "unpin");
  UnpinRequest q;
  q.count = uint32_t(ids.size());
  q.kept = kept;
  const Frame f = ask(Op::kUnpin, {bytes_of(q), raw(ids)}, deadline_of(timeout_ns), nullptr);
  g.done = true;
  return Code(f.code) == Code::kOk && f.aux == 1;
}

uint64_t Link::wait(ObjectId id, uint64_t beyond, int64_t timeout_ns) {
  Guard g(*this, "wait");
  WaitRequest q;
  q.id = id;
  q.beyond = beyond;
  q.timeout_ns = std::max<int64_t>(timeout_ns, 0);
  // The peer answers at the deadline. It has a while longer for that: being late is not being gone.
  const Frame f = ask(Op::kWait, {bytes_of(q)}, deadline_of(std::min<int64_t>(q.timeout_ns, INT64_MAX / 4) + 5'000'000'000), nullptr);
  if (Code(f.code) != Code::kOk) fail(PeerError::kLost, ENODATA, "it does not have the object any more");
  g.done = true;
  return f.aux;
}

std::string Link::exchange(const std::string& transport, const std::string& blob, int64_t timeout_ns) {
  if (transport.empty() || transport.size() > kNameMax) throw std::invalid_argument("a transport's name has 1 to " + std::to_string(kNameMax) + " bytes");
  if (blob.size() > kMaxText) throw std::invalid_argument("an exchange carries at most " + std::to_string(kMaxText) + " bytes, got " + std::to_string(blob.size()));
  Guard g(*this, "exchange");
  const uint32_t n = uint32_t(transport.size());
  Body body;
  const Frame f = ask(Op::kExchange, {bytes_of(n), transport, blob}, deadline_of(timeout_ns), &body);
  g.done = true;
  if (Code(f.code) != Code::kOk) fail(PeerError::kOther, EOPNOTSUPP, "nobody answers there");
  return std::string(body.text());
}

bool Link::next_event(int64_t timeout_ns, ObjectId* id) {
  if (!events_) throw std::invalid_argument("this link is not for events");
  Guard g(*this, "next_event");
  const int64_t deadline = deadline_of(timeout_ns);
  const size_t whole = sizeof(Frame) + sizeof(ObjectId);
  while (partial_.size() < whole) {
    char buf[sizeof(Frame) + sizeof(ObjectId)];
    const ssize_t n = ::recv(fd_.get(), buf, whole - partial_.size(), MSG_DONTWAIT);
    if (n > 0) {
      partial_.append(buf, size_t(n));
      continue;
    }
    if (n == 0) fail(PeerError::kLost, ECONNRESET, "the peer hung up");
    if (errno == EINTR) continue;
    if (errno != EAGAIN) fail(PeerError::kLost, errno, std::strerror(errno));
    if (now_ns() >= deadline) return g.done = true, false;
    try {
      wait_for(POLLIN, deadline);
    } catch (const PeerError& e) {
      if (e.error != ETIMEDOUT) throw;
      return g.done = true, false;
    }
  }
  const Frame f = as<Frame>(partial_);
  if (f.op != uint16_t(Op::kGone) || f.bytes != sizeof(ObjectId)) fail(PeerError::kLost, EPROTO, "its message makes no sense");
  *id = as<ObjectId>(std::string_view(partial_).substr(sizeof f));
  partial_.clear();
  return g.done = true;
}

}  // namespace mcr::peer
