// Processes that send nonsense to a broker, beside a client that works. Usage: wire_fuzz_test [INPUTS [SEED]]
//
// What a client may do to others is left out: deleting their objects, joining their sessions. Everything else must bounce off.
#include <sys/eventfd.h>
#include <sys/mman.h>

#include <algorithm>
#include <random>

#include "harness.h"
#include "temporary.h"

using namespace mcr;
using harness::BrokerThread;
using harness::Child;
using harness::request;

namespace mcr {
std::ostream& operator<<(std::ostream& o, Status s) { return o << "status " << int(s); }
}  // namespace mcr

namespace {

constexpr uint64_t kCapacity = 4 << 20, kMost = 2 * kCapacity;
constexpr int64_t kMs = 1'000'000;
constexpr uint64_t kTreasures = 40;  // objects of the honest client that the others know of; most of them end up on the disk
constexpr int kInputsAProcess = 2500;

ClaimKey self(ObjectId id) {
  ClaimKey k;
  k.kind = uint32_t(ClaimKind::kSelf);
  std::memcpy(k.bytes, &id, sizeof id);
  return k;
}

// ---- the fuzzer: a process, so that what it leaves behind must be reaped

class Fuzzer {
 public:
  Fuzzer(std::string name, uint64_t seed, SessionId honest) : name_(std::move(name)), rng_(seed), honest_(honest), conns_(8) {
    // What it passes as its pidfd. All of it ends with this process, at the latest: who passes another process's has only itself to blame.
    ends_.emplace_back(pidfd_of(::getpid()));
    ends_.emplace_back(::memfd_create("file", MFD_CLOEXEC));
    ends_.emplace_back(::eventfd(1, EFD_CLOEXEC));
    int ends[2];
    CHECK(!::pipe2(ends, O_CLOEXEC));
    ends_.emplace_back(ends[0]);
    writer_.reset(ends[1]);
  }

  void input() {
    Conn& c = conns_[pick(conns_.size())];
    if (!c.fd || pick(300) == 0) {
      c = Conn();
      c.fd = connect_abstract(name_);
      return;
    }
    if (c.waiting && pick(30)) {  // mostly one request at a time: a second one ends the connection
      pollfd p{c.fd.get(), POLLIN, 0};
      ::poll(&p, 1, 2);
      listen(c);
      if (!c.fd || c.waiting) return;
    }
    std::string m = pick(60) ? message(c) : noise();
    if (pick(25) == 0 && !m.empty())
      for (uint64_t n = 1 + pick(4); n; --n) m[pick(pick(2) ? m.size() : std::min<size_t>(m.size(), 40))] = char(rng_());
    if (pick(60) == 0) m.resize(pick(2) ? pick(m.size() + 1) : m.size() + pick(100));
    if (pick(600) == 0) m.resize(kMaxMessage + pick(3) - 1, 'x');
    // What anybody of this user may do.
    uint16_t op = 0;
    if (m.size() >= sizeof op) std::memcpy(&op, m.data(), sizeof op);
    if ((op == uint16_t(Op::kDelete) || op == uint16_t(Op::kAttach)) && names_the_honest(m)) return;
    std::vector<int> fds(pick(60) ? 0 : 1 + pick(16));
    for (int& fd : fds) fd = ends_[pick(ends_.size())].get();
    if (op == uint16_t(Op::kHello) && pick(2)) fds = {ends_[0].get()};
    const int error = send_message(c.fd.get(), m.data(), m.size(), nullptr, 0, fds, MSG_DONTWAIT);
    if (error == EAGAIN) {
      pollfd p{c.fd.get(), POLLOUT, 0};
      ::poll(&p, 1, 20);
    } else if (error && error != EMSGSIZE) {
      c = Conn();
    } else if (!error) {
      uint16_t flags = 0;
      if (m.size() >= 4) std::memcpy(&flags, m.data() + 2, sizeof flags);
      c.waiting = answered(Op(op)) && !(Op(op) == Op::kSeal && flags & kOneWay);
    }
    if (pick(5)) listen(c);
  }

 private:
  struct Conn {
    Fd fd;
    SessionId session = 0;
    bool waiting = false;
  };
  static bool answered(Op op) {
    return op == Op::kHello || op == Op::kAttach || op == Op::kCreate || op == Op::kSeal || op == Op::kPutInline || op == Op::kGet || op == Op::kWait ||
           op == Op::kStats || op == Op::kArena || op == Op::kGrow;
  }

