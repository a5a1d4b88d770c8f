// A broker on a thread, a client that speaks raw messages, and child processes: this program again, in a role.
#pragma once
#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <memory>
#include <thread>

#include "check.h"
#include "pool/broker.h"
#include "pool/client.h"

extern char** environ;

namespace harness {

inline std::string random_name() {
  uint64_t r;
  CHECK(::getrandom(&r, sizeof r, 0) == sizeof r);
  return "mooncake_ray_test/" + std::to_string(r);
}

inline mcr::BrokerConfig config(const std::string& name, uint64_t capacity, double linger_s = 1e6, pid_t watch = 0) {
  mcr::BrokerConfig c;
  c.name = name;
  c.capacity = c.prefault = capacity;
  c.watch_pid = watch;
  c.linger_s = linger_s;
  c.first_wait_s = 1e6;
  return c;
}

class BrokerThread {
 public:
  explicit BrokerThread(const mcr::BrokerConfig& config)
      : name(config.name), broker_(std::make_unique<mcr::Broker>(config)), thread_([this] { broker_->run(), done_ = true; }) {}
  explicit BrokerThread(uint64_t capacity, double linger_s = 1e6, std::string name = random_name(), pid_t watch = 0)
      : name(std::move(name)),
        broker_(std::make_unique<mcr::Broker>(config(this->name, capacity, linger_s, watch))),
        thread_([this] { broker_->run(), done_ = true; }) {}
  ~BrokerThread() { kill(); }
  std::shared_ptr<mcr::Client> client(const std::string& label = "test") { return mcr::Client::connect(name, label); }
  // As seen by the clients, what SIGKILL does: nothing of it is left.
  void kill() {
    if (!broker_) return;
    broker_->stop();
    thread_.join();
    broker_.reset();
  }
  bool done() const { return done_; }
  double cpu_seconds() {
    clockid_t clock;
    timespec t;
    CHECK(!::pthread_getcpuclockid(thread_.native_handle(), &clock) && !::clock_gettime(clock, &t));
    return double(t.tv_sec) + double(t.tv_nsec) / 1e9;
  }
  const std::string name;

 private:
  std::unique_ptr<mcr::Broker> broker_;
  std::atomic<bool> done_{false};
  std::thread thread_;
};

inline mcr::Request request(mcr::Op op, mcr::ObjectId id = {}, uint64_t size = 0, int64_t timeout_ns = 0, mcr::ClaimKey key = {}) {
  mcr::Request q;
  q.op = uint16_t(op);
  q.id = id;
  q.size = size;
  q.timeout_ns = timeout_ns;
  q.key = key;
  return q;
}

// One socket, and no manners.
struct Wire {
  mcr::Fd fd;
  mcr::SessionId session = 0;
  mcr::Fd rw, ro;  // of the first arena
  uint64_t arena_bytes = 0;

