"""A `DataProto` on its way through a pickle: its columns go to one block of the pool object, its meta_info stays in the pickle.

What stays in the pickle also travels with whatever references to Ray's objects it holds. A column that is still pending is passed on by
naming the block it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mooncake_ray.counters import count
from mooncake_ray.data.block import block
from mooncake_ray.data.distant import Distant
from mooncake_ray.data.lazy import Columns, Handle, Pending, Stored
from mooncake_ray.data.proto import DataProto
from mooncake_ray.store.packing import Call, Packer, Region

__all__ = ["open_block", "pack", "reduce_batch", "reduce_handle"]


def reduce_batch(packer: Packer, batch: DataProto) -> Any:
    """A reduction of a batch, or NotImplemented for one that is small, or of a class that pickles in its own way."""
    cls = type(batch)
    if any(getattr(cls, name, None) is not getattr(object, name, None) for name in ("__reduce_ex__", "__reduce__", "__getstate__")):
        return NotImplemented
    state = {name: value for name, value in batch.__dict__.items() if name not in ("batch", "non_tensor_batch")}
    packed = pack(packer, len(batch), batch.batch.peeks(), batch.non_tensor_batch.peeks())
    return NotImplemented if packed is None else (_rebuild, (cls, *packed, state))


def pack(packer: Packer, rows: int, batch: Mapping[str, Any], arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The columns of a batch as they go into a pickle, or None if they are too few bytes to be worth a block, or no blocks are wanted.

    Args:
        batch: dense tensors, `Ragged` and pending columns.
        arrays: NumPy arrays and pending columns.
    """
    loaded = [{name: column for name, column in part.items() if not isinstance(column, Pending)} for part in (batch, arrays)]
    pending = len(batch) + len(arrays) - sum(map(len, loaded))
    if not pending and not (packer.typed and sum(_size(column) for part in loaded for column in part.values()) >= packer.smallest):
        return None
    stored: dict[str, Any] = {}
    if any(loaded) and packer.typed:
        encoded = block.encode(rows, *loaded, checksums=packer.checksums)
        where, offset = packer.make(encoded.nbytes, encoded.copies(), encoded.write)
        handle = Call(open_block, (where, offset, encoded.nbytes, encoded.layout.head_bytes))
        stored = {name: Call(Stored, (handle, name)) for part in loaded for name in part if name not in encoded.left}
        count("batch_bytes_written", encoded.nbytes)
    return tuple({name: stored.get(name, column) for name, column in part.items()} for part in (batch, arrays))  # type: ignore[return-value]


def _size(column: Any) -> int:
    """Bytes, or a guess for objects."""
    return column.nbytes if not isinstance(column, np.ndarray) or column.dtype != object else 256 * column.size


def _rebuild(cls: type[DataProto], batch: dict[str, Any], arrays: dict[str, Any], state: dict[str, Any]) -> DataProto:
    out = cls.__new__(cls)
    out.__dict__.update(state, batch=Columns(batch), non_tensor_batch=Columns(arrays))
    return out


def open_block(region: Region, offset: int, nbytes: int, head_bytes: int) -> Handle:
    """The block at that place of a pool object, mapped for this process alone, or read as it is needed where it is not on this node."""
    if not region.is_here:
        return Distant(region, offset, nbytes, head_bytes)
    return Handle(np.frombuffer(region.private(), np.uint8, nbytes, offset))


def reduce_handle(packer: Packer, handle: Handle) -> Any:
    """Passes a stored block on: by its name where it is one of this pool, else as a copy."""
    where, offset = packer.place(handle.address, handle.nbytes, handle)
    return open_block, (where, offset, handle.nbytes, handle.index.layout.head_bytes)
