// A process's side of the pool: its session, its maps of the arenas, its leases and pins. Thread-safe. Knows nothing of Python.
//
// In a forked child the object is dead: every call says so, and destructors leave the parent's session alone.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "ranges.h"
#include "unix.h"
#include "wire.h"

namespace mcr {

// The broker is gone, cannot be reached, or this is a forked child.
struct BrokerGone : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Something serves the name that must not be talked to: a broker of another version, or another user.
struct BrokerForeign : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// `interrupted` said so while a call was waiting.
struct Interrupted : std::exception {};

class Client;

// What a get returns. Frees its map and unpins when it dies; outlives the broker and the client's close(). What came from the disk, or from
// reserved huge pages to be written, is a copy of this process's own, and pins nothing.
class View {
 public:
  View() = default;
  View(View&&) noexcept = default;
  View& operator=(View&& o) noexcept;
  ~View() { reset(); }
  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  bool writable() const { return private_.data() || !inlined_.empty(); }  // privately: no other reader sees it
  void reset();
  bool in_arena(uint32_t* arena, uint64_t* offset) const;  // false: the bytes are not in the pool's own memory, or have been copied

 private:
  friend class Client;
  std::shared_ptr<Client> client_;
  ObjectId id_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  bool pinned_ = false;
  uint32_t arena_ = 0;
  uint64_t offset_ = 0;
  Mapping private_;
  std::vector<std::byte> inlined_;  // with one byte more than the object, so that it is empty only for objects in an arena
};

class Client : public std::enable_shared_from_this<Client> {
 public:
  // Throws BrokerGone when nobody serves the name, BrokerForeign, and std::system_error for what the kernel refuses. `group`: whose quota
  // its objects count against. `before`: this process's client of the broker that died; if the new one knows its session, that goes on.
  static std::shared_ptr<Client> connect(const std::string& name, const std::string& label, const std::string& group = {},
                                         const Client* before = nullptr);
  ~Client();

  // Asked when a signal arrives during a call that waits; true ends the call with Interrupted. Set once, before the first client.
  static bool (*interrupted)();

  SessionId session() const { return session_; }
  uint64_t capacity() const { return capacity_; }
  const uint8_t* pool_id() const { return pool_id_; }
  bool usable() const;  // not closed, not forked, broker not known to be dead
  bool broker_lives();   // asks the kernel
  ObjectId new_id() { return {session_, next_.fetch_add(1, std::memory_order_relaxed)}; }

  struct Place {
    uint32_t arena = 0;
    uint64_t offset = 0;
  };
  struct ArenaInfo {
    uint32_t index;
    std::byte* rw;
    const std::byte* ro;
    size_t bytes;
    int ro_fd;
  };
  std::vector<ArenaInfo> map_arenas();  // all there are now, whole; the maps and descriptors are valid until close()

  struct Answer {
    Status status;
    std::string text;
  };
  // `at`, if given: where in the pool.
  Answer create(ObjectId id, size_t bytes, int64_t timeout_ns, std::byte** where, std::string_view note = {}, Place* at = nullptr);
  Status seal(ObjectId id, const ClaimKey& key, bool handover, const std::vector<ObjectId>& also);
  Status put_inline(ObjectId id, const void* data, size_t bytes, const ClaimKey& key, bool handover);
  Status get(ObjectId id, int64_t timeout_ns, bool writable, View* out);
  std::string wait(const std::vector<ObjectId>& ids, size_t want, int64_t timeout_ns);  // a byte an id: 1 where readable
  std::string stats();
  std::string inspect();          // with a row an object: of any length
  Answer grow(uint64_t capacity);  // lets the pool have that many bytes (it never shrinks); kTooLarge

  // One-way: never block, never throw; nothing to do for a broker that is gone.
  void abort(ObjectId id) noexcept;
  void unclaim(const ClaimKey& key) noexcept;
  void adopt(const ClaimKey& key) noexcept;
  void inquire(const ClaimKey& key) noexcept;  // next_event then tells, see Answer
  void disown(const ClaimKey& key, bool mine) noexcept;
  void remove(const std::vector<ObjectId>& ids) noexcept;
  void watch(const std::vector<ObjectId>& ids) noexcept;  // next_event then tells, with kGone, when one of them ceases to exist

  // Answers about claims: after listen(), one thread calls next_event until it throws BrokerGone.
  void listen(bool last = false);  // `last`: asked for claims that nobody else answers for
  bool next_event(int timeout_ms, ClaimKey* key);  // false: nothing came

  // Which object of the pool holds these bytes, if they lie in one live view and still are what the pool has.
  std::optional<Located> locate(const void* data, size_t bytes) { return ranges_.find(data, bytes); }

  size_t live() const { return live_.load(); }  // views and leases
  static size_t live_everywhere();              // of all clients of this process
  void close();                                 // the session ends when the last view and lease are gone

 private:
  friend class View;
  struct ArenaMap {
    Fd ro_fd;
    Mapping rw, ro;
    bool hugetlb = false;
    std::atomic<uint64_t> warmed{0};
    std::atomic<bool> warming{false};
  };

  Client() = default;
  Fd checkout();
  void checkin(Fd fd);
  Reply call(Request q, const void* body = nullptr, size_t len = 0, std::string* text = nullptr, std::vector<Fd>* fds = nullptr);
  std::shared_ptr<ArenaMap> arena(uint64_t index);  // null: there is no such arena
  bool own_copy(View* v, const Reply& r, const std::byte* from, int file);
  struct Hold;
  void post(const Request& q, const void* body = nullptr, size_t len = 0) noexcept;
  void post_ids(Op op, const std::vector<ObjectId>& ids) noexcept;
  void post_release(ObjectId id) noexcept;
  void post_locked(const Request& q, const void* body, size_t len) noexcept;
  void flush_posts_locked() noexcept;
  bool wait_for_posts(std::unique_lock<std::mutex>& lock, bool interruptible) noexcept;
  [[noreturn]] void gone(const char* what);
  void check_process() const;
  void unpin(ObjectId id, const std::byte* base) noexcept;
  void let_go() noexcept;
  void warm(std::shared_ptr<ArenaMap> arena, uint64_t bytes);

  std::string name_;
  pid_t pid_ = 0;
  SessionId session_ = 0;
  uint64_t capacity_ = 0;
  uint8_t pool_id_[16] = {};
  bool many_nodes_ = false;
  std::mutex arenas_mutex_;
  std::vector<std::shared_ptr<ArenaMap>> arenas_;  // mapped when first needed
  std::atomic<uint64_t> next_{1};
  std::atomic<size_t> live_{0};
  std::atomic<bool> dead_{false}, closing_{false};

  std::mutex sockets_mutex_;
  std::vector<Fd> idle_;  // sockets of this session with no call under way

  std::mutex post_mutex_;
  Fd post_;
  std::deque<std::string> posts_;  // what did not fit into the socket; a thread sends it
  bool flushing_ = false, said_bye_ = false;
  std::atomic<uint64_t> posted_{0}, settled_{0};  // one-way messages; those that the broker has dealt with for sure

  Fd events_, wake_;  // wake_: close() tells next_event
  Ranges ranges_;
};

}  // namespace mcr
