// The broker: one thread around a Table, the sockets of its clients, and the pidfds of their processes.
//
// A session ends when its process ends (pidfd), not when its sockets close: a closed socket says nothing about the mappings that the
// process still has, and a forked child can keep a socket open for ever. Only then is its memory used again.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena.h"
#include "journal.h"
#include "parking.h"
#include "spill_directory.h"
#include "spill_file.h"
#include "table.h"
#include "unix.h"
#include "wire.h"

namespace mcr {

struct BrokerConfig {
  std::string name;            // of the abstract socket
  uint64_t capacity = 0;       // bytes
  uint64_t most = 0;           // bytes that it may grow to on request; 0: the capacity
  uint64_t prefault = 0;       // bytes populated at the start; beyond, what is used plus a quarter plus this much
  int32_t watch_pid = 0;       // exit when that process does; 0: none
  double linger_s = 5;         // exit so long after the last session left
  double first_wait_s = 60;    // exit when nobody ever came
  uint64_t arena = 64ull << 30;  // bytes of an arena at most, unless an object needs more
  HugePages huge_pages = HugePages::kAuto;
  std::vector<int> nodes = {-1};  // NUMA nodes to spread over; -1: wherever the kernel likes
  uint64_t quota = 0;          // bytes of memory for a group; 0: no quotas
  std::string spill_dir;       // of this pool alone; empty: no spilling
  uint64_t spill_limit = 0;    // bytes on disk
  double high = 0.8, low = 0.65, disk_reserve = 0.05;  // watermarks; the part of the disk that stays free
  std::string janitor;         // program that cleans up after a killed broker; empty: none
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
    pid_t pid = 0;
    bool bye = false;
    bool away = false;  // it was a client of the broker before this one, and is yet to come back
    int events_fd = -1;
    std::vector<int> conns;
  };

  // broker.cpp: the loop and the sockets
  void accept_all();
  void readable(int fd);
  void close_conn(int fd);
  void read_out(int fd);
  void end_session(SessionId s);
  bool reply(int fd, const Reply& r, std::string_view body = {}, std::span<const int> fds = {});  // false: the client is not there to take it
  void reply_status(int fd, Status s, std::string_view text = {});
  bool reply_found(int fd, Status s, const Location& at);
  void push_event(SessionId s, const ClaimKey& key);
  void flush_events(Conn& c);
  void watch(int fd, uint32_t events, int op);
  bool try_watch(int fd, uint32_t events, int op);
  bool watch_process(SessionId s, Peer& p, Fd pidfd);
  int timeout_ms() const;
  bool done() const;
  int64_t empty_deadline() const;

  // broker_requests.cpp: what clients ask for
  void handle(Conn& c, const Request& q, const std::byte* body, size_t len, std::vector<Fd>& fds);
  void hello(Conn& c, const Request& q, std::string_view names, std::vector<Fd>& fds);
  void attach(Conn& c, const Request& q);
  void send_arena(int fd, uint64_t index);
  void send_report(int fd, bool detail);
  Status try_create(const Parked& p);  // kFull and kQuota: not answered
  bool try_wait(const Parked& p, bool last);
  void park(Conn& c, Parked p);
  void unpark(uint64_t serial);
  void give_up(const Parked& p);
  void expire();
  void serve_creates();

  // broker_memory.cpp: arenas, the disk, and what the table wants done
  void apply_effects();
  void add_arena(uint64_t bytes, int node);
  void grow();
  uint64_t largest_extent() const;
  void arena_progress(int fd);
  void make_room();
  std::string open_spill();  // "" or why there is none
  void spill_progress();
  void recover();
  void note(const Table::Names& names);
  void write_journal(const Table::Names& changed);
  void begin_journal();
  void give_up_journal(const std::system_error& e);
  void leave_disk();
  bool somebody_is_here() const;
  void start_janitor();

  BrokerConfig config_;
  Table table_;
  std::vector<std::unique_ptr<Arena>> arenas_;
  uint8_t pool_id_[16];
  uint64_t generation_ = 0;  // brokers that died before this one and left it something
  int64_t started_ = 0;
  Fd listener_, epoll_, stop_, watched_;
  std::unordered_map<int, Conn> conns_;
  std::unordered_map<SessionId, Peer> peers_;
  std::unordered_map<int, SessionId> by_pidfd_;
  Parking parking_;
  SpillDirectory directory_;
  std::unique_ptr<Journal> journal_;
  std::unique_ptr<SpillFile> spill_;  // after the arenas: its threads use them
  int64_t retry_disk_ = 0;            // ns; when to try a disk again that refused; 0: it does not
  int64_t idle_since_ = 0;            // ns; 0 while there are sessions
  bool ever_used_ = false, stopping_ = false;
  bool queue_moved_ = false;  // a create came or left: the one behind it may fit
};

}  // namespace mcr