  uint64_t pick(uint64_t n) { return rng_() % n; }
  bool names_the_honest(const std::string& m) const {
    return m.find(std::string(reinterpret_cast<const char*>(&honest_), sizeof honest_)) != std::string::npos;
  }
  // Reads what has come.
  void listen(Conn& c) {
    if (!c.fd) return;
    static char buf[kMaxMessage];
    for (;;) {
      const ssize_t n = recv_message(c.fd.get(), buf, sizeof buf, nullptr, MSG_DONTWAIT);
      if (n == -EAGAIN) return;
      if (n <= 0) {
        c = Conn();
        return;
      }
      c.waiting = false;
      Reply r;
      if (n < ssize_t(sizeof r)) continue;
      std::memcpy(&r, buf, sizeof r);
      if (!c.session && r.status == 0 && r.count == 16 && r.size >= kCapacity) c.session = r.aux, sessions_.push_back(r.aux);
      else if (!c.session && r.status == 0) c.session = joining_;
    }
  }

  ObjectId id() {
    switch (pick(12)) {
      case 0: return {honest_, 1 + pick(kTreasures)};
      case 1: return pick(2) ? ObjectId{rng_(), rng_()} : ObjectId{pick(3), pick(3)};
      default: return made_.empty() ? ObjectId{1, 1} : made_[made_.size() - 1 - pick(std::min<size_t>(made_.size(), 40))];
    }
  }
  SessionId session() { return sessions_.empty() || pick(20) == 0 ? rng_() : sessions_[sessions_.size() - 1 - pick(std::min<size_t>(sessions_.size(), 6))]; }
  ClaimKey key() {
    if (pick(3) == 0) return self(id());
    ClaimKey k;
    k.kind = uint32_t(pick(60) ? 1 + pick(3) : rng_());
    const uint64_t n = pick(20);
    std::memcpy(k.bytes, &n, sizeof n);
    return k;
  }
  uint64_t size() {
    switch (pick(40)) {
      case 0: return rng_();
      case 1: return kCapacity - pick(3);
      default: return pick(uint64_t(1) << pick(18));
    }
  }
  int64_t timeout() { return pick(100) == 0 ? int64_t(rng_()) : int64_t(pick(3)) * kMs; }

  Op an_op(const Conn& c) {
    if (!c.session && pick(20)) return pick(3) ? Op::kHello : Op::kAttach;
    static constexpr Op kOps[] = {Op::kCreate, Op::kCreate,  Op::kCreate, Op::kCreate,  Op::kSeal,  Op::kSeal,   Op::kSeal,   Op::kSeal,
                                  Op::kGet,    Op::kGet,     Op::kGet,    Op::kRelease, Op::kAbort, Op::kDelete, Op::kAdopt,  Op::kDisown,
                                  Op::kWait,   Op::kUnclaim, Op::kPutInline};
    if (pick(30)) return kOps[pick(std::size(kOps))];
    static constexpr Op kRare[] = {Op::kStats, Op::kArena, Op::kGrow};
    return pick(4) ? kRare[pick(3)] : Op(1 + pick(uint64_t(Op::kLast)));
  }
  std::string message(const Conn& c) {
    Request q = request(an_op(c), id(), size(), timeout(), key());
    q.flags = uint16_t(pick(20) ? pick(64) : rng_());
    std::string body;
    switch (Op(q.op)) {
      case Op::kHello:
        q.size = pick(20) ? kProtocolVersion : rng_();
        body.assign(pick(30) ? pick(40) : pick(kMaxMessage - sizeof q), char(rng_()));
        if (pick(2)) body += std::string(1, '\0') + "group " + std::to_string(pick(3));
        break;
      case Op::kAttach:
        q.id = {joining_ = session(), 0};
        break;
      case Op::kArena:
        q.size = pick(10) ? pick(4) : rng_();
        break;
      case Op::kGrow:  // once it has grown, it stays so
        q.size = pick(20) ? pick(kCapacity) : pick(2) ? kMost - pick(kCapacity) : rng_();
        break;
      case Op::kCreate:
        q.key.kind = uint32_t(pick(50) ? pick(3) : rng_());
        body.assign(pick(20) ? pick(60) : pick(kNoteMax + 2), char(rng_()));
        [[fallthrough]];
      case Op::kPutInline:
        if (pick(10)) q.id = {c.session, ++counter_};
        made_.push_back(q.id);
        if (q.op == uint16_t(Op::kPutInline)) body.assign(pick(pick(20) ? 500 : 2 * kInlineMax), 'x');
        break;
      case Op::kSeal:
      case Op::kRelease:
      case Op::kDelete:
      case Op::kWait: {
        if (q.op == uint16_t(Op::kSeal) && pick(3) && !made_.empty()) q.id = made_.back();
        std::vector<ObjectId> ids(pick(50) ? pick(5) : pick(kMaxIds + 1));
        for (ObjectId& i : ids) i = id();
        q.size = pick(6);
        if (q.op == uint16_t(Op::kSeal) && pick(3)) ids.clear();
        body.assign(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(ObjectId));
        break;
      }
      default:
        break;
    }
    const bool bytes = q.op == uint16_t(Op::kHello) || q.op == uint16_t(Op::kPutInline) || q.op == uint16_t(Op::kCreate);
    q.count = uint32_t(pick(100) ? body.size() / (bytes ? 1 : sizeof(ObjectId)) : rng_());
    return std::string(reinterpret_cast<const char*>(&q), sizeof q) + body;
  }
  std::string noise() {
    std::string m(pick(4) ? pick(200) : sizeof(Request) - 1 + pick(3), 0);
    for (char& c : m) c = char(rng_());
    return m;
  }

