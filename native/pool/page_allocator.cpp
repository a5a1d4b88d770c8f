#include "page_allocator.h"

#include <algorithm>
#include <bit>

namespace mcr {

PageAllocator::PageAllocator() { heads_.fill(kNil); }

// Sizes below 8 have a bin each; above, the three bits under the leading one choose among the 8 bins of a power of two.
int PageAllocator::bin_of(uint64_t pages, bool round_up) {
  if (pages < 8) return static_cast<int>(pages);
  const int shift = std::bit_width(pages) - 4;
  int bin = (shift + 1) * 8 + static_cast<int>((pages >> shift) & 7);
  if (round_up && (pages & ((uint64_t{1} << shift) - 1))) ++bin;
  return bin;
}

PageAllocator::Node PageAllocator::make() {
  if (!spare_.empty()) {
    Node n = spare_.back();
    spare_.pop_back();
    recs_[n] = Rec{};
    return n;
  }
  recs_.emplace_back();
  return static_cast<Node>(recs_.size() - 1);
}

void PageAllocator::link(Node n) {
  Rec& r = recs_[n];
  const int b = bin_of(r.pages, false);
  r.used = false;
  r.bin_prev = kNil;
  r.bin_next = heads_[b];
  if (r.bin_next != kNil) recs_[r.bin_next].bin_prev = n;
  heads_[b] = n;
  leaf_[b >> 3] |= uint8_t(1u << (b & 7));
  top_ |= uint64_t{1} << (b >> 3);
  free_ += r.pages;
}

void PageAllocator::unlink(Node n) {
  Rec& r = recs_[n];
  const int b = bin_of(r.pages, false);
  if (r.bin_next != kNil) recs_[r.bin_next].bin_prev = r.bin_prev;
  if (r.bin_prev != kNil) {
    recs_[r.bin_prev].bin_next = r.bin_next;
  } else {
    heads_[b] = r.bin_next;
    if (heads_[b] == kNil) {
      leaf_[b >> 3] &= uint8_t(~(1u << (b & 7)));
      if (!leaf_[b >> 3]) top_ &= ~(uint64_t{1} << (b >> 3));
    }
  }
  free_ -= r.pages;
}

PageAllocator::Node PageAllocator::append(uint64_t pages) {
  const Node n = make();
  Rec& r = recs_[n];
  r.first = total_;
  r.pages = pages;
  r.left = last_;
  r.used = true;
  if (last_ != kNil) recs_[last_].right = n;
  last_ = n;
  total_ += pages;
  return n;
}

void PageAllocator::extend(uint64_t pages) {
  if (pages) free(append(pages));
}

std::optional<PageAllocator::Extent> PageAllocator::allocate(uint64_t pages) {
  if (!pages || pages > free_) return std::nullopt;
  const int want = bin_of(pages, true);
  int g = want >> 3;
  int bin = -1;
  if (uint8_t m = leaf_[g] & uint8_t(0xffu << (want & 7))) {
    bin = g * 8 + std::countr_zero(m);
  } else if (uint64_t t = g >= 63 ? 0 : top_ & (~uint64_t{0} << (g + 1))) {
    g = std::countr_zero(t);
    bin = g * 8 + std::countr_zero(leaf_[g]);
  }
  Node n = bin >= 0 ? heads_[bin] : heads_[bin_of(pages, false)];
  // No bin whose every block fits: a block of the request's own bin may still do (the last large block must be usable).
  while (n != kNil && recs_[n].pages < pages) n = recs_[n].bin_next;
  if (n == kNil) return std::nullopt;
  unlink(n);
  if (recs_[n].pages > pages) {
    const Node rest = make();  // may move recs_
    Rec &r = recs_[n], &s = recs_[rest];
    s.first = r.first + pages;
    s.pages = r.pages - pages;
    s.left = n;
    s.right = r.right;
    if (s.right != kNil) recs_[s.right].left = rest;
    else last_ = rest;
    r.right = rest;
    r.pages = pages;
    link(rest);
  }
  recs_[n].used = true;
  return Extent{recs_[n].first, pages, n};
}

void PageAllocator::free(Node n) {
  if (const Node l = recs_[n].left; l != kNil && !recs_[l].used) {
    unlink(l);
    recs_[l].pages += recs_[n].pages;
    recs_[l].right = recs_[n].right;
    if (recs_[n].right != kNil) recs_[recs_[n].right].left = l;
    else last_ = l;
    spare_.push_back(n);
    n = l;
  }
  if (const Node r = recs_[n].right; r != kNil && !recs_[r].used) {
    unlink(r);
    recs_[n].pages += recs_[r].pages;
    recs_[n].right = recs_[r].right;
    if (recs_[r].right != kNil) recs_[recs_[r].right].left = n;
    else last_ = n;
    spare_.push_back(r);
  }
  link(n);
}

uint64_t PageAllocator::largest_free() const {
  if (!top_) return 0;
  const int g = 63 - std::countl_zero(top_);
  const int bin = g * 8 + std::bit_width(unsigned{leaf_[g]}) - 1;
  uint64_t best = 0;
  for (Node n = heads_[bin]; n != kNil; n = recs_[n].bin_next) best = std::max(best, recs_[n].pages);
  return best;
}

std::vector<PageAllocator::Block> PageAllocator::blocks() const {
  std::vector<Block> out;
  for (Node n = last_; n != kNil; n = recs_[n].left) out.push_back({recs_[n].first, recs_[n].pages, recs_[n].used});
  return {out.rbegin(), out.rend()};
}

}  // namespace mcr
