"""Columns out of a block: which bytes a selection of rows needs, and what they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mooncake_ray.data import kernels
from mooncake_ray.data.bits import from_bytes, named_dtype
from mooncake_ray.data.block import fill
from mooncake_ray.data.block.families import Family
from mooncake_ray.data.block.index import Field, Index
from mooncake_ray.data.block.plain import kind_of, one_of, width_of
from mooncake_ray.data.block.read import Read, Runs, Steps, offsets_of, together
from mooncake_ray.data.kernels import Cells
from mooncake_ray.errors import CorruptBlockError

__all__ = ["Dense", "RaggedRows", "children", "dense", "ragged", "widened"]


@dataclass(frozen=True, slots=True)
class Dense:
    """Rows of numbers: the bytes of a row-major array (uint8), its dtype and its shape."""

    data: np.ndarray
    dtype: str
    shape: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """The same memory as a tensor.

        Raises:
            CorruptBlockError: torch has no such dtype.
        """
        dtype = named_dtype(self.dtype)
        if dtype is None:
            raise CorruptBlockError(f"a tensor is said to be of {self.dtype}")
        return from_bytes(self.data, dtype, self.shape)


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Rows of different lengths: row r is values[offsets[r]:offsets[r + 1]]."""

    values: Dense
    offsets: np.ndarray


def dense(index: Index, field: Field, rows: Runs) -> Steps[Dense]:
    """The selected rows of a dense or padded column, as it was."""
    node = field.node
    kind, dtype, tail = node["kind"], node["dtype"], tuple(node["shape"])
    shape = (rows.total, *tail)
    if kind == "part":
        return (yield from _part(index, field, rows, shape))
    if kind == "const":
        (value,) = yield [Read(node["value"], Runs.span(0, _cell(dtype, tail)))]
        return Dense(_repeated(value, math.prod(shape[:2])), dtype, shape)
    if kind == "dense":
        per = math.prod(tail)
        values, wire = yield from fill.read_items(node, rows.scaled(per))
        return Dense(widened(values, wire, dtype, rows.total * per), dtype, shape)
    return (yield from _padded(index.family(node["family"]), 0, node, rows, shape))


def _part(index: Index, field: Field, rows: Runs, shape: tuple[int, ...]) -> Steps[Dense]:
    node, base = field.node, index.base(field.name)
    first, width = node["first"], shape[1] if len(shape) > 1 else 1
    kind, full = base.node["kind"], base.node["shape"][0] if len(shape) > 1 else 1
    if kind == "const" or full == width:
        like = Field(field.name, field.form, {**base.node, "shape": node["shape"]}, base.buffers)
        return (yield from dense(index, like, rows))
    if not 0 <= first <= full - width:
        raise CorruptBlockError(f"field {field.name!r} is said to begin at column {first} of {base.name!r}, which has {full}")
    if kind == "dense":
        per = math.prod(shape[2:])
        at = Runs(rows.positions() * full + first, np.full(rows.total, width, np.int64)).scaled(per)
        values, wire = yield from fill.read_items(base.node, at)
        return Dense(widened(values, wire, node["dtype"], math.prod(shape)), node["dtype"], shape)
    if base.node["fill"] in ("values", "ones", "row"):
        return (yield from _padded(index.family(base.node["family"]), first, base.node, rows, shape))
    whole = yield from dense(index, base, rows)
    cell = _cell(node["dtype"], tuple(node["shape"]))
    grid = whole.data.reshape(rows.total, full * cell)[:, first * cell : (first + width) * cell]
    return Dense(np.ascontiguousarray(grid).reshape(-1), node["dtype"], shape)


