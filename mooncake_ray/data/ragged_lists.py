"""`Ragged` from and to lists: of tensors, or of Python numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from mooncake_ray._native import lists
from mooncake_ray.data import kernels, ragged_rows
from mooncake_ray.data.bits import dtype_name, from_bytes
from mooncake_ray.data.exact import INTEGERS, converted
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.errors import SchemaError

__all__ = ["from_lists", "from_tensors", "to_list", "to_lists"]


def from_tensors(rows: Sequence[Any], dtype: torch.dtype | None, ragged_dim: int) -> Ragged:
    """See `Ragged.from_tensors`."""
    if any(isinstance(row, list | tuple) for row in rows):
        return _outer(rows, lambda inner: from_tensors(inner, dtype, ragged_dim))
    parts, lengths, first = [], [], None
    for number, row in enumerate(rows):
        if row is None:
            lengths.append(0)
            continue
        if not isinstance(row, torch.Tensor):
            raise SchemaError(f"row {number} is a {type(row).__name__}, expected a torch.Tensor or None")
        if not 0 <= ragged_dim < row.ndim:
            raise SchemaError(f"row {number} has the shape {tuple(row.shape)}, expected more than {ragged_dim} dimensions")
        items = row.movedim(ragged_dim, 0) if ragged_dim else row
        first = items if first is None else first
        if dtype is None and row.dtype != first.dtype:
            raise SchemaError(f"row {number} is {row.dtype}, expected {first.dtype} as the rows before")
        if items.shape[1:] != first.shape[1:]:
            raise SchemaError(f"row {number} has items of shape {tuple(items.shape[1:])}, expected {tuple(first.shape[1:])}")
        parts.append(items if dtype is None else _row_as(items, dtype, number))
        lengths.append(len(items))
    if first is None:
        if dtype is None:
            raise SchemaError("there is no row to tell the dtype, expected dtype=")
        if ragged_dim:
            raise SchemaError(f"there is no row to tell the shape, expected ragged_dim=0, got {ragged_dim}")
        parts = [torch.empty(0, dtype=dtype)]
    offsets = ragged_rows.offsets_of(np.array(lengths, np.int64))
    return Ragged(ragged_rows.join_items(parts), offsets, _marks(rows), ragged_dim)


def _row_as(items: torch.Tensor, dtype: torch.dtype, number: int) -> torch.Tensor:
    result, bad = converted(items, dtype)
    if bad is not None:
        value = items.detach().reshape(-1)[bad].item()
        raise SchemaError(f"row {number}: {value!r} ({dtype_name(items.dtype)}) is not exact as {dtype_name(dtype)}")
    return result


def from_lists(rows: Sequence[Any], dtype: torch.dtype | None, levels: int | None) -> Ragged:
    """See `Ragged.from_lists`."""
    for number, row in enumerate(rows):
        if row is not None and not isinstance(row, list | tuple):
            raise SchemaError(f"row {number} is a {type(row).__name__}, expected a list or None")
    plain = [row if type(row) is list or type(row) is tuple else list(row or ()) for row in rows]
    found = lists.scan(plain, True)
    if levels is None:
        levels = 2 if found.flags & (lists.LIST | lists.TUPLE) or found.flags == lists.NONE else 1
    if levels > 1:
        return _outer(rows, lambda inner: from_lists(inner, dtype, levels - 1))
    offsets = ragged_rows.offsets_of(found.lengths)
    return Ragged(_Numbers(plain, found, offsets.numpy()).tensor(dtype), offsets, _marks(rows))


class _Numbers:
    """Lists of Python numbers, on their way to be a tensor."""

    def __init__(self, rows: list[Any], found: lists.Scan, bounds: np.ndarray) -> None:
        self.rows, self.found, self.bounds = rows, found, bounds

    def tensor(self, dtype: torch.dtype | None) -> torch.Tensor:
        """All of them, every one exact in the dtype."""
        flags, numbers = self.found.flags, (lists.BOOL, lists.INT, lists.FLOAT)
        if not flags:
            return torch.empty(0, dtype=dtype or torch.int64)
        if flags & ~sum(numbers):
            raise self._refusal(lambda value: type(value) not in (bool, int, float), lambda value: f"is a {type(value).__name__}")
        if flags == lists.INT:
            made = self._ints(dtype)
        elif flags == lists.FLOAT:
            single = self.found.fits_float32 and dtype in (None, torch.float32)
            made = self._filled(lists.floats_into, torch.float32 if single else torch.float64)
        elif flags == lists.BOOL:
            made = self._filled(lists.bools_into, torch.bool)
        else:
            made = self._mixed(dtype)
        if dtype is None:
            return made
        result, bad = converted(made, dtype)
        if bad is not None:
            raise self._refused(bad, f"is not exact as {dtype_name(dtype)}")
        return result

    def _ints(self, dtype: torch.dtype | None) -> torch.Tensor:
        low, high = self.found.lo, self.found.hi
        if low is not None and dtype in INTEGERS and torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            wire = dtype
        elif low is not None and high < 2**63:
            wire = torch.int64
        elif low is not None and low >= 0 and dtype is not None and dtype.is_floating_point:
            wire = torch.uint64
        else:
            raise self._refusal(
                lambda value: not -(2**63) <= value < 2**63, lambda value: f"does not fit {dtype_name(dtype or torch.int64)}"
            )
        return self._filled(lists.ints_into, wire, wire.itemsize, wire.is_signed)

    def _filled(self, fill: Any, dtype: torch.dtype, *how: Any) -> torch.Tensor:
        raw = kernels.empty(self.found.items * dtype.itemsize)
        if fill is lists.floats_into:
            how = (dtype.itemsize,)
        fill(self.rows, True, raw.ctypes.data, *how, room=self.found.items)
        return from_bytes(raw, dtype, (self.found.items,))

    def _mixed(self, dtype: torch.dtype | None) -> torch.Tensor:
        """Numbers of several types: as doubles, or as integers where no float is among them."""
        flat = list(chain.from_iterable(self.rows))
        if dtype is None:
            first = type(flat[0])
            raise self._refusal(
                lambda value: type(value) is not first,
                lambda value: f"is a {type(value).__name__} next to {first.__name__}s, expected dtype= to say what to convert to",
            )
        if self.found.flags & lists.FLOAT:
            inexact = next((place for place, value in enumerate(flat) if type(value) is int and not _is_double(value)), None)
            if inexact is not None:
                raise self._refused(inexact, "is not exact next to floats")
            return torch.from_numpy(np.array(flat, np.float64))
        return _Numbers([list(map(int, row)) for row in self.rows], self.found, self.bounds)._ints(dtype)

    def _refusal(self, bad: Callable[[Any], bool], why: Callable[[Any], str]) -> SchemaError:
        place, value = next((place, value) for place, value in enumerate(chain.from_iterable(self.rows)) if bad(value))
        return self._refused(place, why(value))

    def _refused(self, place: int, why: str) -> SchemaError:
        row = int(np.searchsorted(self.bounds, place, side="right")) - 1
        item = place - int(self.bounds[row])
        return SchemaError(f"row {row}, item {item}: {self.rows[row][item]!r} {why}")


def _is_double(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _outer(rows: Sequence[Any], inner: Any) -> Ragged:
    """Rows that are lists of rows: the inner ones of all of them, and how many each has."""
    for number, row in enumerate(rows):
        if row is not None and not isinstance(row, list | tuple):
            raise SchemaError(f"row {number} is a {type(row).__name__}, expected a list of rows or None")
    lengths = np.fromiter((0 if row is None else len(row) for row in rows), np.int64, len(rows))
    items = list(chain.from_iterable(row for row in rows if row))
    offsets = ragged_rows.offsets_of(lengths)
    try:
        return Ragged(inner(items), offsets, _marks(rows))
    except SchemaError as error:
        raise SchemaError(f"of the rows of rows, {error}") from None


def _marks(rows: Sequence[Any]) -> torch.Tensor | None:
    valid = np.fromiter((row is not None for row in rows), np.bool_, len(rows))
    return None if valid.all() else torch.from_numpy(valid)


def to_list(column: Ragged) -> list[Any]:
    """See `Ragged.to_list`."""
    return [row.to_list() if isinstance(row, Ragged) else row for row in column]


def to_lists(column: Ragged) -> list[Any]:
    """See `Ragged.to_lists`."""
    if column.ragged_dim:
        return [None if row is None else row.tolist() for row in column]
    rows = _split(column)
    if column.valid is not None:
        for row in (~column.valid).nonzero()[:, 0].tolist():
            rows[row] = None
    return rows


def _split(column: Ragged) -> list[Any]:
    values, offsets = column.values, column.offsets
    if isinstance(values, torch.Tensor) and values.ndim == 1 and ragged_rows.in_memory(values):
        address = values.data_ptr()
        if values.dtype == torch.bool:
            return lists.bools_from(address, offsets.numpy(), False)
        if values.dtype in INTEGERS:
            return lists.ints_from(address, values.itemsize, values.dtype.is_signed, offsets.numpy(), False)
        if values.dtype in (torch.float32, torch.float64):
            return lists.floats_from(address, values.itemsize, offsets.numpy(), False)
    start, stop = column.span
    covered = values[start:stop]
    items = to_lists(covered) if isinstance(covered, Ragged) else covered.tolist()
    bounds = (offsets - start).tolist()
    return [items[a:b] for a, b in itertools.pairwise(bounds)]
