#include "reader.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>

namespace mcr::verbs {
namespace {

constexpr uint32_t kDepth = 64;           // requests of a queue pair under way at most
constexpr size_t kChain = 16;             // requests handed to the driver at once, …
constexpr uint64_t kTogether = 64 << 10;  // … of so many bytes in all
constexpr int kSpins = 200;               // polls before sleeping: some microseconds
constexpr int64_t kAsk = 100'000'000;     // ns between looks at the clock and at `interrupted`
constexpr int kBytesBits = 32;            // of a request's id; the rest is its queue pair

bool is_silence(ibv_wc_status s) {
  return s == IBV_WC_RETRY_EXC_ERR || s == IBV_WC_RNR_RETRY_EXC_ERR || s == IBV_WC_RESP_TIMEOUT_ERR || s == IBV_WC_REM_ABORT_ERR ||
         s == IBV_WC_WR_FLUSH_ERR;
}

}  // namespace

// What ends a read from outside.
struct Reader::Turn {
  int64_t deadline;
  bool (*interrupted)();
  int64_t next = 0;
  const std::atomic<bool>& closing;

  // Looks around, if it is time. Throws.
  void look(bool signal = false) {
    if (closing) throw Error(Failure::kTransport, "the connection was closed during a read", "read", ECANCELED);
    const int64_t now = now_ns();
    if (now < next && !signal) return;
    next = now + kAsk;
    if (interrupted && interrupted()) throw Interrupted();
    if (now >= deadline) throw Error(Failure::kTransport, "", "read", ETIMEDOUT);
  }
  int timeout_ms() const { return int(std::clamp<int64_t>((std::min(deadline, next) - now_ns()) / 1'000'000 + 1, 0, 1000)); }
};

class Reader::Busy {
 public:
  Busy(Reader& reader, Turn* turn) : reader_(reader) {  // without a turn: waits as long as it takes, which is until a read's deadline at most
    std::unique_lock lock(reader.turn_mutex_);
    while (reader.busy_) {
      reader.turn_over_.wait_for(lock, std::chrono::nanoseconds(kAsk));
      if (!turn) continue;
      lock.unlock();  // `interrupted` may wait for something else
      turn->look();
      lock.lock();
    }
    reader.busy_ = true;
  }
  ~Busy() {
    std::lock_guard lock(reader_.turn_mutex_);
    reader_.busy_ = false;
    reader_.turn_over_.notify_one();
  }
  Busy(const Busy&) = delete;

 private:
  Reader& reader_;
};

Reader::Reader(std::shared_ptr<Rails> rails, std::vector<size_t> on, const Manner& manner)
    : rails_(std::move(rails)), manner_(manner), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) throw_errno("eventfd");
  rails_->check_process();
  const Library& v = library();
  for (const size_t rail : on) {
    if (rail >= rails_->size()) throw Error(Failure::kTransport, "there is no rail " + std::to_string(rail), "connect", EINVAL);
    if (std::any_of(lanes_.begin(), lanes_.end(), [&](const Lane& l) { return l.rail == rail; })) continue;
    const Port& port = (*rails_)[rail].port;
    Lane lane{rail, {}, {}};
    lane.channel.reset(v.create_comp_channel((*rails_)[rail].context.get()));
    const uint32_t depth = std::min(kDepth, port.max_requests) * uint32_t(std::count(on.begin(), on.end(), rail));
    if (depth > port.max_completions)
      throw Error(Failure::kTransport, port.name.device + ": at most " + std::to_string(port.max_completions) + " completions, not " +
                  std::to_string(depth), "ibv_create_cq", EINVAL);
    if (lane.channel) lane.completions.reset(v.create_cq((*rails_)[rail].context.get(), int(depth), nullptr, lane.channel.get(), 0));
    if (!lane.completions) throw call_failed(port.name.device, "ibv_create_cq", errno);
    if (::fcntl(lane.channel->fd, F_SETFL, ::fcntl(lane.channel->fd, F_GETFL) | O_NONBLOCK)) throw_errno("fcntl");
    largest_ = largest_ ? std::min(largest_, port.max_message) : port.max_message;
    lanes_.push_back(std::move(lane));
  }
  for (const size_t rail : on) {
    const size_t lane = size_t(std::find_if(lanes_.begin(), lanes_.end(), [&](const Lane& l) { return l.rail == rail; }) - lanes_.begin());
    auto q = std::make_unique<Queue>();
    q->lane = lane;
    q->pair = make_queue((*rails_)[rail], lanes_[lane].completions.get(), std::min(kDepth, (*rails_)[rail].port.max_requests));
    q->end = new_end(*q->pair);
    queues_.push_back(std::move(q));
  }
}

