#include "client.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "copy.h"
#include "spill_file.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace mcr {
namespace {

Request request(Op op, ObjectId id = {}, const ClaimKey& key = {}, uint16_t flags = 0) {
  Request q;
  q.op = uint16_t(op);
  q.flags = flags;
  q.id = id;
  q.key = key;
  return q;
}

constexpr int64_t kSilence = 30'000'000'000;  // ns after which a broker that owes an answer is taken for dead

std::atomic<size_t> everywhere{0};

// Throws BrokerGone where nobody listens any more.
Fd dial(const std::string& name) {
  try {
    Fd fd = connect_abstract(name);
    pid_t pid;
    if (!same_user(fd.get(), &pid)) throw BrokerForeign("the socket \"" + name + "\" is another user's (its process is " + std::to_string(pid) + ")");
    const timeval silence{kSilence / 1'000'000'000, 0};
    for (int direction : {SO_RCVTIMEO, SO_SNDTIMEO})
      if (::setsockopt(fd.get(), SOL_SOCKET, direction, &silence, sizeof silence)) throw_errno("setsockopt");
    return fd;
  } catch (const std::system_error& e) {
    if (e.code().value() != ECONNREFUSED) throw;
    throw BrokerGone(std::string("no broker answers: ") + e.what());
  }
}

}  // namespace

bool (*Client::interrupted)() = nullptr;

// Counts as a live view while a call is under way, so that close() does not take the maps from under it.
struct Client::Hold {
  explicit Hold(Client* client) : c(client) { ++c->live_, ++everywhere; }
  ~Hold() {
    if (c) c->let_go();
  }
  void keep() { c = nullptr; }  // the view or lease that came of the call takes over
  Client* c;
};

View& View::operator=(View&& o) noexcept {
  if (this != &o) {
    reset();
    client_ = std::move(o.client_);
    id_ = o.id_;
    data_ = std::exchange(o.data_, nullptr);
    size_ = std::exchange(o.size_, 0);
    pinned_ = std::exchange(o.pinned_, false);
    arena_ = o.arena_;
    offset_ = o.offset_;
    private_ = std::move(o.private_);
    inlined_ = std::move(o.inlined_);
  }
  return *this;
}

void View::reset() {
  if (!client_) return;
  auto client = std::move(client_);
  const std::byte* base = std::exchange(data_, nullptr);
  size_ = 0;
  if (std::exchange(pinned_, false)) client->unpin(id_, base);  // forget the range before its addresses can be used again
  private_ = Mapping();
}

bool View::in_arena(uint32_t* arena, uint64_t* offset) const {
  if (!pinned_) return false;
  *arena = arena_;
  *offset = offset_;
  return true;
}

std::shared_ptr<Client> Client::connect(const std::string& name, const std::string& label, const std::string& group, const Client* before) {
  std::shared_ptr<Client> c(new Client);
  c->name_ = name;
  c->pid_ = ::getpid();
  Fd fd = dial(name);
  Request q = request(Op::kHello);
  q.size = kProtocolVersion;
  if (before && before->pid_ == c->pid_) q.id = {before->session_, before->next_};
  const std::string names = label.substr(0, 256) + '\0' + group.substr(0, 256);
  q.count = uint32_t(names.size());
  Fd self = pidfd_of(c->pid_);
  const int one[] = {self.get()};
  if (send_message(fd.get(), &q, sizeof q, names.data(), names.size(), {one, self ? 1u : 0u})) throw BrokerGone("the broker hung up on hello");
  std::vector<std::byte> buf(kMaxMessage);
  const ssize_t n = recv_message(fd.get(), buf.data(), buf.size());
  Reply r;
  if (n < ssize_t(sizeof r)) throw BrokerGone("the broker hung up on hello");
  std::memcpy(&r, buf.data(), sizeof r);
  if (Status(r.status) != Status::kOk || r.count != sizeof c->pool_id_)
    throw BrokerForeign(std::string(reinterpret_cast<char*>(buf.data()) + sizeof r, size_t(n) - sizeof r));
  std::memcpy(c->pool_id_, buf.data() + sizeof r, sizeof c->pool_id_);
  c->session_ = r.aux;
  if (before && before->session_ == c->session_) c->next_ = before->next_.load();
  c->capacity_ = r.size;
  c->many_nodes_ = r.offset > 1;
  c->post_ = std::move(fd);
  c->checkin(c->checkout());  // a second socket serves calls
  c->wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!c->wake_) throw_errno("eventfd");
  return c;
}