  std::string name_;
  std::mt19937_64 rng_;
  SessionId honest_, joining_ = 0;
  std::vector<Conn> conns_;
  std::vector<SessionId> sessions_;
  std::vector<ObjectId> made_;
  uint64_t counter_ = 0;
  std::vector<Fd> ends_;
  Fd writer_;
};

ROLE(fuzzer) {
  Fuzzer f(args[0], std::stoull(args[1]), std::stoull(args[2]));
  for (int i = 0; i < kInputsAProcess; ++i) f.input();
  ::_exit(0);
}

// ---- the honest client

std::byte pattern(ObjectId id, size_t i) { return std::byte((id.lo * 37 + i) & 0xff); }

class Honest {
 public:
  explicit Honest(BrokerThread& b) : c(b.client("honest")) {
    UNTIL(stat("populated_bytes") == kCapacity);
    for (uint64_t i = 0; i < kTreasures; ++i) CHECK(put(i % 3 ? 1000 * i : 50 * i, i % 3 == 0, 0, &treasures_));
    CHECK_EQ(treasures_.back().first.lo, kTreasures);
  }
  uint64_t stat(const char* name) { return check::number(c->stats(), name); }
  using Kept = std::vector<std::pair<ObjectId, size_t>>;
  // False where the others have taken the room, or the id.
  bool put(size_t bytes, bool small, int64_t timeout, Kept* kept) {
    const ObjectId id = c->new_id();
    if (small) {
      std::vector<std::byte> data(bytes);
      for (size_t i = 0; i < bytes; ++i) data[i] = pattern(id, i);
      const Status s = c->put_inline(id, data.data(), bytes, self(id), false);
      if (s == Status::kFull || s == Status::kExists) return false;
      CHECK_EQ(s, Status::kOk);
    } else {
      std::byte* where;
      const Status s = c->create(id, bytes, timeout, &where).status;
      if (s == Status::kFull || s == Status::kExists) return false;
      CHECK_EQ(s, Status::kOk);
      for (size_t i = 0; i < bytes; ++i) where[i] = pattern(id, i);
      CHECK_EQ(c->seal(id, self(id), false, {}), Status::kOk);
    }
    kept->emplace_back(id, bytes);
    return true;
  }
  void verify(ObjectId id, size_t bytes) {
    View v;
    CHECK_EQ(c->get(id, -1, false, &v), Status::kOk);
    CHECK_EQ(v.size(), bytes);
    for (size_t i = 0; i < bytes; ++i) CHECK(v.data()[i] == pattern(id, i));
  }
  void verify_treasures() {
    for (auto [id, n] : treasures_) verify(id, n);
  }
  void work(std::mt19937_64& rng) {
    const bool small = rng() % 4 == 0;
    if (put(rng() % (small ? kInlineMax : 60'000), small, int64_t(rng() % 3) * kMs, &own_)) ++puts;
    if (own_.empty()) return;
    const auto [id, n] = own_[rng() % own_.size()];
    verify(id, n);
    if (own_.size() > 20) {
      c->remove({own_.front().first});
      own_.erase(own_.begin());
    }
    const auto [tid, tn] = treasures_[rng() % treasures_.size()];
    verify(tid, tn);
  }
  static constexpr size_t kLarge = 60'000;
  // However few the inputs were: more than the memory is kept, and comes back.
  void outgrow_memory() {
    Kept kept;
    // What was spilled may be in memory, too: only so many bytes cannot all be.
    UNTIL((put(kLarge, false, 10 * kMs, &kept), kept.size() * kLarge > kCapacity));
    for (auto [id, n] : kept) verify(id, n);
    CHECK(stat("served_from_disk") > 0);
    for (auto [id, n] : kept) c->remove({id});
  }
  void free_all() {
    for (Kept* k : {&own_, &treasures_})
      for (auto [id, n] : *k) c->remove({id});
  }
  std::shared_ptr<Client> c;
  uint64_t puts = 0;

 private:
  Kept own_, treasures_;
};

int inputs = 100'000;
uint64_t seed = 1;

TEST(nonsense_bounces_off) {
  check::context = "seed " + std::to_string(seed);
  std::printf("%s\n", check::context.c_str());
  Temporary dir;
  BrokerConfig config = harness::config(harness::random_name(), kCapacity);
  config.most = kMost;
  config.arena = kCapacity;
  config.quota = kCapacity * 3 / 4;
  config.spill_dir = dir / "pool/one";
  config.spill_limit = 64 << 20;
  config.disk_reserve = 0;
  BrokerThread b(config);
  Honest honest(b);
  std::mt19937_64 rng(seed);
  for (int sent = 0; sent < inputs;) {
    std::vector<std::unique_ptr<Child>> fuzzers;
    for (int i = 0; i < 2; ++i, sent += kInputsAProcess)
      fuzzers.push_back(std::make_unique<Child>(std::vector<std::string>{"fuzzer", b.name, std::to_string(rng()), std::to_string(honest.c->session())}));
    for (auto& f : fuzzers) {
      for (int status = 0; ::waitpid(f->pid, &status, WNOHANG) == 0 ? true : (CHECK_EQ(status, 0), f->pid = -1, false);) honest.work(rng);
    }
    CHECK(!b.done());
    // They are dead: leases, pins, and places in queues went with them.
    UNTIL(honest.stat("leases") == 0 && honest.stat("pins") == 0);
    honest.verify_treasures();
  }
  std::printf("%d inputs; the honest client put %llu objects meanwhile\n", inputs, (unsigned long long)honest.puts);
  CHECK(honest.puts > 0);
  honest.outgrow_memory();
  // Or the inputs were so bad that nothing but the front door was tested.
  const std::string stats = honest.c->stats();
  for (const char* what : {"reaped_leases", "reaped_pins", "reaped_sessions"}) CHECK(check::number(stats, what) > uint64_t(inputs) / 1000);
  honest.free_all();
  // Return values nobody answers for may stay. They are all that does, and they give way.
  UNTIL(honest.stat("claims") == honest.stat("orphans"));
  std::byte* all;
  const ObjectId id = honest.c->new_id();
  UNTIL(honest.c->create(id, config.quota, 10 * kMs, &all).status == Status::kOk);
  honest.c->abort(id);
  UNTIL(honest.stat("leases") == 0 && honest.stat("pins") == 0 && honest.stat("writing_bytes") == 0);
  const std::string end = honest.c->stats();
  std::printf("%llu bytes spilled, %llu read back, %llu gets served from the disk\n", check::number(end, "spill_written_bytes"),
              check::number(end, "spill_read_bytes"), check::number(end, "served_from_disk"));
  CHECK(check::number(end, "spill_written_bytes") > kCapacity && check::number(end, "served_from_disk") > 0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && argv[1][0] != '-') inputs = std::atoi(argv[1]);
  if (argc > 2 && argv[1][0] != '-') seed = std::strtoull(argv[2], nullptr, 10);
  return harness::main(argc, argv);
}