Reader::~Reader() {
  if (!rails_->in_child()) return;
  for (auto& q : queues_) q->pair.release();
  for (Lane& l : lanes_) {
    l.completions.release();
    l.channel.release();
  }
}

std::vector<End> Reader::ends() const {
  std::vector<End> out;
  for (const auto& q : queues_) out.push_back(q->end);
  return out;
}

void Reader::connect(size_t queue, const FarPort& far, End end, size_t key) {
  rails_->check_process();
  const Busy busy(*this, nullptr);
  Queue& q = *queues_.at(queue);
  if (!q.pair) throw Error(Failure::kTransport, "the connection is closed", "connect", EBADF);
  const Rail& rail = (*rails_)[lanes_[q.lane].rail];
  const uint32_t reads = reads_under_way(rail.port, far);
  to_receive(rail, q.pair.get(), far, end, 0, 0, manner_);
  to_send(rail, q.pair.get(), q.end, reads, manner_);
  q.key = key;
  // As many again wait in the device: it never runs dry while this process is told of what is done.
  q.depth = std::min({2 * reads, kDepth, rail.port.max_requests});
}

void Reader::set_regions(Regions regions) {
  auto next = std::make_shared<const Regions>(std::move(regions));
  std::lock_guard lock(small_mutex_);
  regions_.swap(next);
}

void Reader::read(std::span<const Range> ranges, int64_t timeout_ns, bool (*interrupted)()) {
  rails_->check_process();
  Turn turn{now_ns() + timeout_ns, interrupted, 0, closing_};
  const auto late = [&] {
    return Error(Failure::kTransport, "not read within " + std::to_string(timeout_ns / 1'000'000) + " ms", "read", ETIMEDOUT);
  };
  std::optional<Busy> busy;
  try {
    busy.emplace(*this, &turn);
  } catch (const Error& e) {
    throw e.code == ETIMEDOUT ? late() : e;
  }
  if (const std::string why = why_closed(); !why.empty())
    throw Error(Failure::kTransport, "the connection is closed: " + why, "read", EBADF);
  const auto mine = rails_->pieces();
  std::shared_ptr<const Regions> theirs;
  {
    std::lock_guard small(small_mutex_);
    theirs = regions_;
  }
  uint64_t total = 0;
  for (const Range& r : ranges) total += r.bytes;
  std::vector<Way> ways;
  for (const auto& q : queues_) ways.push_back({lanes_[q->lane].rail, q->key});
  std::vector<Batch> all = batches(cut(ranges, *theirs, *mine, chunk_bytes(total, queues_.size(), largest_)), *mine, ways);
  try {
    run(std::move(all), *mine, turn);
  } catch (const Error& e) {
    const Error told = e.code == ETIMEDOUT && e.what()[0] == 0 ? late() : e;
    tear_down(told.what());
    throw told;
  } catch (const Interrupted&) {
    tear_down("a read was interrupted");
    throw;
  }
}

void Reader::run(std::vector<Batch> batches, std::span<const Piece> mine, Turn& turn) {
  size_t left = 0;
  for (const Batch& b : batches) left += b.chunks.size();
  int idle = 0;
  while (left) {
    for (Batch& b : batches) post(b, mine);
    const size_t n = collect();
    left -= n;
    turn.look();
    if (n) {
      idle = 0;
    } else if (++idle == kSpins) {
      arm();
    } else if (idle > kSpins) {
      sleep(turn);
      idle = kSpins - 1;
    }
  }
}

// The queue pair with the fewest bytes under way, of those that take another request: a slow rail gets less. The number of all if none does.
size_t Reader::freest(std::span<const size_t> among) const {
  size_t best = queues_.size();
  for (const size_t i : among)
    if (queues_[i]->requests < queues_[i]->depth && (best == queues_.size() || queues_[i]->bytes < queues_[best]->bytes)) best = i;
  return best;
}

