"""Batches of batches: a dimension of groups before the rows, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mooncake_ray.data.proto import DataProto
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.errors import SchemaError

__all__ = ["fold_batch_dim", "unfold_batch_dim"]


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Groups neighbouring rows: columns (rows, ...) become (new_batch_size, rows / new_batch_size, ...).

    Args:
        data: It is not changed.
        new_batch_size: The number of groups.

    Returns:
        A batch whose rows are the groups, of views where columns are contiguous. A row of a ragged column is a list of its rows.

    Raises:
        ValueError: The rows cannot be divided evenly.
    """
    rows = len(data)
    if new_batch_size < 1 or rows % new_batch_size:
        raise ValueError(f"new_batch_size must be positive and divide the {rows} rows, got {new_batch_size}")
    size = rows // new_batch_size

    def fold(column: Any) -> Any:
        if isinstance(column, Ragged):
            return Ragged(column, torch.arange(new_batch_size + 1) * size)
        return column.reshape(new_batch_size, size, *column.shape[1:])

    return _mapped(data, lambda name, column: fold(column))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The reverse of `fold_batch_dim`: the first `batch_dims` dimensions of every column become one of rows.

    Raises:
        SchemaError: A column has fewer dimensions, or other sizes in them than the first one. Names the column.
    """
    if batch_dims < 1:
        raise ValueError(f"batch_dims must be at least 1, got {batch_dims}")
    expected: list[tuple[str, tuple[int, ...]]] = []

    def unfold(name: str, column: Any) -> Any:
        sizes, rows = _unfolded(name, column, batch_dims)
        if expected and sizes != expected[0][1]:
            raise SchemaError(f"{name!r} has the batch dimensions {sizes}, expected {expected[0][1]} as {expected[0][0]!r}")
        expected.append((name, sizes))
        return rows

    return _mapped(data, unfold)


def _unfolded(name: str, column: Any, dims: int) -> tuple[tuple[int, ...], Any]:
    """The sizes of the batch dimensions, and the rows in them."""
    if not isinstance(column, Ragged):
        if column.ndim < dims:
            raise SchemaError(f"{name!r} has {column.ndim} dimensions, expected at least {dims}")
        sizes = tuple(column.shape[:dims])
        return sizes, column.reshape(int(np.prod(sizes)), *column.shape[dims:])
    sizes = (len(column),)
    for _ in range(dims - 1):
        if not isinstance(column.values, Ragged):
            raise SchemaError(f"{name!r} has rows {column.describe()}, expected lists of rows to be the batch dimensions")
        lengths = column.lengths().unique()
        if column.null_count or len(lengths) > 1:
            raise SchemaError(
                f"{name!r} has rows of {lengths.tolist()} rows and {column.null_count} null rows, expected one number for all"
            )
        start, stop = column.span
        sizes, column = (*sizes, int(lengths[0]) if len(lengths) else 0), column.values[start:stop]
    return sizes, column


def _mapped(data: DataProto, change: Any) -> DataProto:
    batch = {name: change(name, column) for name, column in data.batch.items()}
    arrays = {name: change(name, column) for name, column in data.non_tensor_batch.items()}
    return type(data)(batch=batch, non_tensor_batch=arrays, meta_info=data.meta_info)
