// One event loop of the peer server: connections as small state machines on one thread. A slow receiver holds up nobody but itself.
#pragma once
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "pool/unix.h"
#include "protocol.h"

namespace mcr::peer {

class Server;
struct Session;

// Ranges from this size on may leave without a copy; smaller ones cost less with one.
constexpr uint64_t kLent = 32 << 10;

// Bytes on their way out: of its own, or of memory that `keep` keeps alive.
struct Out {
  std::string own;
  const std::byte* memory = nullptr;
  uint64_t at = 0;  // sent of `own`
  uint64_t left = 0;
  bool lent = false;  // the kernel may read that memory until the peer has it all. It lies in an arena, and is pinned for so long.
  std::shared_ptr<const void> keep;
};

struct Conn {
  std::shared_ptr<const Fd> fd;  // also of a helper that answers
  uint64_t serial = 0;
  Challenge challenge{};
  std::shared_ptr<Session> session;  // null until it has proved that it knows the secret
  bool events = false, busy = false, waiting = false, dead = false;
  bool again = false, learnt = false;  // the request is put off until the arenas that came since are known; they are
  bool blocked = false;                // or until bytes have come that are being received here
  WaitRequest wait;
  int64_t wait_deadline = INT64_MAX, deadline = INT64_MAX;  // of the handshake, or of a send that makes no progress
  std::string in;
  std::deque<Out> out;
  size_t owned = 0;  // bytes in `out` that take memory here
  uint32_t armed = 0;
  enum class Lending : uint8_t { kUntried, kOn, kOff } lending = Lending::kUntried;
  void reply(Op op, Code code, uint64_t aux = 0, std::string_view body = {});
};

class Loop {
 public:
  Loop(Server& server, Fd listening);  // throws std::system_error
  ~Loop();
  void go();  // once all loops are there
  void stop();
  void adopt(Fd fd);                                           // a connection that was accepted
  void post(uint64_t conn, std::string bytes, bool answer);    // sends; `answer`: the connection may go on with its next request
  void poke();                                                 // looks after those who wait

 private:
  struct Message {
    uint64_t conn;
    std::string bytes;
    bool answer;
  };
  void run();
  void wake();
  void take_inbox();
  void accept_all();
  void start(Fd fd);
  void handle(Conn& c, uint32_t events);
  void receive(Conn& c);
  void parse(Conn& c);
  void send(Conn& c);
  bool send_some(Conn& c, uint64_t* budget);  // false: no room in the socket, or dead
  bool lends(Conn& c, const Out& o);
  bool hear_errors(Conn& c);  // false: there is one
  void look_at_waiters();
  void check_deadlines(int64_t now);
  void arm(Conn& c);
  void settle(Conn& c);
  void drop(Conn& c);
  void due(int64_t when) { next_check_ = std::min(next_check_, when); }

  Server& server_;
  Fd listening_, epoll_, wake_;
  bool paused_ = false;  // no descriptors left to accept with
  std::unordered_map<uint64_t, std::unique_ptr<Conn>> conns_;
  std::set<uint64_t> unproved_;  // those that have not shown that they know the secret; the oldest first
  int64_t next_check_ = INT64_MAX;
  std::mutex mutex_;
  std::vector<Message> inbox_;
  std::vector<Fd> adopted_;
  bool poked_ = false, stopped_ = false;
  std::thread thread_;
};

}  // namespace mcr::peer
