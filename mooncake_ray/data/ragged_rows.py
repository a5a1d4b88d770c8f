"""What `Ragged` does with its rows: checks, copies of spans of items, joins. Knows the fields of a column, not how one is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mooncake_ray.data import kernels
from mooncake_ray.data.bits import as_ints, flat_bytes, from_bytes, is_plain
from mooncake_ray.data.block import read
from mooncake_ray.data.block.read import Runs
from mooncake_ray.errors import SchemaError

__all__ = [
    "check_items",
    "check_parts",
    "check_rows",
    "in_memory",
    "item_bytes",
    "join_items",
    "marks",
    "offsets_of",
    "same_bits",
    "take_items",
]


def check_items(values: Any, ragged_dim: int) -> None:
    """Raises SchemaError unless these can be the items of rows."""
    if not isinstance(values, torch.Tensor):
        raise SchemaError(f"values is a {type(values).__name__}, expected a torch.Tensor or a Ragged")
    if not is_plain(values):
        raise SchemaError(f"values is not a dense tensor ({values.layout}, {values.dtype})")
    if values.ndim == 0:
        raise SchemaError("values is a scalar, expected items in its first dimension")
    if not 0 <= ragged_dim < values.ndim:
        raise SchemaError(f"ragged_dim is {ragged_dim}, expected 0 to {values.ndim - 1} for items of shape {tuple(values.shape[1:])}")


def check_rows(items: int, offsets: Any, valid: Any) -> None:
    """Raises SchemaError unless offsets and marks describe rows of so many items."""
    if not isinstance(offsets, torch.Tensor) or offsets.dtype != torch.int64 or offsets.ndim != 1 or not len(offsets):
        raise SchemaError(f"offsets is {_kind(offsets)}, expected torch.int64[rows + 1]")
    rows, bounds = len(offsets) - 1, offsets.numpy()
    if bounds[0] < 0:
        raise SchemaError(f"row 0 begins at {bounds[0]}, expected at least 0")
    falling = np.flatnonzero(bounds[1:] < bounds[:-1])
    if falling.size:
        row = int(falling[0])
        raise SchemaError(f"row {row} ends at {bounds[row + 1]}, before it begins at {bounds[row]}")
    if bounds[-1] > items:
        row = int(np.flatnonzero(bounds > items)[0])
        raise SchemaError(f"row {max(row - 1, 0)} reaches {bounds[row]}, beyond the {items} items")
    if valid is None:
        return
    if not isinstance(valid, torch.Tensor) or valid.dtype != torch.bool or tuple(valid.shape) != (rows,):
        raise SchemaError(f"valid is {_kind(valid)}, expected torch.bool[{rows}]")
    filled = np.flatnonzero(~valid.numpy() & (np.diff(bounds) > 0))
    if filled.size:
        row = int(filled[0])
        raise SchemaError(f"row {row} is null and has {bounds[row + 1] - bounds[row]} items, expected 0")


def _kind(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def check_parts(parts: Sequence[Any], kind: type) -> None:
    """Raises unless there is a part, and all have the first one's dtype and shape of rows."""
    if not parts:
        raise ValueError("cannot concat an empty list, expected at least one part")
    for position, part in enumerate(parts):
        if not isinstance(part, kind):
            raise SchemaError(f"part {position} is a {type(part).__name__}, expected a {kind.__name__}")
        if part.dtype != parts[0].dtype:  # torch.cat would convert, and may round
            raise SchemaError(f"part {position} is {part.dtype}, expected {parts[0].dtype} as in part 0")
        if part.full_row_shape != parts[0].full_row_shape:
            raise SchemaError(f"part {position} has rows {part.describe()}, expected {parts[0].describe()} as in part 0")


def marks(column: Any) -> torch.Tensor:
    """Which rows are not null, bool (rows,)."""
    return torch.ones(len(column), dtype=torch.bool) if column.valid is None else column.valid


def item_bytes(values: torch.Tensor) -> int:
    """Bytes of one item."""
    return values.itemsize * values.shape[1:].numel()


def offsets_of(lengths: np.ndarray) -> torch.Tensor:
    """Where rows of these lengths begin, and where the last one ends, int64 (rows + 1,)."""
    return torch.from_numpy(read.offsets_of(lengths))


def take_items(values: Any, runs: Runs) -> Any:
    """Those items, one after the other: a view for one run, otherwise a copy on the same device."""
    if runs.one:
        return values[int(runs.starts[0]) : int(runs.starts[0] + runs.lengths[0])]
    if not isinstance(values, torch.Tensor):
        return values.take(runs)
    if values.requires_grad or not in_memory(values):
        index = torch.from_numpy(runs.positions()).to(values.device)
        return values.index_select(0, index) if values.requires_grad else as_ints(values).index_select(0, index).view(values.dtype)
    item = item_bytes(values)
    raw = kernels.empty(runs.total * item)
    kernels.gather(values.data_ptr(), runs.starts * item, runs.lengths * item, raw.ctypes.data)
    return from_bytes(raw, values.dtype, (runs.total, *values.shape[1:]))


def in_memory(values: torch.Tensor) -> bool:
    """Whether the items lie one after the other in this process's memory, as they are."""
    return values.device.type == "cpu" and values.is_contiguous() and not (values.is_conj() or values.is_neg())


def join_items(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All items in new memory, bit by bit."""
    if any(part.requires_grad or part.device.type != "cpu" for part in parts):
        return torch.cat(list(parts))
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    raw = kernels.empty(sum(part.nbytes for part in parts))
    pieces = [flat_bytes(part) for part in parts]
    addresses = np.array([piece.data_ptr() for piece in pieces], np.int64)
    kernels.gather(0, addresses, np.array([piece.nbytes for piece in pieces], np.int64), raw.ctypes.data)
    return from_bytes(raw, parts[0].dtype, shape)


def same_bits(a: Any, b: Any) -> bool:
    """Whether compact values of two columns of the same form are equal bit by bit."""
    return torch.equal(flat_bytes(a), flat_bytes(b).to(a.device)) if isinstance(a, torch.Tensor) else a.equals(b)