std::shared_ptr<Client::ArenaMap> Client::arena(uint64_t index) {
  {
    std::lock_guard lock(arenas_mutex_);
    if (index < arenas_.size() && arenas_[index]) return arenas_[index];
  }
  Request q = request(Op::kArena);
  q.size = index;
  std::vector<Fd> fds;
  const Reply r = call(q, nullptr, 0, nullptr, &fds);
  if (Status(r.status) == Status::kMissing) return nullptr;
  if (Status(r.status) != Status::kOk || fds.size() != 2) gone("the broker did not give an arena of its own");
  auto m = std::make_shared<ArenaMap>();
  m->rw = Mapping(fds[0].get(), 0, r.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE);
  m->ro = Mapping(fds[1].get(), 0, r.size, PROT_READ, MAP_SHARED | MAP_NORESERVE);
  m->hugetlb = r.aux;
  ::madvise(m->rw.data(), r.size, MADV_DONTFORK);  // a child must not write into its parent's leases
  if (!m->hugetlb) {
    ::madvise(m->rw.data(), r.size, MADV_HUGEPAGE);
    ::madvise(m->ro.data(), r.size, MADV_HUGEPAGE);
  }
  m->ro_fd = std::move(fds[1]);
  std::lock_guard lock(arenas_mutex_);
  if (index >= arenas_.size()) arenas_.resize(index + 1);
  if (!arenas_[index]) arenas_[index] = std::move(m);  // another thread may have been faster, and its addresses are in use
  return arenas_[index];
}

std::vector<Client::ArenaInfo> Client::map_arenas() {
  std::vector<ArenaInfo> all;
  for (uint32_t i = 0;; ++i) {
    const auto a = arena(i);
    if (!a) return all;
    all.push_back({i, a->rw.data(), a->ro.data(), a->ro.size(), a->ro_fd.get()});
  }
}

Client::~Client() {
  if (::getpid() == pid_) close();
}

bool Client::usable() const { return !dead_ && !closing_ && ::getpid() == pid_; }

void Client::check_process() const {
  if (::getpid() != pid_) throw BrokerGone("this pool client belongs to the parent process; a forked child connects anew");
  if (dead_) throw BrokerGone("the broker died");
  if (closing_) throw BrokerGone("this pool client is closed");
}

void Client::gone(const char* what) {
  dead_ = true;
  throw BrokerGone(what);
}

Fd Client::checkout() {
  {
    std::lock_guard lock(sockets_mutex_);
    if (!idle_.empty()) {
      Fd fd = std::move(idle_.back());
      idle_.pop_back();
      return fd;
    }
  }
  Fd fd;
  try {
    fd = dial(name_);
  } catch (const BrokerGone&) {
    gone("the broker died");
  }
  Request q = request(Op::kAttach, {session_, 0});
  Reply r;
  if (send_message(fd.get(), &q, sizeof q) || recv_message(fd.get(), &r, sizeof r) < ssize_t(sizeof r) || Status(r.status) != Status::kOk)
    gone("the broker died, and another has its place");
  return fd;
}

void Client::checkin(Fd fd) {
  std::lock_guard lock(sockets_mutex_);
  idle_.push_back(std::move(fd));
}

