// Fresh memory for large results, in huge pages where the kernel has them: faults on small ones cost more than what is written.
//
// What is given back is kept for the next of about that size, up to a limit: a training loop asks for the same memory step after step. Until
// then the kernel may take its pages whenever it is short of some.
#pragma once
#include <cstddef>

namespace mcr {

class Pages {
 public:
  explicit Pages(size_t bytes);  // of undefined contents, aligned to 2 MiB; std::bad_alloc
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::byte* data() const { return at_; }

  static constexpr size_t kKeep = 256 << 20;  // bytes that are kept at most, in this process
  // How many are kept now; gives them back to the kernel if told to.
  static size_t kept(bool release = false);

 private:
  std::byte* at_;
  size_t mapped_;
};

}  // namespace mcr