def _padded(family: Family, first: int, node: dict[str, Any], rows: Runs, shape: tuple[int, ...]) -> Steps[Dense]:
    """Columns first … first + shape[1] - 1 of a padded column."""
    dtype, item = node["dtype"], width_of(node["dtype"])
    cell = _cell(dtype, shape[1:])
    chosen, values_at = _choose(family, first, rows, shape[1])
    out = kernels.empty(math.prod(shape) * item)
    grid = Cells(out.ctypes.data, rows.total, shape[1], shape[1] * cell, cell)
    filled, per = node["fill"], cell // item if item else 1
    around = _pads(node.get("pad", ""), rows, cell)
    (pad, pads, which), (got, wire) = yield from together([around, _content(node, rows, values_at.scaled(per), cell)])
    if filled == "values":
        _check_bytes(got, wire, chosen.total * per)
        if per > 1 and pad != pad[:item] * per:  # a pad that differs along the tail: positions are placed, not numbers
            values = widened(got, wire, dtype, chosen.total * per)
            kernels.unpack(values.ctypes.data, chosen.offsets, chosen.starts, grid, pad)
        else:
            numbers = Cells(grid.address, rows.total, shape[1] * per, grid.stride, item)
            fill.write_items(got, wire, dtype, chosen.offsets * per, chosen.starts * per, numbers, pad[:item])
    elif filled == "positions":
        kernels.fill_positions(grid, chosen.starts, chosen.lengths)
    elif filled == "ones":
        kernels.fill_spans(grid, chosen.starts, chosen.lengths, np.tile(_one(dtype), (rows.total, 1)), pad)
    else:
        each = fill.check_rows(got, rows.total, cell, "a column of one value a row")
        if filled == "row":
            kernels.fill_spans(grid, chosen.starts, chosen.lengths, each, pad)
        else:
            kernels.fill_last(grid, chosen.starts, chosen.lengths, each)
    if pads is not None:
        fill.repad(grid, chosen, pads, which)
    return Dense(out, dtype, shape)


def _content(node: dict[str, Any], rows: Runs, numbers: Runs, cell: int) -> Steps[tuple[np.ndarray, str]]:
    """The bytes that a fill is stored as, and for `values` their dtype."""
    filled = node["fill"]
    if filled == "values":
        return (yield from fill.read_items(node, numbers))
    if filled in ("ones", "positions"):
        return np.empty(0, np.uint8), ""
    if filled not in ("row", "last"):
        raise CorruptBlockError(f"a column is said to be filled with {filled!r}")
    (got,) = yield [Read.items(node["at"], rows, cell)]
    return got, ""


def _pads(stored: str | list[Any], rows: Runs, cell: int) -> Steps[tuple[bytes, np.ndarray | None, np.ndarray | None]]:
    """What is around the spans; and where the rows differ in it all there is, uint8 (pads, cell), and which each row has."""
    if isinstance(stored, str):
        return bytes.fromhex(stored), None, None
    pads = np.frombuffer(bytes.fromhex(stored[0]), np.uint8).reshape(-1, cell)
    (which,) = yield [Read(stored[1], rows)]
    if which.size and which.max() >= len(pads):
        raise CorruptBlockError(f"a row is said to have pad {which.max()} of {len(pads)}")
    return pads[0].tobytes(), pads, which


def _choose(family: Family, first: int, rows: Runs, width: int) -> tuple[Family, Runs]:
    """The selected rows of a family, and which of its values they have."""
    at = rows.positions()
    if first == 0 and width == family.width:
        chosen = Family(family.lengths[at], family.starts[at], width)
        return chosen, children(family.offsets, rows)
    cut = family.cut(first, width)
    chosen = Family(cut.lengths[at], cut.starts[at], width)
    skipped = np.maximum(first - family.starts[at], 0)
    return chosen, _joined(Runs(family.offsets[at] + skipped, chosen.lengths))


def children(offsets: np.ndarray, rows: Runs) -> Runs:
    """The values of the selected rows: a run of rows is one of values."""
    starts = offsets[rows.starts]
    return Runs(starts, offsets[rows.starts + rows.lengths] - starts)


def _joined(runs: Runs) -> Runs:
    """The same positions in fewer runs: empty ones left out, adjacent ones joined."""
    keep = runs.lengths > 0
    starts, lengths = runs.starts[keep], runs.lengths[keep]
    if not len(starts):
        return Runs.span(0, 0)
    first = np.flatnonzero(np.concatenate(([True], starts[1:] != starts[:-1] + lengths[:-1])))
    return Runs(starts[first], np.add.reduceat(lengths, first))


