"""Tensor columns, and arrays of numbers: the nodes of a block that hold them.

Every dense column is looked at as a grid of positions, rows x width, each position with a tail of numbers. Which positions hold data is told
by the masks among the columns (`families`); a column that has the same bits everywhere else is stored without them. What another column
holds already is not stored again. Each of these is proved for every bit before it is relied on; where no proof succeeds the column is
stored whole. Nothing depends on the names of columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mooncake_ray.data import kernels
from mooncake_ray.data.block import fill
from mooncake_ray.data.block.chunk import Builder
from mooncake_ray.data.block.families import Families, Family
from mooncake_ray.data.block.plain import Plain, kind_of, one_of
from mooncake_ray.data.kernels import Cells

__all__ = ["ColumnEncoder"]

_TRIMMED = 0.9  # of a column's positions: if more are left without its pad, it is not worth lengths of its own


class ColumnEncoder:
    """Encodes the dense and ragged columns of one batch, all with the same rows. Used once, by one thread."""

    def __init__(self, rows: int, out: Builder) -> None:
        self.rows, self.out = rows, out
        self.families = Families()
        self._dense: dict[str, Plain] = {}
        self._ragged: dict[str, tuple[Plain, Family]] = {}
        self._starts = np.zeros(rows, np.int64)

    def dense(self, columns: Mapping[str, Plain]) -> dict[str, dict[str, Any]]:
        """Nodes of dense columns, by name, in the order in which their buffers were added."""
        nodes: dict[str, dict[str, Any]] = {}
        masks = {name: plain for name, plain in columns.items() if _may_be_mask(plain)}
        for name, plain in sorted(masks.items(), key=lambda entry: -entry[1].width):
            with self.out.column(name):
                node = self._mask(plain)
            if node is not None:
                nodes[name] = node
        rest = [name for name in columns if name not in nodes]
        for name in sorted(rest, key=lambda name: -columns[name].width):  # parts after what they are parts of
            with self.out.column(name):
                nodes[name] = self._column(columns[name])
            if nodes[name]["kind"] != "part":
                self._dense[name] = columns[name]
        return nodes

    def _mask(self, plain: Plain) -> dict[str, Any] | None:
        one = one_of(plain.dtype, plain.item)
        found = kernels.find_spans(plain.cells, one) if one else None
        if found is None or not found[1].any():
            return None
        starts, lengths = found
        family = self.families.add(Family(lengths, starts, plain.width))
        return {"kind": "padded", **_shape(plain), "family": family, "pad": bytes(plain.cell).hex(), "fill": "ones"}

    def _column(self, plain: Plain) -> dict[str, Any]:
        shape = _shape(plain)
        if not plain.rows or not math.prod(plain.shape):
            return {"kind": "dense", **shape, "wire": plain.dtype, "at": self.out.add(np.empty(0, np.uint8))}
        first = _bytes_at(plain.address, plain.cell)
        if plain.rows > 1 and kernels.all_equal(plain.cells, first):
            return {"kind": "const", **shape, "value": self.out.add(np.frombuffer(first, np.uint8))}
        for name, other in self._dense.items():
            if (part := _part_of(plain, other)) is not None:
                return {"kind": "part", **shape, "of": name, "first": part}
        if plain.width > 1:
            for number in self.families.of_width(plain.width):
                node = self._padded(plain, number)
                if node is not None:
                    return node
            if (node := self._trimmed(plain)) is not None:
                return node
        whole = fill.Spans(plain, plain.stride, plain.rows, self._starts, np.full(plain.rows, plain.width, np.int64))
        return {"kind": "dense", **shape, **fill.encode_items(whole, self.out)}

    def _padded(self, plain: Plain, number: int) -> dict[str, Any] | None:
        """A node without what is around the spans of a family; None if that differs, or nothing is saved."""
        family = self.families.all[number]
        if family.total == plain.rows * plain.width:
            return None
        node = {"kind": "padded", **_shape(plain), "family": number}
        cells = plain.cells
        if plain.dtype in ("int32", "int64") and not plain.tail and kernels.is_positions(cells, family.starts, family.lengths):
            return {**node, "fill": "positions"}
        pad = _bytes_at(_first_outside(plain, family), plain.cell)
        spans = fill.Spans(plain, plain.stride, plain.rows, family.starts, family.lengths)
        if kernels.outside_is(cells, family.starts, family.lengths, pad):
            return {**node, "pad": pad.hex(), **fill.encode(spans, self.out, pad)}
        pads = fill.pads_of(cells, family)
        if pads is None:
            return None
        kinds, which = pads
        return {**node, "pad": [kinds.tobytes().hex(), self.out.add(which)], **fill.encode(spans, self.out, b"\1")}

    def _trimmed(self, plain: Plain) -> dict[str, Any] | None:
        """A node without a pad that the rows themselves end or begin with, where no mask says so; None if that saves little."""
        cells = plain.cells
        for position in (plain.width - 1, 0):
            pad = _commonest(plain, position)
            starts, lengths = kernels.trim(cells, pad)
            if lengths.sum() <= _TRIMMED * plain.rows * plain.width:
                return self._padded(plain, self.families.add(Family(lengths, starts, plain.width, told=False)))
        return None

    def lengths(self, offsets: np.ndarray) -> dict[str, Any]:
        """The part of a ragged node that says how long its rows are: int64 (rows + 1,) offsets."""
        return {"kind": "ragged", "family": self.families.add(Family(np.diff(offsets), self._starts, -1))}

    def ragged(self, name: str, values: Plain, offsets: np.ndarray) -> dict[str, Any]:
        """The node of a column of ragged rows.

        Args:
            values: (total, …) with contiguous rows, so that they are one flat run.
            offsets: int64 (rows + 1,) into `values`.
        """
        starts, lengths = offsets[:-1], np.diff(offsets)
        node = {**self.lengths(offsets), "dtype": values.dtype, "tail": list(values.shape[1:])}
        cell = values.item * math.prod(values.shape[1:])
        flat = Plain(values.owner, values.address, (self.rows, 0, *values.shape[1:]), 0, values.dtype, values.item)
        if not cell:
            return {**node, "fill": "values", "wire": values.dtype, "at": self.out.add(np.empty(0, np.uint8))}
        for other, (its, at) in self._ragged.items():
            if its.dtype == flat.dtype and its.tail == flat.tail and (side := _side_of(flat, starts, lengths, its, at)) is not None:
                return {**node, "of": other, "side": side}
        node.update(fill.encode(fill.Spans(flat, 0, self.rows, starts, lengths), self.out))
        if node["fill"] == "values":
            self._ragged[name] = flat, Family(lengths, starts, -1)
        return node


def _side_of(part: Plain, starts: np.ndarray, lengths: np.ndarray, whole: Plain, at: Family) -> str | None:
    """On which side of another column's rows this one's are found, bit by bit; `left` for the same."""
    if (lengths > at.lengths).any() or not lengths.any():
        return None
    mine = None
    for side, first in (("left", at.starts), ("right", at.starts + at.lengths - lengths)):
        row = int(np.argmax(lengths > 0))
        if _span(part, starts[row], 1) != _span(whole, first[row], 1):
            continue
        mine = _packed(part, starts, lengths) if mine is None else mine
        its = _packed(whole, first, lengths)
        if kernels.rows_equal(*(Cells(c.ctypes.data, 1, c.nbytes, c.nbytes, 1) for c in (mine, its))):
            return side
    return None


def _span(plain: Plain, first: int, length: int) -> bytes:
    return _bytes_at(plain.address + int(first) * plain.cell, length * plain.cell)


def _packed(plain: Plain, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    out = kernels.empty(int(lengths.sum()) * plain.cell)
    kernels.pack(Cells(plain.address, len(starts), 0, 0, plain.cell), np.ascontiguousarray(starts), lengths, out.ctypes.data)
    return out


def _shape(plain: Plain) -> dict[str, Any]:
    return {"dtype": plain.dtype, "shape": list(plain.shape[1:])}


def _may_be_mask(plain: Plain) -> bool:
    return len(plain.shape) == 2 and plain.width > 1 and kind_of(plain.dtype) in ("bool", "int", "uint")


def _part_of(plain: Plain, other: Plain) -> int | None:
    """At which position of another column's rows this column's are found, bit by bit."""
    if plain.dtype != other.dtype or plain.tail != other.tail or len(plain.shape) != len(other.shape) or plain.width > other.width:
        return None
    for first in dict.fromkeys((0, other.width - plain.width)):
        cells = Cells(other.address + first * other.cell, other.rows, plain.width, other.stride, other.cell)
        if (cells.address == plain.address and other.stride == plain.stride) or kernels.rows_equal(plain.cells, cells):
            return first
    return None


def _first_outside(plain: Plain, family: Family) -> int:
    """The address of a position outside the spans. There is one."""
    row = int(np.flatnonzero(family.lengths < plain.width)[0])
    position = 0 if family.starts[row] > 0 or not family.lengths[row] else int(family.lengths[row])
    return plain.address + row * plain.stride + position * plain.cell


def _commonest(plain: Plain, position: int) -> bytes:
    """What most rows have at a position."""
    rows = np.empty(plain.rows, f"V{plain.cell}")
    starts = np.arange(plain.rows) * plain.stride + position * plain.cell
    kernels.gather(plain.address, starts, np.full(plain.rows, plain.cell), rows.ctypes.data)
    found, counts = np.unique(rows, return_counts=True)
    return found[counts.argmax()].tobytes()


def _bytes_at(address: int, nbytes: int) -> bytes:
    """The bytes at an address."""
    out = np.empty(nbytes, np.uint8)
    kernels.gather(address, np.zeros(1, np.int64), np.full(1, nbytes, np.int64), out.ctypes.data)
    return out.tobytes()
