// What holds of cells bit for bit, so that they need not be stored. Each stops as soon as it is known not to hold.
#pragma once
#include <optional>
#include <utility>

#include "columns/cells.h"

namespace mcr {

// Each row is one run of items with the bits `one` among items of zeros. Writes its span; 0, 0 for a row of zeros.
bool find_spans(const Cells& cells, const std::byte* one, int64_t* starts, int64_t* lengths);
// Writes the shortest span of each row outside of which all items have the bits `pad`; 0, 0 for a row of them only. Always true.
bool trim(const Cells& cells, const std::byte* pad, int64_t* starts, int64_t* lengths);
// Every item outside the spans has these bits.
bool outside_is(const Cells& cells, const Spans& spans, const std::byte* pad);
// In each span all items have the same bits. Writes them, rows x item bytes; zeros for an empty span.
bool inside_constant(const Cells& cells, const Spans& spans, std::byte* values);
// All items are zeros except the last of each span, which may be. Writes those, rows x item bytes; zeros for an empty span.
bool last_hot(const Cells& cells, const Spans& spans, std::byte* values);
// Integers of 4 or 8 bytes: 0 before the span, 0 … length - 1 inside, length - 1 after it (0 if it is empty).
bool is_positions(const Cells& cells, const Spans& spans);
// Integers of 1, 2, 4 or 8 bytes: 0 … length - 1 inside the span.
bool is_arange(const Cells& cells, const Spans& spans);
// The same bits. Rows, width and item must be the same.
bool rows_equal(const Cells& a, const Cells& b);
bool all_equal(const Cells& cells, const std::byte* value);
// Least and largest of the integers (1, 2, 4, 8 bytes) inside the spans, as their bits sign- or zero-extended. Nothing if there are none.
std::optional<std::pair<uint64_t, uint64_t>> int_range(const Cells& cells, bool is_signed, const Spans& spans);

}  // namespace mcr
