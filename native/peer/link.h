// A puller's connection to a peer server. Blocking calls with deadlines, one at a time; other threads wait their turn. After any error it is closed, except
// where the server said that it has no such bytes, or that nobody answers (EINVAL, EOPNOTSUPP).
#pragma once
#include <atomic>
#include <cerrno>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "pool/unix.h"
#include "protocol.h"

namespace mcr::peer {

struct PeerError : std::runtime_error {
  enum Kind { kLost, kRefused, kOther };  // kOther: see `error` (ETIMEDOUT, EINVAL, EOPNOTSUPP)
  PeerError(Kind k, const std::string& what, std::string op_, int error_, std::string peer_)
      : std::runtime_error(what), kind(k), op(std::move(op_)), error(error_), peer(std::move(peer_)) {}
  Kind kind;
  std::string op;
  int error;
  std::string peer;
};

// A range to read: of the peer, into memory here.
struct Piece {
  uint64_t region = 0, offset = 0, local = 0, bytes = 0;
};

struct Pinned {
  Code code = Code::kOk;
  uint64_t region = 0, offset = 0, size = 0, available = 0;
  std::string_view inlined;  // into `reply`
  std::string source;
  std::shared_ptr<const char[]> reply;
};

class Link {
 public:
  struct Options {
    std::string session, me, source_address;  // session: 16 bytes
    bool events = false;
    int64_t timeout_ns = 5'000'000'000;
  };
  // All throw PeerError, Interrupted where a signal's handler said so, std::invalid_argument for what cannot be asked.
  static std::unique_ptr<Link> connect(const std::string& host, uint16_t port, const std::string& secret, const Options& options);
  const std::string& pool_id() const { return pool_id_; }
  const std::string& peer() const { return peer_; }
  std::string describe(int64_t timeout_ns);
  std::vector<Pinned> pin(const std::vector<ObjectId>& ids, int64_t timeout_ns, const std::string& bad, bool inlined, bool kept = false);
  uint64_t wait(ObjectId id, uint64_t beyond, int64_t timeout_ns);
  bool unpin(const std::vector<ObjectId>& ids, int64_t timeout_ns, bool kept);
  std::string exchange(const std::string& transport, const std::string& blob, int64_t timeout_ns);
  void read(std::span<const Piece> pieces, int64_t timeout_ns);
  bool next_event(int64_t timeout_ns, ObjectId* id);  // false: nothing came
  void close();                                       // also while a call is under way, which then fails
  bool closed() const { return closed_; }

  // What to read, a frame at a time. Shared by links.
  struct Source {
    virtual ~Source() = default;
    virtual std::vector<Piece> next(uint64_t* at) = 0;        // empty: no more; `at`: bytes of all frames before this one
    virtual void arrived(uint64_t at, uint64_t bytes) = 0;
  };
  void read_from(Source& source, int64_t deadline);

 private:
  Link() = default;
  struct Guard;
  struct Body {
    std::shared_ptr<char[]> bytes;
    size_t size = 0;
    std::string_view text() const { return {bytes.get(), size}; }
  };
  Frame ask(Op op, std::initializer_list<std::string_view> parts, int64_t deadline, Body* body);
  void send_all(std::string_view bytes, int64_t deadline);
  void receive_all(void* to, size_t bytes, int64_t deadline);
  void wait_for(short events, int64_t deadline);
  [[noreturn]] void fail(PeerError::Kind kind, int error, const std::string& why);

  Fd fd_;
  std::string peer_, pool_id_;
  const char* op_ = "connect";
  bool events_ = false;
  std::string partial_;  // of an event
  std::mutex mutex_;
  std::atomic<bool> closed_{false};
};

// One call at a time. What does not come to its end may leave the stream somewhere inside a message: the link is closed.
struct Link::Guard {
  Guard(Link& l, const char* op) : link(l), lock(l.mutex_) {
    if (link.closed_) throw PeerError(PeerError::kLost, std::string(op) + ": the link to " + link.peer_ + " is closed", op, EBADF, link.peer_);
    link.op_ = op;
  }
  ~Guard() {
    if (!done) link.close();
  }
  Link& link;
  std::lock_guard<std::mutex> lock;
  bool done = false;
};

// Told how many bytes from the first piece's start on are there, now and then while the others come; false: do not go on. Must not throw.
struct Reached {
  std::function<bool(uint64_t)> tell;
  uint64_t step = 2 << 20;  // bytes at least from one time to the next
};

// Several streams at once. The work is shared frame by frame, so that a slow one gets less. `reached`, if given, is called by this thread;
// the streams go on meanwhile. Returns whether it never said false; the links are in order if it did.
bool read_striped(const std::vector<Link*>& links, std::span<const Piece> pieces, int64_t timeout_ns, const Reached* reached = nullptr);

}  // namespace mcr::peer