Reply Client::call(Request q, const void* body, size_t len, std::string* text, std::vector<Fd>* fds) {
  check_process();
  // Calls and one-way messages go by different sockets. A call must not overtake what this thread sent before.
  const uint64_t posted = posted_;
  if (posted != settled_) {
    q.flags |= kAfter;
    std::unique_lock lock(post_mutex_);
    if (!wait_for_posts(lock, true)) throw Interrupted();
  }
  Fd fd = checkout();
  alignas(8) std::byte small[sizeof(Reply) + kInlineMax];
  std::unique_ptr<std::byte[]> large;
  std::byte* buf = small;
  size_t room = sizeof small;
  if (text) {
    large = std::make_unique_for_overwrite<std::byte[]>(kMaxMessage);
    buf = large.get();
    room = kMaxMessage;
  }
  if (send_message(fd.get(), &q, sizeof q, body, len)) gone("the broker died");
  const int64_t sent = now_ns();
  ssize_t n;
  for (;;) {
    n = recv_message(fd.get(), buf, room, fds, 0, q.timeout_ns != 0);
    const bool may_wait = q.timeout_ns < 0 || now_ns() - sent < q.timeout_ns;
    if (n == -EAGAIN && may_wait) continue;
    if (n == -EAGAIN) gone("the broker does not answer");
    if (n != -EINTR) break;
    if (!interrupted || !interrupted()) continue;
    ::shutdown(fd.get(), SHUT_RD);  // from here on the broker cannot answer, and takes back what it grants
    Reply r;
    if (recv_message(fd.get(), buf, room, nullptr, MSG_DONTWAIT) >= ssize_t(sizeof r)) {  // it has answered already
      std::memcpy(&r, buf, sizeof r);
      if (Status(r.status) == Status::kOk && q.op == uint16_t(Op::kCreate)) post(request(Op::kAbort, q.id));
      if ((Status(r.status) == Status::kOk || Status(r.status) == Status::kOnDisk) && q.op == uint16_t(Op::kGet)) post_release(q.id);
    }
    throw Interrupted();
  }
  Reply r;
  if (n < ssize_t(sizeof r)) gone("the broker died");
  std::memcpy(&r, buf, sizeof r);
  if (text) text->assign(reinterpret_cast<char*>(buf) + sizeof r, size_t(n) - sizeof r);
  checkin(std::move(fd));
  for (uint64_t s = settled_; s < posted && !settled_.compare_exchange_weak(s, posted);) {
  }
  return r;
}

// ---- one-way messages

void Client::post(const Request& q, const void* body, size_t len) noexcept {
  if (dead_ || ::getpid() != pid_) return;
  std::lock_guard lock(post_mutex_);
  if (post_ && !said_bye_) post_locked(q, body, len);
}

void Client::post_locked(const Request& q, const void* body, size_t len) noexcept {
  ++posted_;
  flush_posts_locked();
  const int err = posts_.empty() ? send_message(post_.get(), &q, sizeof q, body, len, {}, MSG_DONTWAIT) : EAGAIN;
  if (err && err != EAGAIN && err != EWOULDBLOCK) dead_ = true;
  if (err != EAGAIN && err != EWOULDBLOCK) return;
  std::string m(reinterpret_cast<const char*>(&q), sizeof q);
  if (len) m.append(static_cast<const char*>(body), len);
  posts_.push_back(std::move(m));
  if (std::exchange(flushing_, true)) return;
  // The broker is behind. There may be no next message to send this one along with, and others wait for what it gives back.
  try {
    std::thread([self = shared_from_this()] {
      std::unique_lock lock(self->post_mutex_);
      self->wait_for_posts(lock, false);
      self->flushing_ = false;
      if (self->said_bye_) self->post_.reset();
    }).detach();
  } catch (const std::exception&) {  // no thread to be had, or the client is being destroyed: it goes with the next message, if any
    flushing_ = false;
  }
}

void Client::flush_posts_locked() noexcept {
  while (!posts_.empty()) {
    const int err = send_message(post_.get(), posts_.front().data(), posts_.front().size(), nullptr, 0, {}, MSG_DONTWAIT);
    if (err == EAGAIN || err == EWOULDBLOCK) return;
    if (err) dead_ = true;
    posts_.pop_front();
  }
}

