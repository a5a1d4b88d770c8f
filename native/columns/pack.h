// Spans of cells, one after the other.
#pragma once
#include "columns/cells.h"

namespace mcr {

void pack(const Cells& cells, const Spans& spans, std::byte* to);
// Integers of 1, 2, 4 or 8 bytes, of which the low `to_item` bytes are kept (1, 2, 4, 8; at most the item).
void pack_ints(const Cells& cells, const Spans& spans, std::byte* to, int64_t to_item);
// A bit for each item of 1, 2, 4 or 8 bytes, first bit lowest: whether it is not 0. Bits after the last are 0.
void pack_bits(const Cells& cells, const Spans& spans, std::byte* to);
// n ranges of bytes, one after the other.
void gather(const std::byte* source, const int64_t* starts, const int64_t* lengths, int64_t n, std::byte* to);

}  // namespace mcr