// Hands out as many chunks as there is room for.
void Reader::post(Batch& batch, std::span<const Piece> mine) {
  ibv_sge places[kChain];
  ibv_send_wr requests[kChain];
  const std::vector<Chunk>& chunks = batch.chunks;
  size_t& done = batch.posted;
  while (done < chunks.size()) {
    const size_t index = freest(batch.ways);
    if (index == queues_.size()) break;
    Queue* q = queues_[index].get();
    const size_t rail = lanes_[q->lane].rail;
    size_t n = 0;
    // Small requests go together: each call rings the device's bell once.
    for (uint64_t bytes = 0; n < kChain && done + n < chunks.size() && q->requests + n < q->depth; ++n) {
      const Chunk& c = chunks[done + n];
      if (n && bytes + c.bytes > kTogether) break;
      bytes += c.bytes;
      places[n] = {c.local, c.bytes, mine[c.local_piece].keys[rail]};
      requests[n] = {};
      requests[n].wr_id = uint64_t(index) << kBytesBits | c.bytes;
      requests[n].sg_list = &places[n];
      requests[n].num_sge = 1;
      requests[n].opcode = IBV_WR_RDMA_READ;
      requests[n].send_flags = IBV_SEND_SIGNALED;
      requests[n].wr.rdma.remote_addr = c.remote;
      requests[n].wr.rdma.rkey = c.remote_piece->keys[q->key];
      if (n) requests[n - 1].next = &requests[n];
    }
    ibv_send_wr* bad = nullptr;
    if (const int e = ibv_post_send(q->pair.get(), requests, &bad))
      throw call_failed(device_of(lanes_[q->lane]), "ibv_post_send", e);
    for (size_t i = 0; i < n; ++i) q->bytes += chunks[done + i].bytes;
    q->requests += uint32_t(n);
    done += n;
  }
}

// Takes what is complete, without waiting. Returns how many.
size_t Reader::collect() {
  ibv_wc found[kChain];
  size_t done = 0;
  for (const Lane& lane : lanes_) {
    int n;
    while ((n = ibv_poll_cq(lane.completions.get(), int(kChain), found)) > 0) {
      for (int i = 0; i < n; ++i) {
        Queue& q = *queues_[found[i].wr_id >> kBytesBits];
        if (found[i].status != IBV_WC_SUCCESS) fail(q, found[i].status);
        const uint64_t bytes = uint32_t(found[i].wr_id);
        --q.requests;
        q.bytes -= bytes;
        q.total.fetch_add(bytes, std::memory_order_relaxed);
      }
      done += size_t(n);
    }
    if (n < 0) throw call_failed(device_of(lane), "ibv_poll_cq", EIO);
  }
  return done;
}

// Asks for an event at the next completion. What came before is seen by polling once more.
void Reader::arm() {
  for (const Lane& lane : lanes_)
    if (const int e = ibv_req_notify_cq(lane.completions.get(), 0))
      throw call_failed(device_of(lane), "ibv_req_notify_cq", e);
}

// Until an event, or until it is time to look around.
void Reader::sleep(Turn& turn) {
  std::vector<pollfd> fds{{wake_.get(), POLLIN, 0}};
  for (const Lane& lane : lanes_) fds.push_back({lane.channel->fd, POLLIN, 0});
  const int n = ::poll(fds.data(), fds.size(), turn.timeout_ms());
  if (n < 0 && errno != EINTR) throw_errno("poll");
  turn.look(n < 0);
  for (const Lane& lane : lanes_) {
    ibv_cq* completions;
    void* context;
    unsigned events = 0;
    while (!library().get_cq_event(lane.channel.get(), &completions, &context)) ++events;
    if (events) library().ack_cq_events(lane.completions.get(), events);
  }
}

void Reader::fail(const Queue& q, ibv_wc_status status) const {
  const bool silence = is_silence(status);
  throw Error(silence ? Failure::kPeerLost : Failure::kTransport,
              device_of(lanes_[q.lane]) + ": a read failed: " + library().wc_status_str(status), "read", silence ? ECONNRESET : EREMOTEIO);
}

// No byte arrives once the queue pairs are gone.
void Reader::tear_down(const std::string& why) noexcept {
  {
    std::lock_guard lock(small_mutex_);
    if (why_.empty()) why_ = why;
  }
  for (const auto& q : queues_) q->pair.reset();
  for (Lane& lane : lanes_) {
    lane.completions.reset();
    lane.channel.reset();
  }
}

void Reader::close() {
  if (rails_->in_child()) return;
  closing_ = true;
  if (const uint64_t one = 1; ::write(wake_.get(), &one, sizeof one) < 0 && errno != EAGAIN) throw_errno("write");
  const Busy busy(*this, nullptr);
  tear_down("it was closed here");
}

std::string Reader::why_closed() const {
  std::lock_guard lock(small_mutex_);
  return why_;
}

std::vector<uint64_t> Reader::bytes_read() const {
  std::vector<uint64_t> out;
  for (const auto& q : queues_) out.push_back(q->total.load(std::memory_order_relaxed));
  return out;
}

}  // namespace mcr::verbs