void Client::abort(ObjectId id) noexcept {
  post(request(Op::kAbort, id));
  let_go();
}
void Client::unclaim(const ClaimKey& key) noexcept { post(request(Op::kUnclaim, {}, key)); }
void Client::inquire(const ClaimKey& key) noexcept { post(request(Op::kInquire, {}, key)); }
void Client::adopt(const ClaimKey& key) noexcept { post(request(Op::kAdopt, {}, key)); }
void Client::disown(const ClaimKey& key, bool mine) noexcept { post(request(Op::kDisown, {}, key, mine ? kMine : 0)); }

void Client::remove(const std::vector<ObjectId>& ids) noexcept { post_ids(Op::kDelete, ids); }
void Client::watch(const std::vector<ObjectId>& ids) noexcept { post_ids(Op::kWatch, ids); }

void Client::post_ids(Op op, const std::vector<ObjectId>& ids) noexcept {
  for (size_t at = 0; at < ids.size(); at += kMaxIds) {
    Request q = request(op);
    q.count = uint32_t(std::min(kMaxIds, ids.size() - at));
    post(q, ids.data() + at, q.count * sizeof(ObjectId));
  }
}

// Until all is in the socket. False: `interrupted` said so.
bool Client::wait_for_posts(std::unique_lock<std::mutex>& lock, bool interruptible) noexcept {
  while (post_ && (flush_posts_locked(), !posts_.empty())) {
    pollfd room{post_.get(), POLLOUT, 0};
    lock.unlock();
    const int n = ::poll(&room, 1, int(kSilence / 1'000'000));
    const bool stop = n < 0 && errno == EINTR && interruptible && interrupted && interrupted();
    lock.lock();
    if (stop) return false;
    if (n == 0) dead_ = true, posts_.clear();  // it reads no more
  }
  return true;
}

void Client::post_release(ObjectId id) noexcept {
  Request q = request(Op::kRelease);
  q.count = 1;
  post(q, &id, sizeof id);
}

void Client::unpin(ObjectId id, const std::byte* base) noexcept {
  if (::getpid() != pid_) return;  // another thread may have held a lock at the fork
  ranges_.remove(base);
  post_release(id);
  let_go();
}

size_t Client::live_everywhere() { return everywhere; }

void Client::let_go() noexcept {
  --everywhere;
  if (live_.fetch_sub(1) == 1 && closing_) close();
}

void Client::close() {
  closing_ = true;
  if (live_ || ::getpid() != pid_) return;
  {
    std::lock_guard lock(post_mutex_);
    if (post_ && !std::exchange(said_bye_, true)) {
      post_locked(request(Op::kBye), nullptr, 0);
      if (!flushing_) post_.reset();
    }
  }
  std::lock_guard lock(sockets_mutex_);
  idle_.clear();
  {
    std::lock_guard maps(arenas_mutex_);
    arenas_.clear();
  }
  const uint64_t one = 1;
  [[maybe_unused]] auto n = ::write(wake_.get(), &one, sizeof one);
}

// ---- calls

Client::Answer Client::create(ObjectId id, size_t bytes, int64_t timeout_ns, std::byte** where, std::string_view note, Place* at) {
  note = note.substr(0, kNoteMax);
  Request q = request(Op::kCreate, id);
  q.size = bytes;
  q.timeout_ns = timeout_ns;
  q.count = uint32_t(note.size());
  unsigned node;
  if (many_nodes_ && !::syscall(SYS_getcpu, nullptr, &node, nullptr)) q.key.kind = node + 1;
  std::string text;
  Hold hold(this);
  const Reply r = call(q, note.data(), note.size(), &text);
  if (Status(r.status) == Status::kOk) {
    std::shared_ptr<ArenaMap> a;
    try {
      if (!(a = arena(r.arena))) gone("the broker has no such arena");
    } catch (...) {
      post(request(Op::kAbort, id));
      throw;
    }
    hold.keep();
    *where = a->rw.data() + r.offset;
    if (at) *at = {uint32_t(r.arena), r.offset};
    if (bytes >= (1 << 20)) warm(std::move(a), r.aux);
  }
  return {Status(r.status), std::move(text)};
}

