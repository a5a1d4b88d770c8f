"""Columns of a TensorDict, for backends that return rows which were put in several pieces.

A column of n rows is a dense tensor of shape (n, …), a jagged or strided nested tensor of n parts, or a list of n values of any type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Part", "from_rows", "join", "rows_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a column to be: `places[i]` is where row i of `column` goes. `uniform`: it was put as one tensor of several rows."""

    column: Any
    places: Sequence[int]
    uniform: bool


def rows_of(column: Any) -> list[Any]:
    """The rows, as views where the column is a tensor."""
    import torch

    return list(column.unbind()) if isinstance(column, torch.Tensor) else list(column)


def from_rows(rows: list[Any]) -> Any:
    """The narrowest column that holds these rows: 0-d tensors stack, tensors that differ in one dimension at most become jagged (with their
    least and greatest length, without which padding them would take a row of all lengths), other tensors strided nested; what is not only
    tensors of one dtype stays a list."""
    import torch

    if not rows or not all(isinstance(row, torch.Tensor) and row.layout is torch.strided and not row.is_nested for row in rows):
        return rows
    shapes, dtypes = {row.shape for row in rows}, {row.dtype for row in rows}
    if len(dtypes) > 1 or len({len(shape) for shape in shapes}) > 1:
        return rows
    if not rows[0].dim():
        return torch.stack(rows)
    differing = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    if len(differing) > 1:
        return torch.nested.as_nested_tensor(rows, layout=torch.strided)
    return _jagged(rows, differing[0] if differing else 0)


def join(parts: Sequence[Part], count: int, *, jagged: bool = False) -> Any:
    """One column of `count` rows. The places of the parts are every row once.

    A dense tensor comes of parts that were dense, with one row shape, and uniform; rows that were put one at a time become jagged even if
    they happen to have one length, because the next ones may not.

    Args:
        jagged: Never dense, but for columns of numbers.
    """
    import torch

    columns = [part.column for part in parts]
    dense = all(isinstance(column, torch.Tensor) and not column.is_nested for column in columns)
    like = {(column.dtype, column.shape[1:]) for column in columns} if dense else set()
    if len(like) == 1 and (columns[0].dim() == 1 or (not jagged and all(part.uniform for part in parts))):
        if _in_order(parts):
            return columns[0] if len(columns) == 1 else torch.cat(columns)
        out = torch.empty((count, *columns[0].shape[1:]), dtype=columns[0].dtype)
        for part in parts:
            out[torch.as_tensor(part.places)] = part.column
        return out
    nested = isinstance(columns[0], torch.Tensor) and columns[0].is_nested
    if len(columns) == 1 and nested and _in_order(parts):
        return columns[0]
    rows: list[Any] = [None] * count
    for part in parts:
        for place, row in zip(part.places, rows_of(part.column), strict=True):
            rows[place] = row
    tensors = [isinstance(column, torch.Tensor) for column in columns]
    ragged_dims = {column._ragged_idx for column in columns if isinstance(column, torch.Tensor) and column.layout is torch.jagged}
    if all(tensors) and len(ragged_dims) == 1 and _differ_only_in(rows, dim := ragged_dims.pop() - 1):
        return _jagged(rows, dim)
    return from_rows(rows) if any(tensors) else rows


def _in_order(parts: Sequence[Part]) -> bool:
    at = 0
    for part in parts:
        if list(part.places) != list(range(at, at + len(part.places))):
            return False
        at += len(part.places)
    return True


def _differ_only_in(rows: list[Any], dim: int) -> bool:
    like = {(row.dtype, row.shape[:dim], row.shape[dim + 1 :], row.dim()) for row in rows}
    return len(like) == 1 and rows[0].dim() > dim


def _jagged(rows: list[Any], dim: int) -> Any:
    import torch

    lengths = [row.shape[dim] for row in rows]
    offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(lengths), 0, out=offsets[1:])
    values = torch.cat(rows, dim)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dim + 1, min_seqlen=min(lengths), max_seqlen=max(lengths))