def ragged(index: Index, field: Field, rows: Runs) -> Steps[RaggedRows]:
    """The selected rows of a column that has a length family, without what is around them."""
    node = field.node
    first, width = 0, -1
    if node["kind"] == "part":
        base = index.base(field.name).node
        first, width = node["first"], node["shape"][0]
        node = {**base, "shape": node["shape"]}
    elif "of" in node:
        return (yield from _side(index, field, rows))
    family = index.family(node["family"])
    tail = tuple(node["tail"] if node["kind"] == "ragged" else node["shape"][1:])
    dtype, cell = node["dtype"], _cell(node["dtype"], (1, *tail))
    chosen, values_at = _choose(family, first, rows, family.width if width < 0 else width)
    total, shape = chosen.total, (chosen.total, *tail)
    filled = node["fill"]
    got, wire = yield from _content(node, rows, values_at.scaled(math.prod(tail)), cell)
    if filled == "values":
        return RaggedRows(Dense(widened(got, wire, dtype, total * math.prod(tail)), dtype, shape), chosen.offsets)
    out = kernels.empty(total * cell)
    flat = Cells(out.ctypes.data, rows.total, 0, 0, cell)
    starts = chosen.offsets[:-1]
    if filled == "positions":
        kernels.fill_positions(flat, starts, chosen.lengths)
        if first > 0:  # a part that begins in the middle of the span
            out.view(dtype)[:] += np.repeat(np.maximum(first - family.starts[rows.positions()], 0), chosen.lengths).astype(dtype)
    elif filled == "ones":
        kernels.fill_spans(flat, starts, chosen.lengths, np.tile(_one(dtype), (rows.total, 1)), bytes(cell))
    else:
        each = fill.check_rows(got, rows.total, cell, f"field {field.name!r}")
        if filled == "row":
            kernels.fill_spans(flat, starts, chosen.lengths, each, bytes(cell))
        else:
            skipped = np.maximum(first - family.starts[rows.positions()], 0) if first > 0 else 0
            ends_here = chosen.lengths == family.lengths[rows.positions()] - skipped  # a part may end before the last position
            kernels.fill_last(flat, starts, chosen.lengths, np.where(ends_here[:, None], each, 0).astype(np.uint8))
    return RaggedRows(Dense(out, dtype, shape), chosen.offsets)


def _side(index: Index, field: Field, rows: Runs) -> Steps[RaggedRows]:
    """A ragged column whose rows are one side of another's."""
    base, at = index.base(field.name).node, rows.positions()
    whole, own = index.family(base["family"]), index.family(field.node["family"])
    skipped = whole.lengths[at] - own.lengths[at]
    if base["kind"] != "ragged" or base["fill"] != "values" or (skipped < 0).any():
        raise CorruptBlockError(f"field {field.name!r} is said to be part of {field.node['of']!r}, whose rows are shorter or not stored")
    starts = whole.offsets[at] + (skipped if field.node["side"] == "right" else 0)
    per, dtype, tail = math.prod(base["tail"]), base["dtype"], tuple(base["tail"])
    lengths = own.lengths[at]
    got, wire = yield from fill.read_items(base, _joined(Runs(starts, lengths)).scaled(per))
    total = int(lengths.sum())
    return RaggedRows(Dense(widened(got, wire, dtype, total * per), dtype, (total, *tail)), offsets_of(lengths))


def _cell(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of one position of the second dimension."""
    return width_of(dtype) * math.prod(shape[1:])


def _one(dtype: str) -> np.ndarray:
    one = one_of(dtype, width_of(dtype))
    if one is None:
        raise CorruptBlockError(f"a column of {dtype} is said to be a mask")
    return np.frombuffer(one, np.uint8)


def _repeated(value: np.ndarray, times: int) -> np.ndarray:
    out = kernels.empty(value.nbytes * times)
    if value.nbytes:
        out.reshape(times, value.nbytes)[:] = value
    return out


def _check_bytes(values: np.ndarray, wire: str, count: int) -> None:
    if values.nbytes != count * width_of(wire):
        raise CorruptBlockError(f"a column has {values.nbytes} bytes, expected {count} numbers of {wire}")


def widened(values: np.ndarray, wire: str, dtype: str, count: int) -> np.ndarray:
    """Stored numbers in the dtype they had: as they are, or widened into memory of their own."""
    _check_bytes(values, wire, count)
    if wire == dtype:
        return values
    item = width_of(dtype)
    out = kernels.empty(count * item)
    row = Cells(out.ctypes.data, 1, count, count * item, item)
    ends = np.array([0, count], np.int64)
    kernels.unpack_ints(values.ctypes.data, width_of(wire), kind_of(wire) == "int", ends, ends[:1], row, bytes(item))
    return out
