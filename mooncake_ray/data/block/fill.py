"""What the spans of a column hold: the part that padded and ragged columns share.

A span is the data of one row. What it holds is stored as little as can be proved bit by bit:

* `ones`: nothing is stored (a mask);
* `positions`: 0, 1, 2, …: nothing is stored;
* `row`: one value a row, as advantages often are;
* `last`: zeros but for the last position, one value a row, as rewards often are;
* `values`: everything, integers in the narrowest dtype that holds them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_ray.data import kernels
from mooncake_ray.data.block.chunk import Builder, Chunk
from mooncake_ray.data.block.families import Family
from mooncake_ray.data.block.node import bits
from mooncake_ray.data.block.plain import Plain, kind_of, one_of, width_of, wire_of
from mooncake_ray.data.block.read import Read, Runs, Steps
from mooncake_ray.data.kernels import Cells
from mooncake_ray.errors import CorruptBlockError

__all__ = ["Spans", "check_rows", "encode", "encode_items", "read_items", "write_items"]


@dataclass(frozen=True, slots=True)
class Spans:
    """The data of a column's rows: positions starts[r] … starts[r] + lengths[r] - 1 of each. Stride 0: rows of one flat run of values."""

    plain: Plain
    stride: int
    rows: int
    starts: np.ndarray
    lengths: np.ndarray

    @property
    def width(self) -> int:
        return self.plain.width if self.stride else 0

    def cells(self) -> Cells:
        """Positions with their tails."""
        return Cells(self.plain.address, self.rows, self.width, self.stride, self.plain.cell)

    def items(self) -> tuple[Cells, np.ndarray, np.ndarray]:
        """Single numbers, and where they start and how many they are."""
        per = self.plain.cell // self.plain.item if self.plain.item else 1
        cells = Cells(self.plain.address, self.rows, self.width * per, self.stride, self.plain.item)
        return (cells, self.starts, self.lengths) if per == 1 else (cells, self.starts * per, self.lengths * per)


def encode(spans: Spans, out: Builder, pad: bytes | None = None) -> dict[str, Any]:
    """The part of a node that says what the spans hold.

    Args:
        pad: what is around the spans, and has been proved to be; None where nothing is, not zero where it differs between rows.
    """
    plain, cells = spans.plain, spans.cells()
    if int(spans.lengths.sum()) > spans.rows:  # else one value a row is no less than all of them
        value = kernels.inside_constant(cells, spans.starts, spans.lengths)
        if value is not None:
            one = one_of(plain.dtype, plain.item)
            ones = one is not None and not plain.tail and (value[spans.lengths > 0] == np.frombuffer(one, np.uint8)).all()
            return {"fill": "ones"} if ones else {"fill": "row", "at": out.add(value)}
        if pad is None and not plain.tail and plain.dtype in ("int32", "int64") and kernels.is_arange(cells, spans.starts, spans.lengths):
            return {"fill": "positions"}
        if not any(pad or b""):
            value = kernels.last_hot(cells, spans.starts, spans.lengths)
            if value is not None:
                return {"fill": "last", "at": out.add(value)}
    return {"fill": "values", **encode_items(spans, out)}


