// A page-granular offset allocator whose metadata lies outside the memory it manages.
//
// Two-level segregated fit with 8 bins a power of two (the float-binned scheme of S. Aaltonen's OffsetAllocator; TLSF's idea):
// allocate and free are O(1), and neighbours merge at once. Only when no larger bin holds anything is the request's own bin searched.
// Not thread-safe: one writer.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace mcr {

class PageAllocator {
 public:
  using Node = uint32_t;  // names a live allocation; the caller keeps it
  static constexpr Node kNil = UINT32_MAX;
  struct Extent {
    uint64_t first;  // page
    uint64_t pages;
    Node node;
  };

  PageAllocator();

  // Adds `pages` free pages at the end of the managed range.
  void extend(uint64_t pages);
  // Adds `pages` pages at the end of the managed range, allocated.
  Node append(uint64_t pages);
  std::optional<Extent> allocate(uint64_t pages);
  void free(Node node);

  uint64_t total_pages() const { return total_; }
  uint64_t free_pages() const { return free_; }
  uint64_t largest_free() const;  // pages of the largest free block

  // For tests: every block in address order.
  struct Block {
    uint64_t first, pages;
    bool used;
  };
  std::vector<Block> blocks() const;

 private:
  static constexpr int kBins = 64 * 8;
  struct Rec {
    uint64_t first = 0, pages = 0;
    Node bin_prev = kNil, bin_next = kNil;    // free list of the bin
    Node left = kNil, right = kNil;           // neighbours by address
    bool used = false;
  };

  static int bin_of(uint64_t pages, bool round_up);
  Node make();
  void link(Node n);
  void unlink(Node n);

  std::vector<Rec> recs_;
  std::vector<Node> spare_;
  std::array<Node, kBins> heads_;
  uint64_t top_ = 0;                  // bit g: some bin of group g is not empty
  std::array<uint8_t, 64> leaf_{};    // bit b: bin g * 8 + b is not empty
  Node last_ = kNil;                  // the block with the highest address
  uint64_t total_ = 0, free_ = 0;
};

}  // namespace mcr
