#include "columns/pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace mcr {

Pages::Pages(size_t bytes) {
  constexpr size_t kHuge = 2 << 20;
  if (!bytes || bytes > SIZE_MAX - 2 * kHuge) throw std::bad_alloc();
  mapped_ = (bytes + kHuge - 1) / kHuge * kHuge;
  void* p = ::mmap(nullptr, mapped_ + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  auto* whole = static_cast<std::byte*>(p);
  const size_t head = -reinterpret_cast<uintptr_t>(whole) & (kHuge - 1);
  at_ = whole + head;
  if (head) ::munmap(whole, head);
  if (head < kHuge) ::munmap(at_ + mapped_, kHuge - head);
  ::madvise(at_, mapped_, MADV_HUGEPAGE);  // a wish
}

Pages::~Pages() { ::munmap(at_, mapped_); }

}  // namespace mcr
