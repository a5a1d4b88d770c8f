// Boxes from one place in memory to another.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mcr::delta {

struct Move {
  struct Dim {
    int64_t extent;    // elements
    int64_t from, to;  // to the next one, in bytes; may be negative
  };
  std::vector<Dim> dims;
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  size_t item = 1;  // bytes of an element: 1, 2, 4 or 8
};

// Nothing may be read where something is written. Uses several threads where there is much.
void move(std::vector<Move> moves);

}  // namespace mcr::delta
