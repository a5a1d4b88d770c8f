// Reads of a link: requests go out ahead of the answers, and the bytes come straight to where they belong.
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <thread>

#include "link.h"
#include "pool/client.h"

namespace mcr::peer {
namespace {

constexpr uint64_t kFrameBytes = 1 << 20;   // bytes asked for at once: as streams take what is left, none of them ends long after the others
constexpr size_t kAhead = 4;                // frames on their way
constexpr uint64_t kStreamBytes = 4 << 20;  // bytes that are worth one more stream

// Cuts pieces into frames, and knows how far what has come of them reaches. Thread-safe.
class Cutter : public Link::Source {
 public:
  explicit Cutter(std::span<const Piece> pieces) : pieces_(pieces) {}
  std::vector<Piece> next(uint64_t* at) override {
    std::lock_guard lock(mutex_);
    std::vector<Piece> frame;
    uint64_t room = kFrameBytes;
    *at = cut_;
    while (piece_ < pieces_.size() && room && frame.size() < kMaxRanges) {
      Piece p = pieces_[piece_];
      p.offset += done_, p.local += done_, p.bytes -= done_;
      const uint64_t n = std::min(p.bytes, room);
      if (n < p.bytes) done_ += n;
      else ++piece_, done_ = 0;
      p.bytes = n;
      room -= n;
      cut_ += n;
      if (n) frame.push_back(p);
    }
    return frame;
  }
  void arrived(uint64_t at, uint64_t bytes) override {
    std::lock_guard lock(mutex_);
    ahead_[at] = bytes;
    for (auto f = ahead_.begin(); f != ahead_.end() && f->first == reached_; f = ahead_.erase(f)) reached_ += f->second;
    change_.notify_all();
  }
  void stop() {
    std::lock_guard lock(mutex_);
    piece_ = pieces_.size();
  }
  void ended() {
    std::lock_guard lock(mutex_);
    ++ended_;
    change_.notify_all();
  }
  // How far it reaches, as soon as that is `least`, or `links` have ended, or some time is over.
  uint64_t wait(uint64_t least, size_t links, bool* over) {
    std::unique_lock lock(mutex_);
    change_.wait_for(lock, std::chrono::milliseconds(100), [&] { return reached_ >= least || ended_ == links; });
    *over = ended_ == links;
    return reached_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable change_;
  const std::span<const Piece> pieces_;
  size_t piece_ = 0;
  uint64_t done_ = 0;                   // of the piece that is next
  uint64_t cut_ = 0, reached_ = 0;      // bytes
  std::map<uint64_t, uint64_t> ahead_;  // frames that came before one in front of them: where they are, and bytes
  size_t ended_ = 0;                    // links
};

// Says how far it is until all links have ended. False: it was told to stop.
bool follow(Cutter& cutter, size_t links, const Reached& reached) {
  uint64_t told = 0;
  for (bool over = false; !over;) {
    const uint64_t step = std::max<uint64_t>(reached.step, 1), there = cutter.wait(told + step, links, &over);
    if (Client::interrupted && Client::interrupted()) throw Interrupted();
    if (over || there < told + step) continue;
    told = there;
    if (!reached.tell(told)) {
      cutter.stop();
      return false;
    }
  }
  return true;
}

}  // namespace

void Link::read_from(Source& source, int64_t deadline) {
  Guard g(*this, "read");
  std::deque<std::vector<Piece>> asked;
  std::deque<uint64_t> places;  // of those frames
  std::string request;
  size_t sent = 0;
  bool more = true;
  char head[sizeof(Frame)];
  size_t headed = 0, piece = 0;  // of the answer that is coming
  uint64_t into = 0;             // bytes of that piece
  std::string refused;           // why the first frame was that had no bytes
  for (;;) {
    while (more && asked.size() < kAhead) {
      uint64_t at;
      std::vector<Piece> pieces = source.next(&at);
      if (pieces.empty()) {
        more = false;
        break;
      }
      const Frame f{uint32_t(pieces.size() * sizeof(Range)), uint16_t(Op::kRead), 0, 0};
      request.erase(0, std::exchange(sent, 0));
      request.append(bytes_of(f));
      for (const Piece& p : pieces) request.append(bytes_of(Range{p.region, p.offset, p.bytes}));
      asked.push_back(std::move(pieces));
      places.push_back(at);
    }
    if (asked.empty()) break;
    bool idle = true;
    if (sent < request.size()) {
      const ssize_t n = ::send(fd_.get(), request.data() + sent, request.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n > 0) sent += size_t(n), idle = false;
      else if (errno != EAGAIN && errno != EINTR) fail(PeerError::kLost, errno, std::strerror(errno));
    }
    iovec v[64];
    size_t count = 0;
    const std::vector<Piece>& now = asked.front();
    if (headed < sizeof head) v[count++] = {head + headed, sizeof head - headed};
    // A refusal has no bytes after it, so those are asked for only once the head says that they come.
    else
      for (size_t i = piece; i < now.size() && count < std::size(v); ++i) {
        const uint64_t skip = i == piece ? into : 0;
        v[count++] = {reinterpret_cast<void*>(now[i].local + skip), now[i].bytes - skip};
      }
    const ssize_t n = ::readv(fd_.get(), v, int(count));
    if (n == 0) fail(PeerError::kLost, ECONNRESET, "the peer hung up");
    if (n < 0 && errno != EAGAIN && errno != EINTR) fail(PeerError::kLost, errno, std::strerror(errno));
    if (n < 0 && errno == EAGAIN) {
      if (idle) wait_for(short(POLLIN | (sent < request.size() ? POLLOUT : 0)), deadline);
      continue;
    }
    if (n < 0) continue;
    if (headed < sizeof head) {
      if ((headed += size_t(n)) < sizeof head) continue;
      Frame f;
      std::memcpy(&f, head, sizeof f);
      uint64_t want = 0;
      for (const Piece& p : now) want += p.bytes;
      if (Op(f.op) == Op::kRead && Code(f.code) == Code::kBad && !f.bytes && f.aux < now.size()) {
        const Piece& p = now[f.aux];
        if (refused.empty())
          refused = "it has no bytes [" + std::to_string(p.offset) + ", " + std::to_string(p.offset + p.bytes) + ") in region " + std::to_string(p.region);
        more = false;  // what has been asked for still comes, and then the stream is in order
        asked.pop_front();
        places.pop_front();
        headed = 0;
        continue;
      }
      if (Op(f.op) != Op::kRead || f.code || f.bytes || f.aux != want) fail(PeerError::kLost, EPROTO, "its answer makes no sense");
      continue;
    }
    for (uint64_t rest = uint64_t(n); rest;) {
      const uint64_t k = std::min(rest, now[piece].bytes - into);
      into += k, rest -= k;
      if (into == now[piece].bytes) ++piece, into = 0;
    }
    if (piece == now.size()) {
      uint64_t bytes = 0;
      for (const Piece& p : now) bytes += p.bytes;
      source.arrived(places.front(), bytes);
      places.pop_front();
      asked.pop_front();
      headed = piece = 0;
    }
    if (now_ns() > deadline && (more || !asked.empty())) fail(PeerError::kOther, ETIMEDOUT, "not done before the deadline");
  }
  g.done = true;
  if (!refused.empty()) fail(PeerError::kOther, EINVAL, refused);
}

void Link::read(std::span<const Piece> pieces, int64_t timeout_ns) {
  Link* one = this;
  read_striped({one}, pieces, timeout_ns);
}

bool read_striped(const std::vector<Link*>& links, std::span<const Piece> pieces, int64_t timeout_ns, const Reached* reached) {
  if (links.empty()) throw std::invalid_argument("no links to read from");
  const int64_t now = now_ns(), deadline = timeout_ns > INT64_MAX - now ? INT64_MAX : now + std::max<int64_t>(timeout_ns, 0);
  Cutter cutter(pieces);
  std::mutex mutex;
  std::exception_ptr first;
  auto work = [&](Link* l) {
    try {
      l->read_from(cutter, deadline);
    } catch (...) {
      cutter.stop();  // the others finish what they have asked for
      std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
    cutter.ended();
  };
  uint64_t total = 0;
  for (const Piece& p : pieces) total += std::min(p.bytes, kStreamBytes * links.size());
  const size_t useful = std::clamp<size_t>(size_t((total + kStreamBytes - 1) / kStreamBytes), 1, links.size());
  bool stopped = false;
  {
    std::vector<std::jthread> threads;
    for (size_t i = reached ? 0 : 1; i < useful; ++i) threads.emplace_back(work, links[i]);
    if (reached) try {
        stopped = !follow(cutter, useful, *reached);
      } catch (const Interrupted&) {
        for (size_t i = 0; i < useful; ++i) links[i]->close();
        throw;
      }
    else work(links[0]);
  }
  if (first) std::rethrow_exception(first);
  return !stopped;
}

}  // namespace mcr::peer
