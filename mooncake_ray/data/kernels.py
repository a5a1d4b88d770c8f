"""What is done to every item of a column: proofs of what it is, packing of its spans, and the reverse.

All work on `Cells`, memory that the caller keeps alive and answers for, and on one span a row: `starts` and `lengths` (or `offsets`),
C-contiguous int64 arrays, which are checked. Items are compared by their bits; a bit pattern is `bytes` of one item. Nothing depends on
dtypes but what is said to be of integers, of 1, 2, 4 or 8 bytes. Every function releases the GIL and uses several threads for some MiB; all
may be called from any thread. ValueError for spans outside their row and for sizes that do not match.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mooncake_ray._native import columns

__all__ = [
    "Cells",
    "all_equal",
    "empty",
    "fill_last",
    "fill_positions",
    "fill_spans",
    "find_spans",
    "gather",
    "inside_constant",
    "int_range",
    "is_arange",
    "is_positions",
    "last_hot",
    "outside_is",
    "pack",
    "pack_bits",
    "pack_ints",
    "rows_equal",
    "trim",
    "unpack",
    "unpack_bits",
    "unpack_ints",
]

_PAGES_FROM = 1 << 20  # bytes: half a huge page


class Cells(NamedTuple):
    """`rows` x `width` items of `item` bytes at `address`. Items of a row are adjacent, rows are `stride` bytes apart.

    With stride 0 the rows are ragged: row r is its span and nothing else, lengths[r] items that begin at address + starts[r] * item; nothing
    lies outside, and the width does not count. (Where no spans are given, stride 0 means that all rows are the same memory.)
    """

    address: int
    rows: int
    width: int
    stride: int
    item: int


def find_spans(cells: Cells, one: bytes) -> tuple[np.ndarray, np.ndarray] | None:
    """Starts and lengths (rows,), int64, where every row is one run of the item `one` among items of zero bits, else None.

    A row of zeros has start 0 and length 0.
    """
    return columns.find_spans(cells, one)


def trim(cells: Cells, pad: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths (rows,), int64, of the shortest spans outside of which every item has the bits `pad`.

    0 and 0 for a row of nothing else.
    """
    return columns.trim(cells, pad)


def outside_is(cells: Cells, starts: np.ndarray, lengths: np.ndarray, pad: bytes) -> bool:
    """Whether every item outside the spans has the bits `pad`."""
    return columns.outside_is(cells, starts, lengths, pad)


def inside_constant(cells: Cells, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
    """The one item that each span consists of, uint8 (rows, item), zeros for an empty span; None if any consists of several."""
    return columns.inside_constant(cells, starts, lengths)


def last_hot(cells: Cells, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
    """The last item of each span, uint8 (rows, item), zeros for an empty span; None if any other item of the rows is not of zero bits."""
    return columns.last_hot(cells, starts, lengths)


def is_positions(cells: Cells, starts: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether the integers are 0 before each span, 0 … length - 1 inside and length - 1 after it (0 if it is empty)."""
    return columns.is_positions(cells, starts, lengths)


def is_arange(cells: Cells, starts: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether the integers inside each span are 0 … length - 1."""
    return columns.is_arange(cells, starts, lengths)


def rows_equal(a: Cells, b: Cells) -> bool:
    """Whether all bits are the same. ValueError if rows, width or item are not."""
    return columns.rows_equal(a, b)


def all_equal(cells: Cells, value: bytes) -> bool:
    """Whether every item has these bits; True for no items."""
    return columns.all_equal(cells, value)


def int_range(cells: Cells, signed: bool, starts: np.ndarray, lengths: np.ndarray) -> tuple[int, int] | None:
    """Least and largest integer inside the spans; None if there are none."""
    return columns.int_range(cells, signed, starts, lengths)


def pack(cells: Cells, starts: np.ndarray, lengths: np.ndarray, to: int) -> None:
    """Copies the spans, one after the other, to the address `to`."""
    columns.pack(cells, starts, lengths, to)


def pack_ints(cells: Cells, starts: np.ndarray, lengths: np.ndarray, to: int, to_item: int) -> None:
    """As `pack`, for integers of which the low `to_item` bytes are kept; whether that is enough, `int_range` says."""
    columns.pack_ints(cells, starts, lengths, to, to_item)


def pack_bits(cells: Cells, starts: np.ndarray, lengths: np.ndarray, to: int) -> None:
    """As `pack`, with a bit for each integer: whether it is not 0. One bit string, low bits first; it ends with zeros."""
    columns.pack_bits(cells, starts, lengths, to)


def gather(source: int, starts: np.ndarray, nbytes: np.ndarray, to: int) -> None:
    """Copies the bytes [source + starts[i], source + starts[i] + nbytes[i]), one range after the other, to the address `to`."""
    columns.gather(source, starts, nbytes, to)


def unpack(values: int, offsets: np.ndarray, starts: np.ndarray, cells: Cells, pad: bytes) -> None:
    """Writes every item of the cells: row r gets the packed items offsets[r] … offsets[r + 1] - 1 from column starts[r] on, else `pad`.

    Args:
        values: Address of packed item 0.
        offsets: (rows + 1,).
        starts: (rows,). With stride 0, where each row begins, in items from the cells' address.
    """
    columns.unpack(values, offsets, starts, cells, pad)


def unpack_ints(values: int, from_item: int, from_signed: bool, offsets: np.ndarray, starts: np.ndarray, cells: Cells, pad: bytes) -> None:
    """As `unpack`, from integers of `from_item` bytes, widened with their sign or with zeros."""
    columns.unpack_ints(values, from_item, from_signed, offsets, starts, cells, pad)


def unpack_bits(
    values: int, bit_offset: int, offsets: np.ndarray, starts: np.ndarray, cells: Cells, one: bytes, zero: bytes, pad: bytes
) -> None:
    """As `unpack`, from bits (low bits first, bit 0 is `bit_offset` bits after the address `values`): each becomes `one` or `zero`."""
    columns.unpack_bits(values, bit_offset, offsets, starts, cells, one, zero, pad)


def fill_spans(cells: Cells, starts: np.ndarray, lengths: np.ndarray, inside: np.ndarray, outside: bytes) -> None:
    """Writes every item: inside[r] (uint8, (rows, item)) in the span of row r, `outside` elsewhere."""
    columns.fill_spans(cells, starts, lengths, inside, outside)


def fill_last(cells: Cells, starts: np.ndarray, lengths: np.ndarray, values: np.ndarray) -> None:
    """Writes every item: values[r] (uint8, (rows, item)) as the last of each span, zero bits elsewhere."""
    columns.fill_last(cells, starts, lengths, values)


def fill_positions(cells: Cells, starts: np.ndarray, lengths: np.ndarray) -> None:
    """Writes every integer: what `is_positions` tests for."""
    columns.fill_positions(cells, starts, lengths)


def empty(nbytes: int) -> np.ndarray:
    """A uint8 array (nbytes,) of undefined contents, writable, for bytes that come next.

    A large one is in huge pages where there are any; when it dies, its memory is kept for the next of about that size (256 MiB at most in a
    process, which the kernel may take back).
    """
    if nbytes < _PAGES_FROM:
        return np.empty(nbytes, np.uint8)
    return np.frombuffer(columns.Pages(nbytes), np.uint8)
