"""`Ragged` from and to Arrow lists. pyarrow is imported when it is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mooncake_ray.data import ragged_rows
from mooncake_ray.data.bits import dtype_name, flat_bytes, from_bytes
from mooncake_ray.data.block.read import Runs
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.errors import SchemaError

__all__ = ["from_arrow", "to_arrow"]

_NAMES = {  # torch's name: Arrow's
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": "halffloat",
    "float32": "float",
    "float64": "double",
}
_DTYPES = {arrow: getattr(torch, name) for name, arrow in _NAMES.items()}


class _Memory:
    """An Arrow buffer for NumPy. Its memory is Arrow's, which tells no one to write to it; torch has no read-only tensors."""

    def __init__(self, buffer: Any, start: int, stop: int) -> None:
        self.buffer = buffer
        address = buffer.address + start if stop > start else 0
        self.__array_interface__ = {"data": (address, False), "shape": (stop - start,), "typestr": "|u1", "version": 3}


def to_arrow(column: Ragged) -> Any:
    """See `Ragged.to_arrow`."""
    import pyarrow as pa

    if column.ragged_dim:
        raise SchemaError(f"rows are {column.describe()}, expected the ragged dimension first as in Arrow's lists")
    if isinstance(column.values, Ragged):
        items = to_arrow(column.values)
    else:
        items = _items_to_arrow(column.values.detach().cpu())
    valid = None
    if column.null_count:
        valid = pa.py_buffer(np.packbits(ragged_rows.marks(column).numpy(), bitorder="little"))
    offsets = pa.py_buffer(column.offsets.numpy())
    return pa.LargeListArray.from_buffers(pa.large_list(items.type), len(column), [valid, offsets], children=[items])


def _items_to_arrow(values: torch.Tensor) -> Any:
    import pyarrow as pa

    name = dtype_name(values.dtype)
    if name != "bool" and name not in _NAMES:
        raise SchemaError(f"Arrow has no type for {name}")
    values = values.contiguous()
    if name == "bool":
        array = pa.Array.from_buffers(
            pa.bool_(), values.numel(), [None, pa.py_buffer(np.packbits(values.numpy().reshape(-1), bitorder="little"))]
        )
    else:
        array = pa.Array.from_buffers(pa.type_for_alias(_NAMES[name]), values.numel(), [None, pa.py_buffer(flat_bytes(values).numpy())])
    for dim in range(values.ndim - 1, 0, -1):
        kind = pa.list_(array.type, values.shape[dim])
        array = pa.Array.from_buffers(kind, values.shape[:dim].numel(), [None], children=[array])
    return array


def from_arrow(array: Any) -> Ragged:
    """See `Ragged.from_arrow`."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        if array.num_chunks != 1:
            chunks = array.chunks or [pa.array([], array.type)]
            return Ragged.concat([from_arrow(chunk) for chunk in chunks])
        array = array.chunk(0)
    if not isinstance(array, pa.ListArray | pa.LargeListArray):
        raise SchemaError(
            f"got {array.type if isinstance(array, pa.Array) else type(array).__name__}, expected an Arrow list or large_list"
        )
    bounds = array.offsets.to_numpy(zero_copy_only=True).astype(np.int64) if len(array) else np.zeros(1, np.int64)
    values = _items_from_arrow(array.values)
    if not array.null_count:
        return Ragged(values, torch.from_numpy(bounds))
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    lengths = np.diff(bounds) * valid
    if (lengths == np.diff(bounds)).all():
        return Ragged(values, torch.from_numpy(bounds), torch.from_numpy(valid.copy()))
    values = ragged_rows.take_items(values, Runs(bounds[:-1], lengths))  # Arrow may keep items behind a null
    return Ragged(values, ragged_rows.offsets_of(lengths), torch.from_numpy(valid.copy()))


def _items_from_arrow(items: Any) -> torch.Tensor | Ragged:
    import pyarrow as pa

    if isinstance(items, pa.ListArray | pa.LargeListArray):
        return from_arrow(items)
    count, tail = len(items), []
    while isinstance(items, pa.FixedSizeListArray):
        _no_nulls(items)
        tail.append(items.type.list_size)
        size = items.type.list_size
        items = items.values.slice(items.offset * size, len(items) * size)
    _no_nulls(items)
    if pa.types.is_boolean(items.type):
        values = torch.from_numpy(items.to_numpy(zero_copy_only=False).copy())
    elif str(items.type) in _DTYPES:
        dtype = _DTYPES[str(items.type)]
        start, stop = items.offset * dtype.itemsize, (items.offset + len(items)) * dtype.itemsize
        data = items.buffers()[1]
        values = from_bytes(np.asarray(_Memory(data, start, stop)), dtype, (len(items),)) if stop > start else torch.empty(0, dtype=dtype)
    else:
        raise SchemaError(f"the items are Arrow's {items.type}, expected numbers or booleans")
    return values.view(count, *tail)


def _no_nulls(items: Any) -> None:
    if items.null_count:
        place = int(np.flatnonzero(items.is_null().to_numpy(zero_copy_only=False))[0])
        raise SchemaError(f"item {place} of the rows' items is null, expected only whole rows to be null")
