// Copies into the pool: several threads where the bytes are many.
#pragma once
#include <cstddef>
#include <span>

namespace mcr {

struct Segment {
  std::byte* to;
  const std::byte* from;
  size_t bytes;
};

// Copies every segment. Uses up to `threads` threads (0: one a core this process may run on) once there is enough for each.
// Holds no state; safe to call from any thread and after a fork.
void copy_segments(std::span<const Segment> segments, unsigned threads = 0);

}  // namespace mcr
