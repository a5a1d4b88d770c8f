// Strangers, and peers that know the secret, that send nonsense to a peer server, beside one that works. Usage: peer_fuzz_test [INPUTS [SEED]]
#include <algorithm>
#include <random>

#include "broker_support.h"
#include "peer/address.h"
#include "peer/link.h"
#include "peer/server.h"

using namespace mcr::peer;

namespace {

int inputs = 100'000;
uint64_t seed = 1;
const std::string kSecret = "the fuzzed secret";

class Fuzzer {
 public:
  Fuzzer(uint16_t port, uint64_t s, std::vector<ObjectId> ids) : port_(port), rng_(s), ids_(std::move(ids)), conns_(6) {}
  void input() {
    Conn& c = conns_[pick(conns_.size())];
    if (!c.fd || pick(400) == 0) return open(c);
    std::string m;
    for (uint64_t n = 1 + pick(4); n; --n) m += pick(80) ? request() : noise();
    if (pick(30) == 0 && !m.empty()) m[pick(m.size())] = char(rng_());
    if (pick(60) == 0) m.resize(pick(m.size() + 1));
    const ssize_t n = ::send(c.fd.get(), m.data(), m.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if ((n < 0 && errno != EAGAIN) || (n >= 0 && size_t(n) < m.size())) c = Conn();
    else if (pick(20)) listen(c);
  }

 private:
  struct Conn {
    Fd fd;
  };
  uint64_t pick(uint64_t n) { return rng_() % n; }
  void open(Conn& c) {
    c.fd.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const Address a = resolve("127.0.0.1", port_);
    const timeval second{1, 0};
    ::setsockopt(c.fd.get(), SOL_SOCKET, SO_RCVTIMEO, &second, sizeof second);
    const linger reset{1, 0};  // no port is left waiting
    ::setsockopt(c.fd.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    Challenge ch;
    if (::connect(c.fd.get(), a.get(), a.length) || ::recv(c.fd.get(), &ch, sizeof ch, MSG_WAITALL) != sizeof ch) return void(c = Conn());
    Proof p{};
    for (uint8_t& b : p.nonce) b = uint8_t(rng_());
    p.session[0] = uint8_t(pick(5));
    p.version = kVersion;
    p.events = pick(15) == 0;
    if (pick(2)) set_name(p.me, "f" + std::to_string(pick(4)));
    const Digest mac = proof_mac(kSecret, ch, p);
    std::memcpy(p.mac, mac.data(), sizeof p.mac);
    std::string bytes(bytes_of(p));
    if (pick(6) == 0) bytes[pick(bytes.size())] ^= char(1 << pick(8));
    if (pick(8) == 0) bytes.resize(pick(bytes.size()));
    if (pick(12) == 0) bytes = noise();
    ::send(c.fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  void listen(Conn& c) {
    static thread_local char buf[1 << 16];
    pollfd there{c.fd.get(), POLLIN, 0};
    ::poll(&there, 1, 1);  // or what was sent would be lost with a reset
    for (ssize_t n; (n = ::recv(c.fd.get(), buf, sizeof buf, MSG_DONTWAIT)) != sizeof buf;) {
      if (n == 0 || (n < 0 && errno != EAGAIN)) c = Conn();
      return;
    }
  }
  ObjectId id() { return pick(8) ? ids_[pick(ids_.size())] : ObjectId{rng_(), pick(3)}; }
  std::string ids(uint64_t n) {
    std::string s;
    for (; n; --n) s += bytes_of(id());
    return s;
  }
  uint64_t number() { return pick(30) ? pick(1 << 22) : rng_(); }
  std::string request() {
    static constexpr peer::Op kOps[] = {peer::Op::kPin, peer::Op::kPin, peer::Op::kUnpin, peer::Op::kRead, peer::Op::kRead, peer::Op::kWait, peer::Op::kDescribe, peer::Op::kExchange};
    const peer::Op op = pick(100) ? kOps[pick(std::size(kOps))] : peer::Op(pick(20));
    std::string body;
    const uint64_t n = pick(50) ? pick(5) : pick(kMaxPins + 2);
    switch (op) {
      case peer::Op::kPin: {
        PinRequest q;
        q.count = uint32_t(n + (pick(60) == 0));
        q.inlined = uint16_t(pick(2)), q.kept = uint16_t(pick(2));
        if (pick(3) == 0) set_name(q.bad, "f" + std::to_string(pick(4)));
        if (pick(20) == 0) std::memset(q.bad, int(rng_()), sizeof q.bad);
        body.append(bytes_of(q)).append(ids(n));
        break;
      }
      case peer::Op::kUnpin: {
        const UnpinRequest q{uint32_t(n + (pick(60) == 0)), uint32_t(pick(2))};
        body.append(bytes_of(q)).append(ids(n));
        break;
      }
      case peer::Op::kWait: {
        const WaitRequest q{id(), number(), int64_t(pick(3)) * 1'000'000};
        body = bytes_of(q);
        break;
      }
      case peer::Op::kRead:
        for (uint64_t i = 0; i < std::max<uint64_t>(n, pick(40) > 0); ++i) {
          const peer::Range r{pick(6) ? pick(3) : kCopies + pick(40), number(), pick(40) ? pick(2000) : number()};
          body.append(bytes_of(r));
        }
        break;
      case peer::Op::kExchange: {
        const uint32_t name = uint32_t(pick(40) ? 1 + pick(8) : rng_());
        body.append(bytes_of(name)).append(std::string(8 + pick(100), 'e'));
        break;
      }
      default:
        if (pick(60) == 0) body = noise();
    }
    const Frame f{uint32_t(pick(200) ? body.size() : rng_()), uint16_t(op), uint16_t(pick(300) == 0), pick(50) ? 0 : rng_()};
    return std::string(bytes_of(f)) + body;
  }
  std::string noise() {
    std::string m(pick(200), 0);
    for (char& c : m) c = char(rng_());
    return m;
  }
  uint16_t port_;
  std::mt19937_64 rng_;
  std::vector<ObjectId> ids_;
  std::vector<Conn> conns_;
};

TEST(nonsense_bounces_off) {
  check::context = "seed " + std::to_string(seed);
  BrokerThread b(8 << 20);
  auto c = b.client();
  wait_populated(*c);
  std::vector<ObjectId> ids;
  for (size_t n : {100, 5000, 65536, 70'000, 300'000, 1'500'000}) ids.push_back(put(*c, n));
  {
    auto served = b.client("server");
    Server server(served, "127.0.0.1", 0, kSecret, {});
    const ObjectId offered = served->new_id();  // some of whose bytes are there, and then fewer
    std::byte* where;
    Client::Place at;
    CHECK_EQ(served->create(offered, 1 << 16, -1, &where, {}, &at).status, Status::kOk);
    ids.push_back(offered);
    std::atomic<bool> over{false};
    std::thread answers([&] {
      Server::Ask a;
      while (!over)
        if (server.next_request(10'000'000, &a) && !a.transport.empty()) try {
            server.answer(a.session, a.blob);
          } catch (const std::invalid_argument&) {
          }
    });
    std::mt19937_64 rng(seed);
    Fuzzer one(server.port(), rng(), ids), two(server.port(), rng(), ids);
    Link::Options o;
    o.session = std::string(16, 'h');
    auto link = Link::connect("127.0.0.1", server.port(), kSecret, o);
    std::atomic<int> sent{0};
    auto fuzz = [&](Fuzzer& f) {
      while (sent++ < inputs) f.input();
    };
    std::thread first(fuzz, std::ref(one)), second(fuzz, std::ref(two));
    int rounds = 0;
    std::vector<std::byte> into(2 << 20);
    do {
      server.offer(offered, at, 1 << 16);
      server.progress(offered, rng() % (1 << 16));
      const ObjectId id = ids[rng() % (ids.size() - 1)];
      const Pinned p = link->pin({id}, 60 * kSecond, "", false).at(0);
      CHECK(p.code == Code::kOk);
      const Piece piece[] = {{p.region, p.offset, reinterpret_cast<uint64_t>(into.data()), p.size}};
      link->read(piece, 60 * kSecond);
      for (size_t i = 0; i < p.size; i += 1 + i / 64) CHECK(into[i] == pattern(id, i));
      CHECK(link->unpin({id}, 60 * kSecond, false));
      ++rounds;
    } while (sent < inputs);
    first.join();
    second.join();
    const Server::Stats s = server.stats();
    std::printf("%d inputs, %d rounds of the honest one; %llu requests, %llu refused\n", inputs, rounds, (unsigned long long)s.requests, (unsigned long long)s.refused);
    CHECK(s.requests > uint64_t(inputs) / 10 && s.refused > 0);
    one = Fuzzer(server.port(), 1, ids), two = Fuzzer(server.port(), 1, ids);  // hang up
    link.reset();
    UNTIL(server.stats().sessions == 0 && server.stats().connections == 0 && server.stats().pins == 0);
    over = true;
    answers.join();
    server.retract(offered);
    served->abort(offered);
  }
  c->remove(ids);
  UNTIL(stat(*c, "pins") == 0 && stat(*c, "objects") == 0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && argv[1][0] != '-') inputs = std::atoi(argv[1]);
  if (argc > 2 && argv[1][0] != '-') seed = std::strtoull(argv[2], nullptr, 10);
  return harness::main(argc, argv);
}
