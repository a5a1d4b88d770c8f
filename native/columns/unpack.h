// Cells from what is known of them: packed values, or a value for each row. Every item of the cells is written (with stride 0: of the spans).
#pragma once
#include "columns/cells.h"

namespace mcr {

// Row r gets the values offsets[r] … offsets[r + 1] - 1 from its column starts[r] on, and `pad` elsewhere.
struct Ragged {
  const int64_t* offsets;  // rows + 1
  const int64_t* starts;   // rows
};

void unpack(const std::byte* values, const Ragged& ragged, const Cells& cells, const std::byte* pad);
// Values of `from_item` bytes are widened to the item, with their sign or with zeros. 1, 2, 4 or 8 bytes both.
void unpack_ints(const std::byte* values, int64_t from_item, bool from_signed, const Ragged& ragged, const Cells& cells, const std::byte* pad);
// Values are bits from bit `bit` of a bit string on; the item is of 1, 2, 4 or 8 bytes.
void unpack_bits(const std::byte* values, int64_t bit, const Ragged& ragged, const Cells& cells, const std::byte* one, const std::byte* zero,
                 const std::byte* pad);
// Row r has the item inside[r] (rows x item bytes) in its span, and `outside` elsewhere.
void fill_spans(const Cells& cells, const Spans& spans, const std::byte* inside, const std::byte* outside);
// Zeros, and values[r] as the last item of the span (none if it is empty).
void fill_last(const Cells& cells, const Spans& spans, const std::byte* values);
// Integers of 1, 2, 4 or 8 bytes: 0 before the span, 0 … length - 1 inside, length - 1 after it (0 if it is empty).
void fill_positions(const Cells& cells, const Spans& spans);

}  // namespace mcr
