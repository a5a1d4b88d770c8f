// Fresh memory for large results, in huge pages where the kernel has them: faults on small ones cost more than what is written.
#pragma once
#include <cstddef>

namespace mcr {

class Pages {
 public:
  explicit Pages(size_t bytes);  // zeros, aligned to 2 MiB; std::bad_alloc
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::byte* data() const { return at_; }

 private:
  std::byte* at_;
  size_t mapped_;
};

}  // namespace mcr
