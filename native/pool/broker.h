// The broker: one thread around a Table, the sockets of its clients, and the pidfds of their processes.
//
// A session ends when its process ends (pidfd), not when its sockets close: a closed socket says nothing about the mappings that the
// process still has, and a forked child can keep a socket open for ever. Only then is its memory used again.
#pragma once
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena.h"
#include "table.h"
#include "unix.h"
#include "wire.h"

namespace mcr {

struct BrokerConfig {
  std::string name;          // of the abstract socket
  uint64_t capacity = 0;     // bytes
  uint64_t prefault = 0;     // bytes populated at the start; beyond, what is used plus a quarter plus this much
  int32_t watch_pid = 0;     // exit when that process does; 0: none
  double linger_s = 5;       // exit so long after the last session left
  double first_wait_s = 60;  // exit when nobody ever came
};

class Broker {
 public:
  explicit Broker(const BrokerConfig& config);  // listens when it returns; throws std::system_error
  void run();                                   // until nobody needs it
  void stop();                                  // from any thread

 private:
  struct Conn {
    Fd fd;
    SessionId session = 0;
    bool events = false;
    bool armed = false;  // EPOLLOUT is asked for
    std::deque<std::string> out;  // events that did not fit into the socket
    uint64_t parked = 0;          // serial of the request that waits, if any
  };
  struct Peer {
    Fd pidfd;
    bool bye = false;
    int events_fd = -1;
    std::vector<int> conns;
  };
  struct Parked {
    int fd;
    Request request;
    std::vector<ObjectId> ids;
    int64_t deadline;  // ns on the monotonic clock
  };

  void accept_all();
  void readable(int fd);
  void handle(Conn& c, const Request& q, const std::byte* body, size_t len, std::vector<Fd>& fds);
  void hello(Conn& c, const Request& q, std::string label, std::vector<Fd>& fds);
  void attach(Conn& c, const Request& q);
  bool try_create(const Parked& p);
  bool try_wait(const Parked& p, bool last);
  void park(Conn& c, const Request& q, std::vector<ObjectId> ids);
  void unpark(uint64_t serial);
  void give_up(const Parked& p);
  void expire();
  void serve_creates();
  void apply_effects();
  void grow();
  void close_conn(int fd);
  void read_out(int fd);
  void end_session(SessionId s);
  bool reply(int fd, const Reply& r, std::string_view body = {});  // false: the client is not there to take it
  void reply_status(int fd, Status s, std::string_view text = {});
  bool reply_found(int fd, Status s, const Location& at);
  void push_event(SessionId s, const ClaimKey& key);
  void flush_events(Conn& c);
  void watch(int fd, uint32_t events, int op);
  bool try_watch(int fd, uint32_t events, int op);
  int timeout_ms() const;
  bool done() const;

  BrokerConfig config_;
  Table table_;
  std::vector<std::unique_ptr<Arena>> arenas_;
  uint8_t pool_id_[16];
  Fd listener_, epoll_, stop_, watched_;
  std::unordered_map<int, Conn> conns_;
  std::unordered_map<SessionId, Peer> peers_;
  std::unordered_map<int, SessionId> by_pidfd_;
  std::map<uint64_t, Parked> parked_;                    // by serial
  std::list<uint64_t> creates_;                          // parked creates, first come first served
  std::unordered_multimap<ObjectId, uint64_t> waiting_;  // parked gets and waits by object
  uint64_t next_serial_ = 1;
  int64_t idle_since_ = 0;  // ns; 0 while there are sessions
  bool ever_used_ = false, stopping_ = false;
  bool queue_moved_ = false;  // a create left the queue: the one behind it may fit
};

}  // namespace mcr