def encode_items(spans: Spans, out: Builder) -> dict[str, Any]:
    """Stores every number of the spans, integers narrowed."""
    plain = spans.plain
    cells, starts, lengths = spans.items()
    count = int(lengths.sum())
    kind = kind_of(plain.dtype)
    wire = plain.dtype
    if kind == "bool":
        wire = "bits" if _is_bool(cells, starts, lengths) else wire
    elif kind in ("int", "uint"):
        found = kernels.int_range(cells, kind == "int", starts, lengths)
        wire = wire_of(*found, plain.dtype, plain.item) if found else "bits"
    if wire == "bits":
        chunk = Chunk(-(-count // 8), plain.owner, write=lambda to: kernels.pack_bits(cells, starts, lengths, to))
    elif wire != plain.dtype:
        item = width_of(wire)
        chunk = Chunk(count * item, plain.owner, write=lambda to: kernels.pack_ints(cells, starts, lengths, to, item))
    elif (flat := _one_run(cells, starts, lengths)) is not None:
        chunk = Chunk(count * plain.item, plain.owner, address=flat)
    else:
        chunk = Chunk(count * plain.item, plain.owner, write=lambda to: kernels.pack(cells, starts, lengths, to))
    return {"wire": wire, "at": out.add(chunk)}


def _is_bool(cells: Cells, starts: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether the bytes of a bool column are all 0 or 1; a view of other bytes as bool may hold anything."""
    found = kernels.int_range(cells, False, starts, lengths)
    return found is None or found[1] <= 1


def _one_run(cells: Cells, starts: np.ndarray, lengths: np.ndarray) -> int | None:
    """The address of the spans, if they follow on each other without a gap."""
    if not len(starts):
        return cells.address
    at = starts * cells.item + np.arange(len(starts)) * cells.stride
    gapless = (at[1:] == at[:-1] + lengths[:-1] * cells.item).all()
    return cells.address + int(at[0]) if gapless else None


def pads_of(cells: Cells, family: Family) -> tuple[np.ndarray, np.ndarray] | None:
    """The few pads of a column whose rows each have one around their span, as 0.0 and -0.0.

    Returns uint8 (pads, item), and which of them each row has, uint8 (rows,).
    None where a row has several, or the rows more than 256.
    """
    ends = family.starts + family.lengths
    before = kernels.inside_constant(cells, np.zeros_like(ends), family.starts)
    after = before if before is None else kernels.inside_constant(cells, ends, family.width - ends)
    if before is None or after is None:
        return None
    both = (family.starts > 0) & (ends < family.width)
    if not np.array_equal(before[both], after[both]):
        return None
    pads = np.where((family.starts > 0)[:, None], before, after)
    kinds, which = np.unique(pads.view(f"V{cells.item}").reshape(-1), return_inverse=True)
    return (kinds.view(np.uint8).reshape(-1, cells.item), which.astype(np.uint8)) if len(kinds) <= 256 else None


# ---- the way back


def repad(grid: Cells, family: Family, pads: np.ndarray, which: np.ndarray) -> None:
    """Gives the rows that do not have the first pad their own, around their spans."""
    rows = np.flatnonzero(which)
    first = rows * grid.width
    ends = first + family.starts[rows] + family.lengths[rows]
    flat = Cells(grid.address, len(rows), 0, 0, grid.item)  # of which only spans are written
    for starts, lengths in ((first, family.starts[rows]), (ends, first + grid.width - ends)):
        if lengths.any():
            kernels.fill_spans(flat, starts, np.ascontiguousarray(lengths), pads[which[rows]], bytes(grid.item))


def read_items(node: dict[str, Any], at: Runs) -> Steps[tuple[np.ndarray, str]]:
    """Fetches numbers that `encode_items` stored: those at the positions `at` of all. Returns their bytes and their dtype; bits as bytes."""
    wire = node["wire"]
    if wire == "bits":
        return (yield from bits(node["at"], at)).view(np.uint8), "uint8"
    (got,) = yield [Read.items(node["at"], at, width_of(wire))]
    return got, wire


def write_items(values: np.ndarray, wire: str, dtype: str, offsets: np.ndarray, starts: np.ndarray, to: Cells, pad: bytes) -> None:
    """Places the numbers of each row at `starts` in a padded grid, and the pad around them. Widens what was narrowed."""
    if wire == dtype:
        kernels.unpack(values.ctypes.data, offsets, starts, to, pad)
    else:
        kernels.unpack_ints(values.ctypes.data, width_of(wire), kind_of(wire) == "int", offsets, starts, to, pad)


def check_rows(values: np.ndarray, rows: int, item: int, what: str) -> np.ndarray:
    """One value a row, uint8 (rows, item)."""
    if values.nbytes != rows * item:
        raise CorruptBlockError(f"{what} has {values.nbytes} bytes for {rows} rows of {item}")
    return values.reshape(rows, item)
