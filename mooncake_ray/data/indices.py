"""Which rows an index means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["RowIndex", "row_numbers"]

RowIndex = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


def row_numbers(index: RowIndex, rows: int) -> np.ndarray:
    """Returns the rows an index selects, as int64 numbers in `[0, rows)`.

    Args:
        index: 1-D integers (negative ones count from the end) or a boolean mask of length `rows`.
        rows: Rows of the batch.

    Returns:
        A new int64 array of shape (selected rows,).

    Raises:
        IndexError: The index has another shape or dtype, or a row is out of range.
    """
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu()
        if index.is_floating_point():  # bfloat16 has no numpy form
            raise IndexError(f"row indices must be integers or booleans, got {index.dtype}")
    numbers = np.asarray(index)
    if numbers.ndim != 1:
        raise IndexError(f"row indices must have one dimension, got shape {numbers.shape}")
    if numbers.dtype == bool:
        if len(numbers) != rows:
            raise IndexError(f"the row mask has {len(numbers)} entries, expected {rows}")
        return np.flatnonzero(numbers)
    if numbers.size == 0:  # an empty list has numpy's default dtype, a float
        return np.empty(0, dtype=np.int64)
    if numbers.dtype.kind not in "iu":
        raise IndexError(f"row indices must be integers or booleans, got {numbers.dtype}")
    outside = (numbers < -rows) | (numbers >= rows)
    if outside.any():
        raise IndexError(f"row {numbers[outside][0]} is out of range for {rows} rows")
    numbers = numbers.astype(np.int64)
    return np.where(numbers < 0, numbers + rows, numbers)
