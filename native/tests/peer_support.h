// The two ends of the protocol as the tests need them: a puller and a server that do what they are told, however wrong.
#pragma once
#include <netinet/tcp.h>

#include <filesystem>
#include <optional>

#include "broker_support.h"
#include "peer/address.h"
#include "peer/link.h"
#include "peer/server.h"

namespace peer_support {

using namespace mcr::peer;

inline const std::string kSecret = "what only the test knows";

inline std::string token(char c) { return std::string(16, c); }

// Closing it then tells the other end with a reset, and leaves no port waiting.
inline void reset_on_close(const Fd& fd) {
  const linger now{1, 0};
  CHECK(!::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now));
}

// False: the other end hung up first.
inline bool read_all(const Fd& fd, void* to, size_t bytes) {
  auto* p = static_cast<char*>(to);
  while (bytes) {
    const ssize_t n = ::recv(fd.get(), p, bytes, 0);
    if (n <= 0 && !(n < 0 && errno == EINTR)) return false;
    if (n > 0) p += n, bytes -= size_t(n);
  }
  return true;
}
inline bool send_all(const Fd& fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n < 0 && errno != EINTR) return false;
    if (n > 0) bytes.remove_prefix(size_t(n));
  }
  return true;
}

// A puller of blocking calls.
struct Raw {
  Fd fd;
  Challenge challenge{};

  explicit Raw(uint16_t port, int receive_buffer = 0) : fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const Address to = resolve("127.0.0.1", port);
    if (receive_buffer) CHECK(!::setsockopt(fd.get(), SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer));
    CHECK(!::connect(fd.get(), to.get(), to.length));
  }
  bool challenged() { return read_all(fd, &challenge, sizeof challenge); }
  Proof proof(const std::string& session, const std::string& secret = kSecret) {
    Proof p{};
    std::memcpy(p.session, session.data(), sizeof p.session);
    p.version = kVersion;
    const Digest mac = proof_mac(secret, challenge, p);
    std::memcpy(p.mac, mac.data(), sizeof p.mac);
    return p;
  }
  // The status of the welcome; nothing: it hung up.
  std::optional<uint32_t> prove(const std::string& session, const std::string& secret = kSecret) {
    Welcome w;
    if (!challenged() || !send_all(fd, bytes_of(proof(session, secret))) || !read_all(fd, &w, sizeof w)) return {};
    return w.status;
  }
  bool ask(mcr::peer::Op op, std::string_view body) {
    const Frame f{uint32_t(body.size()), uint16_t(op), 0, 0};
    return send_all(fd, std::string(bytes_of(f)).append(body));
  }
  bool ask_read(uint64_t region, uint64_t offset, uint64_t bytes) { return ask(mcr::peer::Op::kRead, bytes_of(mcr::peer::Range{region, offset, bytes})); }
  Entry pin(ObjectId id) {
    PinRequest q;
    q.count = 1;
    CHECK(ask(mcr::peer::Op::kPin, std::string(bytes_of(q)).append(bytes_of(id))));
    Frame f;
    Entry e;
    CHECK(read_all(fd, &f, sizeof f) && f.bytes == sizeof e && f.code == 0 && read_all(fd, &e, sizeof e));
    return e;
  }
  bool hung_up() {  // whatever else it says before
    char some[4096];
    ssize_t n;
    while ((n = ::recv(fd.get(), some, sizeof some, 0)) > 0 || (n < 0 && errno == EINTR)) {
    }
    return true;
  }
};

// A server that knows the secret, or another, and then does what the script says with each connection, on a thread of its own.
class Fake {
 public:
  explicit Fake(std::function<void(const Fd&)> script, std::string secret = kSecret) : script_(std::move(script)), secret_(std::move(secret)) {
    listening_.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    Address a = resolve("127.0.0.1", 0);
    CHECK(!::bind(listening_.get(), a.get(), a.length) && !::listen(listening_.get(), 8) && !::getsockname(listening_.get(), a.get(), &a.length));
    port_ = a.port();
    thread_ = std::thread([this] { serve(); });
  }
  ~Fake() {
    over_ = true;
    ::shutdown(listening_.get(), SHUT_RDWR);
    thread_.join();
  }
  uint16_t port() const { return port_; }
  // For scripts: a request to read so many bytes; 0: there is none any more.
  static uint64_t asked(const Fd& fd) {
    Frame f;
    if (!read_all(fd, &f, sizeof f)) return 0;
    std::vector<mcr::peer::Range> ranges(f.bytes / sizeof(mcr::peer::Range));
    if (!read_all(fd, ranges.data(), f.bytes)) return 0;
    uint64_t bytes = 0;
    for (const auto& r : ranges) bytes += r.bytes;
    return bytes;
  }
  // The answer to that, but for the bytes.
  static bool head(const Fd& fd, uint64_t bytes) { return send_all(fd, bytes_of(Frame{0, uint16_t(mcr::peer::Op::kRead), 0, bytes})); }
  static void wait_for_the_end(const Fd& fd) {
    char c;
    while (::recv(fd.get(), &c, 1, 0) > 0) {
    }
  }

 private:
  void serve() {
    std::vector<std::jthread> connections;
    for (;;) {
      auto fd = std::make_shared<Fd>(::accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!*fd) {
        CHECK(over_);
        return;
      }
      connections.emplace_back([this, fd] {
        Challenge c{};
        std::memcpy(c.magic, kMagic, sizeof kMagic);
        c.version = kVersion;
        Proof p;
        if (!send_all(*fd, bytes_of(c)) || !read_all(*fd, &p, sizeof p)) return;
        Welcome w{};
        const Digest mac = welcome_mac(secret_, c, p, w);
        std::memcpy(w.mac, mac.data(), sizeof w.mac);
        if (send_all(*fd, bytes_of(w))) script_(*fd);
        fd->reset();
      });
    }
  }
  const std::function<void(const Fd&)> script_;
  const std::string secret_;
  Fd listening_;
  uint16_t port_ = 0;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

inline std::unique_ptr<Link> connect(uint16_t port, const std::string& session, bool events = false, const std::string& me = {}) {
  Link::Options o;
  o.session = session;
  o.events = events;
  o.me = me;
  o.timeout_ns = 60 * kSecond;
  return Link::connect("127.0.0.1", port, kSecret, o);
}

template <class F>
PeerError failure(F&& f) {
  try {
    f();
  } catch (const PeerError& e) {
    return e;
  }
  check::fail(__FILE__, __LINE__, "did not fail");
}

inline Piece piece(const Pinned& p, std::vector<std::byte>* into) {
  into->assign(p.size, std::byte{0xa5});
  return {p.region, p.offset, reinterpret_cast<uint64_t>(into->data()), p.size};
}
inline bool intact(const std::vector<std::byte>& bytes, ObjectId id) {
  for (size_t i = 0; i < bytes.size(); ++i)
    if (bytes[i] != pattern(id, i)) return false;
  return true;
}

// Of this process, on both ends of connections.
inline size_t tcp_sockets() {
  size_t n = 0;
  for (auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    int domain = 0;
    socklen_t size = sizeof domain;
    if (!::getsockopt(std::atoi(entry.path().filename().c_str()), SOL_SOCKET, SO_DOMAIN, &domain, &size) && domain == AF_INET) ++n;
  }
  return n;
}

}  // namespace peer_support
