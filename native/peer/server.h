// A node's peer server: serves pins of its pool's objects, and their bytes, to the engines of other nodes that know the secret. Thread-safe.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "loop.h"
#include "pool/client.h"
#include "tracker.h"

namespace mcr::peer {

class Server {
 public:
  struct Options {
    unsigned threads = 2;
    enum class ZeroCopy { kNever, kWhereItIs, kAlways } zero_copy = ZeroCopy::kWhereItIs;  // always: also where the kernel copies after all
    int64_t handshake_ns = 5'000'000'000;  // that a connection has for proving that it knows the secret
    int64_t stall_ns = 60'000'000'000;     // without progress, after which a receiver is given up
  };
  // Throws std::invalid_argument for an address that is none or names all of them, std::system_error.
  Server(std::shared_ptr<Client> client, const std::string& host, uint16_t port, std::string secret, Options options);
  ~Server();
  uint16_t port() const { return port_; }

  void describe(std::string text);
  // An object that is still being received here, into a lease at that place. It must be retracted before the lease is given back, and
  // after it is sealed.
  void offer(ObjectId id, Client::Place at, uint64_t bytes);
  void progress(ObjectId id, uint64_t bytes);
  void retract(ObjectId id);
  void gone(ObjectId id);

  struct Ask {
    uint64_t session = 0;
    std::string transport, blob;  // both empty: that session is over
  };
  bool next_request(int64_t timeout_ns, Ask* ask);  // false: nothing came
  void answer(uint64_t session, std::string_view blob);

  struct Stats {
    uint64_t connections, sessions, pins, bytes_sent, refused, requests, offers, replicas, bytes_lent;  // lent: sent without a copy, or at least so meant
  };
  Stats stats();
  void close();

 private:
  friend class Loop;
  // ---- of the loops
  void place(Fd fd);
  void authenticate(Conn& c, Loop& loop, const Proof& p);
  bool request(Conn& c, Loop& loop, const Frame& f, std::string_view body);  // false: a protocol error
  bool try_wait(Conn& c, bool last);
  void ended(Conn& c);
  void count_sent(uint64_t n, bool lent = false) {
    sent_.fetch_add(n, std::memory_order_relaxed);
    if (lent) lent_.fetch_add(n, std::memory_order_relaxed);
  }

  struct Arena {
    Mapping map;
  };
  struct Offer {
    Client::Place at;
    uint64_t bytes = 0, available = 0;
  };
  struct Job {
    Loop* loop;
    uint64_t conn;
    std::shared_ptr<Session> session;
    std::string body;
    Op op;  // kPin, kUnpin; kRead: learn of new arenas, then try again
    std::shared_ptr<const Fd> fd;  // where nothing is waiting to be sent: the answer need not go by the loop
  };
  bool pin(const Job& job, std::string* reply);
  void keep(Session& s, const std::vector<ObjectId>& ids);
  bool unpin(const Job& job, std::string* reply);
  Entry pin_one(Session& s, ObjectId id, bool inlined, std::string* reply, std::vector<std::shared_ptr<View>>* held);
  void answer_at_once(const Job& job, std::string* reply);
  bool read(Conn& c, Loop& loop, std::string_view body);
  bool exchange(Conn& c, Loop& loop, std::string_view body);
  bool on_its_way(const Range& r) const;
  std::shared_ptr<Arena> arena(uint32_t index);  // null: unknown
  void know_arenas();
  void help();
  void poke_all();

  const std::shared_ptr<Client> client_;
  const std::string secret_;
  const Options options_;
  uint16_t port_ = 0;
  std::atomic<uint64_t> sent_{0}, lent_{0}, refused_{0}, requests_{0}, connections_{0}, next_loop_{0};

  std::mutex mutex_;  // for all that follows
  std::string description_;
  std::vector<std::shared_ptr<Arena>> arenas_;
  std::map<std::string, std::shared_ptr<Session>> sessions_;  // by token
  std::map<uint64_t, std::shared_ptr<Session>> numbered_;
  std::unordered_map<ObjectId, Offer> offers_;
  std::unordered_map<ObjectId, std::set<uint64_t>> replicas_;  // which sessions keep one
  Tracker tracker_;
  uint64_t next_session_ = 1, next_copy_ = kCopies;
  std::deque<Ask> asks_;
  std::condition_variable asked_;
  std::deque<Job> jobs_;
  std::condition_variable work_;
  bool closed_ = false;

  std::mutex close_mutex_;
  std::vector<std::thread> helpers_;
  std::vector<std::unique_ptr<Loop>> loops_;
};

}  // namespace mcr::peer