  explicit Wire(const std::string& name) : fd(mcr::connect_abstract(name)) {}
  int send(mcr::Request q, std::string_view body = {}, std::span<const int> fds = {}, int flags = 0) {
    return mcr::send_message(fd.get(), &q, sizeof q, body.data(), body.size(), fds, flags);
  }
  // A request that is followed by ids.
  int send_ids(mcr::Request q, const std::vector<mcr::ObjectId>& ids) {
    q.count = uint32_t(ids.size());
    return send(q, {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(mcr::ObjectId)});
  }
  int put_inline(mcr::ObjectId id, std::string_view bytes, mcr::ClaimKey key) {
    mcr::Request q = request(mcr::Op::kPutInline, id, 0, 0, key);
    q.count = uint32_t(bytes.size());
    return send(q, bytes);
  }
  bool readable() const {
    pollfd p{fd.get(), POLLIN, 0};
    return ::poll(&p, 1, 0) == 1;
  }
  // The broker has taken what was sent. Whoever it answers after that, it has also dealt with this.
  bool taken() const {
    int unread = 0;
    CHECK(!::ioctl(fd.get(), SIOCOUTQ, &unread));
    return unread == 0;
  }
  mcr::Reply receive(std::string* text = nullptr, std::vector<mcr::Fd>* fds = nullptr) {
    static thread_local std::vector<char> buf(mcr::kMaxMessage);
    const ssize_t n = mcr::recv_message(fd.get(), buf.data(), buf.size(), fds);
    CHECK(n >= ssize_t(sizeof(mcr::Reply)));
    mcr::Reply r;
    std::memcpy(&r, buf.data(), sizeof r);
    if (text) text->assign(buf.data() + sizeof r, size_t(n) - sizeof r);
    return r;
  }
  bool hung_up() {
    char byte;
    UNTIL(readable());
    return mcr::recv_message(fd.get(), &byte, 1) <= 0;
  }
  mcr::Status ask(const mcr::Request& q, std::string* text = nullptr) {
    CHECK(!send(q));
    return mcr::Status(receive(text).status);
  }
  void hello(std::string_view label = "raw", int pidfd = -1) {
    mcr::Request q = request(mcr::Op::kHello, {}, mcr::kProtocolVersion);
    q.count = uint32_t(label.size());
    const int one[] = {pidfd};
    CHECK(!send(q, label, {one, pidfd >= 0 ? 1u : 0u}));
    const mcr::Reply r = receive();
    CHECK_EQ(r.status, 0);
    session = r.aux;
    std::vector<mcr::Fd> fds;
    CHECK(!send(request(mcr::Op::kArena)));
    const mcr::Reply arena = receive(nullptr, &fds);
    CHECK_EQ(arena.status, 0);
    CHECK_EQ(fds.size(), 2u);
    arena_bytes = arena.size;
    rw = std::move(fds[0]);
    ro = std::move(fds[1]);
  }
  void attach(mcr::SessionId s, bool events = false) {
    mcr::Request q = request(mcr::Op::kAttach, {s, 0});
    q.flags = events ? mcr::kEvents : 0;
    CHECK_EQ(uint16_t(ask(q)), 0);
    session = s;
  }
};

// ---- roles

using Role = int (*)(const std::vector<std::string>& args);
inline std::map<std::string, Role> roles;
struct RoleCase {
  RoleCase(const char* name, Role r) { roles[name] = r; }
};

class Child {
 public:
  explicit Child(std::vector<std::string> args) {
    int in[2], out[2];
    CHECK(!::pipe2(in, O_CLOEXEC) && !::pipe2(out, O_CLOEXEC));
    in_.reset(in[1]);
    out_.reset(out[0]);
    args.insert(args.begin(), {"role", "--role"});
    std::vector<char*> argv;
    for (auto& a : args) argv.push_back(a.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, in[0], 0);
    ::posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    CHECK_EQ(::posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, argv.data(), environ), 0);
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(in[0]);
    ::close(out[1]);
  }
  Child(const Child&) = delete;
  ~Child() {
    if (pid > 0) kill(), wait();
  }
  // The next line it prints.
  std::string line() {
    std::string s;
    char c;
    for (ssize_t n; (n = ::read(out_.get(), &c, 1)) != 0;) {
      CHECK(n == 1 || errno == EINTR);
      if (n == 1 && c == '\n') return s;
      if (n == 1) s += c;
    }
    check::fail(__FILE__, __LINE__, "a child ended before it said what was waited for");
  }
  void expect(const std::string& what) { CHECK_EQ(line(), what); }
  void go() { CHECK_EQ(::write(in_.get(), "\n", 1), 1); }
  void signal(int sig) { CHECK_EQ(::kill(pid, sig), 0); }
  void kill() { ::kill(pid, SIGKILL); }
  void stop() {
    int status;
    signal(SIGSTOP);
    CHECK(::waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
  }
  // Exit status, or minus the signal.
  int wait() {
    int status;
    while (::waitpid(pid, &status, 0) < 0) CHECK(errno == EINTR);
    pid = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  pid_t pid = -1;

 private:
  mcr::Fd in_, out_;
};

// For the roles: tell the parent, and wait for its word. It may be dead.
inline void say(const std::string& what) {
  const std::string line = what + "\n";
  if (::write(1, line.data(), line.size()) < 0) ::_exit(1);
}
inline void wait_for_go() {
  char c;
  ssize_t n;
  while ((n = ::read(0, &c, 1)) < 0 && errno == EINTR) {
  }
  if (n <= 0) ::_exit(1);
}

inline int main(int argc, char** argv) {
  ::signal(SIGPIPE, SIG_IGN);
  if (argc < 3 || std::strcmp(argv[1], "--role")) return check::run();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  return roles.at(argv[2])({argv + 3, argv + argc});
}

}  // namespace harness

#define ROLE(name)                                                 \
  static int role_##name(const std::vector<std::string>& args);    \
  static harness::RoleCase role_case_##name{#name, role_##name};   \
  static int role_##name([[maybe_unused]] const std::vector<std::string>& args)