// A seal that can only fail with the broker has no reply: it goes the way of the one-way messages, before whatever ends its claim.
Status Client::seal(ObjectId id, const ClaimKey& key, bool handover, const std::vector<ObjectId>& also) {
  if (also.size() > kMaxIds) return Status::kBad;
  const bool one_way = id && also.empty();
  Request q = request(Op::kSeal, id, key, uint16_t((handover ? kHandover : 0) | (one_way ? kOneWay : 0)));
  q.count = uint32_t(also.size());
  Status status = Status::kOk;
  if (one_way) {
    check_process();
    post(q);
    std::unique_lock lock(post_mutex_);
    wait_for_posts(lock, false);  // in the kernel's hands before the caller goes on, who may tell others and exit
    if (dead_) gone("the broker died");
  } else {
    status = Status(call(q, also.data(), also.size() * sizeof(ObjectId), nullptr).status);
  }
  if (id && status == Status::kOk) let_go();
  return status;
}

Status Client::put_inline(ObjectId id, const void* data, size_t bytes, const ClaimKey& key, bool handover) {
  if (bytes > kInlineMax) return Status::kTooLarge;
  Request q = request(Op::kPutInline, id, key, handover ? kHandover : 0);
  q.count = uint32_t(bytes);
  return Status(call(q, data, bytes, nullptr).status);
}

