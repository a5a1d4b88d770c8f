"""Padding a batch to a row count that can be divided evenly."""

from __future__ import annotations

import numpy as np

from mooncake_ray.data.proto import DataProto


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Appends rows, starting again at row 0, until the row count is a multiple of `size_divisor`.

    Returns:
        The padded batch and the number of rows added. The batch is `data` itself where no row is
        needed (also where it has no rows), otherwise a copy with the same meta_info.
    """
    if size_divisor < 1:
        raise ValueError(f"size_divisor must be at least 1, got {size_divisor}")
    rows = len(data)
    pad_size = -rows % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(np.arange(rows + pad_size) % rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drops the last `pad_size` rows: a batch of views, or `data` itself for 0."""
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"pad_size must be between 0 and the {len(data)} rows, got {pad_size}")
    return data.slice(0, len(data) - pad_size) if pad_size else data
