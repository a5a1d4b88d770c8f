"""Columns of a TensorDict from single rows, for those that no one kind of column in the pool holds."""

from __future__ import annotations

from typing import Any

import torch

from mooncake_ray.data.ragged import Ragged

__all__ = ["from_rows", "rows_of"]


def rows_of(column: Any) -> list[Any]:
    """The rows: views where the column is a tensor or ragged, whichever its layout."""
    if isinstance(column, Ragged):
        return column.to_list()
    return list(column.unbind()) if isinstance(column, torch.Tensor) else list(column)


def from_rows(rows: list[Any]) -> torch.Tensor | Ragged | list[Any]:
    """The narrowest column that holds these rows.

    Tensors of no dimensions stack; tensors that differ in one dimension at most become ragged in that, or in the first; tensors of one
    dtype and as many dimensions become nested (strided). What else there is stays a list.
    """
    if not rows or not all(isinstance(row, torch.Tensor) and row.layout is torch.strided and not row.is_nested for row in rows):
        return rows
    shapes = {tuple(row.shape) for row in rows}
    if len({row.dtype for row in rows}) > 1 or len({len(shape) for shape in shapes}) > 1:
        return rows
    if not rows[0].dim():
        return torch.stack(rows)
    differing = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    if len(differing) > 1:
        return torch.nested.as_nested_tensor(rows, layout=torch.strided)
    dim = differing[0] if differing else 0
    return Ragged.from_tensors(rows, ragged_dim=dim)
