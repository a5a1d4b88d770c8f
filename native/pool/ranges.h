// Which object lies at an address: the ranges of this process's memory that views of the pool are. Thread-safe.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "wire.h"

namespace mcr {

// Bytes of an object.
struct Located {
  ObjectId id;
  uint64_t offset;
};

class Ranges {
 public:
  // Another view of an object begins at `base`; `writable`: it is a private map, which need not show what the pool has.
  void add(const std::byte* base, size_t bytes, ObjectId id, bool writable);
  void remove(const std::byte* base) noexcept;  // one of those; of an address where none begins, nothing
  // The object that holds these bytes, if they lie in one live view and still are what the pool has.
  std::optional<Located> find(const void* data, size_t bytes);

 private:
  struct Range {
    size_t bytes;
    ObjectId id;
    bool writable;
    size_t uses;
  };
  std::mutex mutex_;
  std::map<const std::byte*, Range> ranges_;
};

}  // namespace mcr
