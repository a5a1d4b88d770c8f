// The reading end of a connection: queue pairs on one or more rails, over which the bytes of a read are spread. Thread-safe; one read at a
// time, the others wait for their turn.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "plan.h"
#include "pool/unix.h"
#include "queues.h"

namespace mcr::verbs {

class Reader {
 public:
  // `on`: for each queue pair, the rail that it is on.
  Reader(std::shared_ptr<Rails> rails, std::vector<size_t> on, const Manner& manner);
  ~Reader();
  Reader(const Reader&) = delete;

  std::vector<End> ends() const;
  // Leads one queue pair to the peer's. `key`: which of a piece's keys is for it. Before the first read.
  void connect(size_t queue, const FarPort& far, End end, size_t key);
  // What the peer has, for reads that begin from now on. Every piece has as many keys as the connected queues need.
  void set_regions(Regions regions);

  // Reads all ranges, or throws: Error, Interrupted. Then, unless it was the EINVAL of a wrong range or the end of waiting for its turn,
  // the queue pairs are gone, and no byte arrives any more. `interrupted` is asked when a signal comes, and now and then.
  void read(std::span<const Range> ranges, int64_t timeout_ns, bool (*interrupted)());

  void close();  // a read that is under way ends with an error; waits for it
  std::string why_closed() const;  // "": it is not
  // Bytes that came over each queue pair.
  std::vector<uint64_t> bytes_read() const;

 private:
  struct Queue {
    size_t lane;
    QueuePtr pair;
    End end;
    size_t key = 0;
    uint32_t depth = 0;     // requests under way at most
    uint32_t requests = 0;  // under way
    uint64_t bytes = 0;     // under way
    std::atomic<uint64_t> total{0};
  };
  struct Lane {  // one rail
    size_t rail;
    ChannelPtr channel;
    CompletionsPtr completions;
  };
  struct Turn;
  class Busy;  // who has the queue pairs, for as long as it lives

  void run(std::vector<Batch> batches, std::span<const Piece> mine, Turn& turn);
  void post(Batch& batch, std::span<const Piece> mine);
  size_t freest(std::span<const size_t> among) const;
  const std::string& device_of(const Lane& lane) const { return (*rails_)[lane.rail].port.name.device; }
  size_t collect();
  void arm();
  void sleep(Turn& turn);
  [[noreturn]] void fail(const Queue& q, ibv_wc_status status) const;
  void tear_down(const std::string& why) noexcept;

  std::shared_ptr<Rails> rails_;
  const Manner manner_;
  std::vector<Lane> lanes_;
  std::vector<std::unique_ptr<Queue>> queues_;  // after what they report to
  uint32_t largest_ = 0;                        // bytes of a request
  Fd wake_;                                     // readable once the reader is to close
  std::mutex turn_mutex_;
  std::condition_variable turn_over_;
  bool busy_ = false;  // somebody has the queue pairs: reads with them, or changes them
  std::atomic<bool> closing_{false};
  mutable std::mutex small_mutex_;  // for what is below; held briefly
  std::shared_ptr<const Regions> regions_ = std::make_shared<Regions>();
  std::string why_;
};

}  // namespace mcr::verbs