Status Client::get(ObjectId id, int64_t timeout_ns, bool writable, View* out) {
  Request q = request(Op::kGet, id);
  q.timeout_ns = timeout_ns;
  std::string text;
  std::vector<Fd> fds;
  Hold hold(this);
  const Reply r = call(q, nullptr, 0, &text, &fds);
  const Status status = Status(r.status);
  if (status != Status::kOk && status != Status::kInline && status != Status::kOnDisk) return status;
  View v;
  v.client_ = shared_from_this();
  v.id_ = id;
  v.size_ = r.size;
  if (status == Status::kInline) {
    const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
    v.inlined_.reserve(text.size() + 1);
    v.inlined_.assign(bytes, bytes + text.size());
    v.inlined_.push_back({});
    v.data_ = v.inlined_.data();
    *out = std::move(v);
    return Status::kOk;
  }
  v.pinned_ = true;
  hold.keep();  // from here on, an exception unpins as `v` dies
  if (status == Status::kOnDisk) {
    if (fds.size() != 1) gone("the broker did not give its spill file");
    const bool read = own_copy(&v, r, nullptr, fds[0].get());
    if (!broker_lives()) gone("the broker died");  // and its pin with it: the next one may have written something else there meanwhile
    if (!read) return Status::kDamaged;
    *out = std::move(v);
    return Status::kOk;
  }
  const auto a = arena(r.arena);
  if (!a) gone("the broker has no such arena");
  const std::byte* data = a->ro.data() + r.offset;
  v.arena_ = uint32_t(r.arena);
  v.offset_ = r.offset;
  if (writable && a->hugetlb) {
    own_copy(&v, r, data, -1);
    *out = std::move(v);
    return Status::kOk;
  }
  if (writable && r.size) {
    v.private_ = Mapping(a->ro_fd.get(), r.offset, whole_pages(r.size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE);
    data = v.private_.data();
  }
  ranges_.add(data, r.size, id, writable);
  v.data_ = data;
  *out = std::move(v);
  return Status::kOk;
}

bool Client::broker_lives() {
  std::lock_guard lock(post_mutex_);
  pollfd p{post_.get(), 0, 0};
  return ::poll(&p, 1, 0) == 0;
}

// Fills a view with bytes of this process's own, and lets the pool's go. False: they cannot be read.
bool Client::own_copy(View* v, const Reply& r, const std::byte* from, int file) {
  Mapping copy(-1, 0, std::max(whole_pages(r.size), kPageSize), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
  const Segment all[] = {{copy.data(), from, r.size}};
  if (from) copy_segments(all);
  else if (!read_fully(file, copy.data(), whole_pages(r.size), r.offset).empty()) return false;
  v->private_ = std::move(copy);
  v->data_ = v->private_.data();
  v->pinned_ = false;
  unpin(v->id_, nullptr);
  return true;
}

std::string Client::wait(const std::vector<ObjectId>& ids, size_t want, int64_t timeout_ns) {
  if (ids.size() > kMaxIds) throw std::invalid_argument("wait for at most " + std::to_string(kMaxIds) + " objects at a time");
  Request q = request(Op::kWait);
  q.count = uint32_t(ids.size());
  q.size = std::min(want, ids.size());
  q.timeout_ns = timeout_ns;
  std::string ready;
  call(q, ids.data(), ids.size() * sizeof(ObjectId), &ready);
  return ready;
}

std::string Client::stats() {
  std::string text;
  call(request(Op::kStats), nullptr, 0, &text);
  return text;
}

std::string Client::inspect() {
  std::vector<Fd> fds;
  const Reply r = call(request(Op::kStats, {}, {}, kDetail), nullptr, 0, nullptr, &fds);
  std::string text(r.size, '\0');
  if (Status(r.status) != Status::kOk || fds.size() != 1 || !read_fully(fds[0].get(), reinterpret_cast<std::byte*>(text.data()), text.size(), 0).empty())
    throw std::runtime_error("the broker has no memory for its report");
  return text;
}

Client::Answer Client::grow(uint64_t capacity) {
  Request q = request(Op::kGrow);
  q.size = capacity;
  std::string text;
  const Reply r = call(q, nullptr, 0, &text);
  return {Status(r.status), std::move(text)};
}

// ---- events

void Client::listen(bool last) {
  check_process();
  Fd fd = dial(name_);
  Request q = request(Op::kAttach, {session_, 0}, {}, uint16_t(kEvents | (last ? kAskLast : 0)));
  Reply r;
  alignas(8) std::byte buf[512];
  if (send_message(fd.get(), &q, sizeof q) || recv_message(fd.get(), buf, sizeof buf) < ssize_t(sizeof r)) gone("the broker died");
  std::memcpy(&r, buf, sizeof r);
  if (Status(r.status) != Status::kOk) throw std::runtime_error("this session listens already");
  events_ = std::move(fd);
}

bool Client::next_event(int timeout_ms, ClaimKey* key) {
  check_process();
  pollfd p[2] = {{events_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
  if (::poll(p, 2, timeout_ms) < 0 && errno != EINTR) throw_errno("poll");
  uint64_t count;
  [[maybe_unused]] auto drained = ::read(wake_.get(), &count, sizeof count);
  if (!p[0].revents) return check_process(), false;
  Event e;
  const ssize_t n = recv_message(events_.get(), &e, sizeof e, nullptr, MSG_DONTWAIT);
  if (n == -EAGAIN || n == -EWOULDBLOCK) return false;
  if (n != ssize_t(sizeof e)) gone("the broker died");
  *key = e.key;
  return true;
}

// A page that this process never touched costs it a fault at the first write, even where the broker has populated it. A process that puts
// large objects takes those faults on a thread, ahead of its copies.
void Client::warm(std::shared_ptr<ArenaMap> arena, uint64_t bytes) {
  if (bytes <= arena->warmed || arena->warming.exchange(true)) return;
  try {
    std::thread([self = shared_from_this(), arena, bytes] {
      constexpr uint64_t kStep = 2 << 20;  // bytes: holds the lock of the address space for some 100 us
      for (uint64_t at = arena->warmed; at < bytes && !self->closing_; at += kStep) {
        if (::madvise(arena->rw.data() + at, std::min(kStep, bytes - at), MADV_POPULATE_WRITE)) break;
        arena->warmed = std::min(at + kStep, bytes);
      }
      arena->warming = false;
    }).detach();
  } catch (const std::system_error&) {
    arena->warming = false;  // no thread to be had: the copies take the faults
  }
}

}  // namespace mcr
