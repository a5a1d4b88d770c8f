#include "delta/move.h"

#include <cstring>

#include "delta/shares.h"

namespace mcr::delta {
namespace {

constexpr size_t kLongest = 256 << 10;  // bytes of a row, so that what is contiguous can be shared out too

// As few and as long rows as there can be; `dims` are how many there are, and how far apart.
struct Rows {
  explicit Rows(const Move& m) : from(m.from), to(m.to), nbytes(m.item) {
    for (const Move::Dim& d : m.dims) {
      if (d.extent == 1) continue;
      if (!dims.empty() && dims.back().from == d.from * d.extent && dims.back().to == d.to * d.extent) {
        dims.back() = {dims.back().extent * d.extent, d.from, d.to};
      } else {
        dims.push_back(d);
      }
    }
    const int64_t item = int64_t(m.item);
    if (dims.empty() || dims.back().from != item || dims.back().to != item) return;
    const size_t row = size_t(dims.back().extent) * m.item, pieces = (row + kLongest - 1) / kLongest;
    dims.pop_back();
    if (pieces == 1) {
      nbytes = row;
    } else {
      dims.push_back({int64_t(pieces), int64_t(kLongest), int64_t(kLongest)});
      nbytes = kLongest, last = row - (pieces - 1) * kLongest;
    }
  }

  uint64_t count() const {
    uint64_t n = 1;
    for (const Move::Dim& d : dims) n *= uint64_t(d.extent);
    return n;
  }

  void copy(uint64_t begin, uint64_t end) const {
    const Move::Dim inner = dims.empty() ? Move::Dim{1, 0, 0} : dims.back();
    for (uint64_t at = begin; at < end;) {
      uint64_t rest = at / uint64_t(inner.extent);
      const int64_t k = int64_t(at % uint64_t(inner.extent));
      const std::byte* source = from + k * inner.from;
      std::byte* target = to + k * inner.to;
      for (size_t d = dims.empty() ? 0 : dims.size() - 1; d-- > 0;) {
        const int64_t c = int64_t(rest % uint64_t(dims[d].extent));
        rest /= uint64_t(dims[d].extent);
        source += c * dims[d].from, target += c * dims[d].to;
      }
      const uint64_t n = std::min(end - at, uint64_t(inner.extent - k));
      at += n;
      switch (nbytes) {
        case 1: strided<1>(source, target, n, inner); break;
        case 2: strided<2>(source, target, n, inner); break;
        case 4: strided<4>(source, target, n, inner); break;
        case 8: strided<8>(source, target, n, inner); break;
        default:
          for (uint64_t i = 0; i < n; ++i, source += inner.from, target += inner.to) {
            std::memcpy(target, source, last && k + int64_t(i) + 1 == inner.extent ? last : nbytes);
          }
      }
    }
  }

  template <size_t kBytes>
  static void strided(const std::byte* source, std::byte* target, uint64_t n, const Move::Dim& inner) {
    for (uint64_t i = 0; i < n; ++i, source += inner.from, target += inner.to) std::memcpy(target, source, kBytes);
  }

  std::vector<Move::Dim> dims;
  const std::byte* from;
  std::byte* to;
  size_t nbytes, last = 0;  // of a row; of the last one of the inner dimension, if that is shorter
};

}  // namespace

void move(std::vector<Move> moves) {
  std::vector<Rows> rows;
  rows.reserve(moves.size());
  Shares shares;
  for (const Move& m : moves) {
    rows.emplace_back(m);
    shares.add(rows.back().count(), rows.back().nbytes);
  }
  shares.run([&](size_t number, uint64_t from, uint64_t to) { rows[number].copy(from, to); });
}

}  // namespace mcr::delta
