"""`Ragged` from and to lists: of tensors, or of Python numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from mooncake_ray.data import ragged_rows
from mooncake_ray.data.bits import dtype_name
from mooncake_ray.data.exact import converted
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
    if levels is None:
        kinds = set(map(type, chain.from_iterable(row for row in rows if row)))
        levels = 2 if kinds & {list, tuple} or kinds == {type(None)} else 1
    if levels > 1:
        return _outer(rows, lambda inner: from_lists(inner, dtype, levels - 1))
    lengths = np.fromiter((0 if row is None else len(row) for row in rows), np.int64, len(rows))
    offsets = ragged_rows.offsets_of(lengths)
    flat = list(chain.from_iterable(row for row in rows if row))
    return Ragged(_numbers(flat, dtype, offsets.numpy()), offsets, _marks(rows))


def _numbers(flat: list[Any], dtype: torch.dtype | None, bounds: np.ndarray) -> torch.Tensor:
    """Python numbers as one tensor; every one of them exact."""

    def refuse(place: int, why: str) -> SchemaError:
        row = int(np.searchsorted(bounds, place, side="right")) - 1
        return SchemaError(f"row {row}, item {place - bounds[row]}: {flat[place]!r} {why}")

    kinds = set(map(type, flat))
    for kind in kinds - {bool, int, float}:
        place = next(n for n, value in enumerate(flat) if type(value) is kind)
        raise refuse(place, f"is a {kind.__name__}, expected a bool, int or float")
    if len(kinds) > 1 and dtype is None:
        place = next(n for n, value in enumerate(flat) if type(value) is not type(flat[0]))
        raise refuse(
            place, f"is a {type(flat[place]).__name__} next to {type(flat[0]).__name__}s, expected dtype= to say what to convert to"
        )
    if not flat:
        return torch.empty(0, dtype=dtype or torch.int64)
    if kinds == {bool}:
        made = torch.tensor(flat)
    elif float in kinds:
        for place, value in enumerate(flat) if kinds != {float} else ():
            if type(value) is int and not _is_double(value):
                raise refuse(place, "is not exact next to floats")
        made = torch.from_numpy(np.array(flat, np.float64))
        if dtype is None:
            narrow, bad = converted(made, torch.float32)
            return narrow if bad is None else made
    else:
        unsigned = dtype == torch.uint64
        low, high = (0, 2**64) if unsigned else (-(2**63), 2**63)
        place = next((n for n, value in enumerate(flat) if not low <= value < high), None) if _overflows(flat, low, high) else None
        if place is not None:
            raise refuse(place, f"does not fit {dtype_name(dtype or torch.int64)}")
        made = torch.from_numpy(np.array(flat, np.uint64 if unsigned else np.int64))
    if dtype is None:
        return made
    result, bad = converted(made, dtype)
    if bad is not None:
        raise refuse(bad, f"is not exact as {dtype_name(dtype)}")
    return result


def _overflows(flat: list[int], low: int, high: int) -> bool:
    return min(flat) < low or max(flat) >= high


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
    start, stop = column.span
    inner = column.values[start:stop]
    items = to_lists(inner) if isinstance(inner, Ragged) else inner.tolist()
    bounds = (column.offsets - start).tolist()
    marks = ragged_rows.marks(column).tolist()
    rows = [items[a:b] if mark else None for a, b, mark in zip(bounds[:-1], bounds[1:], marks, strict=True)]
    if not column.ragged_dim:
        return rows
    return [None if row is None else row.tolist() for row in column]
