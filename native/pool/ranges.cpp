#include "ranges.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "unix.h"

namespace mcr {
namespace {

// True if no page of the range was written by this process, so that the private map still shows what the pool has.
// Bit 61 of a pagemap word: the page belongs to a file or is shared; bits 62 and 63: swapped, present.
bool untouched(const std::byte* data, size_t bytes) {
  const uint64_t first = reinterpret_cast<uintptr_t>(data) / kPageSize, last = (reinterpret_cast<uintptr_t>(data) + bytes - 1) / kPageSize;
  Fd fd(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (!fd) return false;
  uint64_t words[1024];
  for (uint64_t page = first; page <= last;) {
    const size_t n = std::min<uint64_t>(std::size(words), last - page + 1);
    if (::pread(fd.get(), words, n * 8, off_t(page * 8)) != ssize_t(n * 8)) return false;
    for (size_t i = 0; i < n; ++i)
      if ((words[i] >> 62) && !(words[i] >> 61 & 1)) return false;
    page += n;
  }
  return true;
}

}  // namespace

void Ranges::add(const std::byte* base, size_t bytes, ObjectId id, bool writable) {
  std::lock_guard lock(mutex_);
  auto [it, fresh] = ranges_.try_emplace(base, Range{bytes, id, writable, 0});
  ++it->second.uses;
}

void Ranges::remove(const std::byte* base) noexcept {
  std::lock_guard lock(mutex_);
  if (auto it = ranges_.find(base); it != ranges_.end() && --it->second.uses == 0) ranges_.erase(it);
}

std::optional<Located> Ranges::find(const void* data, size_t bytes) {
  const auto* p = static_cast<const std::byte*>(data);
  Range r;
  uint64_t offset;
  {
    std::lock_guard lock(mutex_);
    auto it = ranges_.upper_bound(p);
    if (it == ranges_.begin()) return std::nullopt;
    --it;
    offset = uint64_t(p - it->first);
    r = it->second;
    if (offset + bytes > r.bytes) return std::nullopt;
  }
  if (r.writable && !untouched(p, bytes)) return std::nullopt;
  return Located{r.id, offset};
}

}  // namespace mcr
