// Work on many things of any size, in shares that are about equally large.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "parallel.h"

namespace mcr::delta {

class Shares {
 public:
  // The next thing has `n` parts of so many bytes.
  void add(uint64_t n, size_t nbytes) {
    const uint64_t most = nbytes ? std::max<uint64_t>(1, kShare / nbytes) : 1;
    for (uint64_t from = 0; from < n; from += most) {
      const uint64_t to = std::min(n, from + most);
      if (begins_.empty() || filled_ >= kShare) begins_.push_back(pieces_.size()), filled_ = 0;
      pieces_.push_back({things_, from, to});
      filled_ += size_t(to - from) * nbytes;
    }
    total_ += size_t(n) * nbytes;
    ++things_;
  }

  // Calls work(thing, from, to) until all parts of all things are done, on several threads where there is much. It must not throw.
  template <class Work>
  void run(const Work& work) const {
    parallel(begins_.size(), threads_for(total_), [&](size_t share) {
      const size_t end = share + 1 < begins_.size() ? begins_[share + 1] : pieces_.size();
      for (size_t i = begins_[share]; i < end; ++i) work(pieces_[i].thing, pieces_[i].from, pieces_[i].to);
      return true;
    });
  }

 private:
  static constexpr size_t kShare = 1 << 20;  // bytes
  struct Piece {
    size_t thing;
    uint64_t from, to;
  };
  std::vector<Piece> pieces_;
  std::vector<size_t> begins_;  // of each share
  size_t filled_ = 0, total_ = 0, things_ = 0;
};

}  // namespace mcr::delta
