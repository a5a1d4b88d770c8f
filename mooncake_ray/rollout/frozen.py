"""A batch as bytes of a file, and back, bit for bit.

The columns are a block. Those that no block can hold (sparse, with gradients, …) are one pickled value, which is a block of its own. Both have
checksums. As with any pickle, bytes from someone else can run code.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from mooncake_ray.data import DataProto
from mooncake_ray.data.block import block
from mooncake_ray.data.lazy import Columns, Handle, Stored
from mooncake_ray.errors import CorruptBlockError, SnapshotError

__all__ = ["freeze", "thaw"]

_PARTS = ("batch", "non_tensor_batch")


def freeze(batch: DataProto) -> tuple[np.ndarray, np.ndarray]:
    """Two blocks, uint8 each; the second is empty if the first has all columns. meta_info stays behind.

    Raises:
        SnapshotError: a column has handles of Ray's, which mean nothing outside of its job.
    """
    columns = {part: dict(getattr(batch, part)) for part in _PARTS}
    encoded = block.encode(len(batch), *columns.values(), checksums=True)
    if not encoded.left:
        return _written(encoded), np.empty(0, np.uint8)
    value = np.empty(1, object)
    value[0] = {part: {name: column for name, column in columns[part].items() if name in encoded.left} for part in _PARTS}
    rest = block.encode(1, {}, {"columns": value}, checksums=True)
    if rest.left:
        raise SnapshotError(f"of columns {sorted(encoded.left)} one has handles of Ray's, which mean nothing outside of its job")
    return _written(encoded), _written(rest)


def thaw(columns: np.ndarray, rest: np.ndarray) -> DataProto:
    """The batch of those blocks; those of its columns that the first has are not loaded, and keep its memory.

    Raises:
        CorruptBlockError: a byte is not what was written.
    """
    handle = _verified(columns)
    found: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for name, field in handle.index.fields.items():
        found[_PARTS[field.form in ("array", "objects")]][name] = Stored(handle, name)
    if len(rest):
        (left,) = Stored(_verified(rest), "columns").value()
        for part in _PARTS:
            found[part] |= left[part]
    return DataProto._of(*(Columns(found[part]) for part in _PARTS), {})


def _verified(memory: np.ndarray) -> Handle:
    handle = Handle(memory)
    if handle.nbytes != len(memory):
        raise CorruptBlockError(f"a batch of {handle.nbytes} bytes is in {len(memory)}")
    handle.verify()
    return handle


def _written(encoded: block.Encoded) -> np.ndarray:
    memory = np.empty(encoded.nbytes, np.uint8)
    for offset, address, nbytes in encoded.copies():
        ctypes.memmove(memory.ctypes.data + offset, address, nbytes)
    encoded.write(memory)
    return memory
