#include "columns/pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <new>

namespace mcr {
namespace {

constexpr size_t kHuge = 2 << 20;
constexpr size_t kMost = 64;  // pieces that are kept

struct Piece {
  std::byte* at;
  size_t bytes;
};

// Never waits: whoever finds it in use (a child that was forked meanwhile does for ever) does without.
struct Keeper {
  std::mutex mutex;
  Piece pieces[kMost];
  size_t n = 0, bytes = 0;

  // The smallest piece that is large enough, and not much larger.
  bool take(size_t wanted, Piece* out) {
    const std::unique_lock lock(mutex, std::try_to_lock);
    if (!lock) return false;
    Piece* best = nullptr;
    for (Piece* p = pieces; p < pieces + n; ++p)
      if (p->bytes >= wanted && p->bytes <= wanted + wanted / 8 && (!best || p->bytes < best->bytes)) best = p;
    if (!best) return false;
    *out = *best;
    bytes -= best->bytes;
    std::copy(best + 1, pieces + n--, best);
    return true;
  }

  // The oldest go first. What has no place is unmapped.
  void give(Piece piece) {
    const std::unique_lock lock(mutex, std::try_to_lock);
    if (!lock || piece.bytes > Pages::kKeep || ::madvise(piece.at, piece.bytes, MADV_FREE)) {
      ::munmap(piece.at, piece.bytes);
      return;
    }
    size_t gone = 0;
    while (n - gone == kMost || bytes + piece.bytes > Pages::kKeep) {
      bytes -= pieces[gone].bytes;
      ::munmap(pieces[gone].at, pieces[gone].bytes);
      ++gone;
    }
    std::copy(pieces + gone, pieces + n, pieces);
    n -= gone;
    pieces[n++] = piece;
    bytes += piece.bytes;
  }
};

Keeper& keeper() {
  static auto* const one = new Keeper;  // never destroyed: arrays may die after everything else
  return *one;
}

Piece map(size_t bytes) {
  void* p = ::mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  auto* whole = static_cast<std::byte*>(p);
  const size_t head = -reinterpret_cast<uintptr_t>(whole) & (kHuge - 1);
  if (head) ::munmap(whole, head);
  ::munmap(whole + head + bytes, kHuge - head);
  ::madvise(whole + head, bytes, MADV_HUGEPAGE);  // a wish
  return {whole + head, bytes};
}

}  // namespace

Pages::Pages(size_t bytes) {
  if (!bytes || bytes > SIZE_MAX - 2 * kHuge) throw std::bad_alloc();
  const size_t wanted = (bytes + kHuge - 1) / kHuge * kHuge;
  Piece piece;
  if (!keeper().take(wanted, &piece)) piece = map(wanted);
  at_ = piece.at;
  mapped_ = piece.bytes;
}

Pages::~Pages() { keeper().give({at_, mapped_}); }

size_t Pages::kept(bool release) {
  Keeper& k = keeper();
  const std::lock_guard lock(k.mutex);
  if (release) {
    for (; k.n; --k.n) ::munmap(k.pieces[k.n - 1].at, k.pieces[k.n - 1].bytes);
    k.bytes = 0;
  }
  return k.bytes;
}

}  // namespace mcr
