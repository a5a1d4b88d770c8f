"""Where everything of a block lies: header, index, buffers.

    0   8  magic
    8   4  version of the format
    12  4  flags
    16  8  bytes of the index (JSON, from byte 48)
    24  8  bytes of the head: header, index and the buffers of the index (row lengths), which travel with a reference to the block
    32  8  bytes of the block
    40  8  number of buffers that belong to the head

Then the buffers in order: each aligned to 64 bytes, and to a page from 1 MiB on. With the flag CHECKSUMS the last 4 * (buffers + 1) bytes are
CRC-32s, of the index and of each buffer. All numbers are little-endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_ray.data.block.chunk import Chunk
from mooncake_ray.errors import CorruptBlockError
from mooncake_ray.store.packing import aligned

__all__ = ["Head", "Layout", "copies", "damaged", "index_of", "layout_of", "read_header", "write"]

_HEADER = struct.Struct("<8sIIQQQQ")
_MAGIC = b"MCRBATCH"
_VERSION = 1
_CHECKSUMS = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets from the start of a block, in bytes."""

    index_bytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    head_buffers: int
    checksums: bool

    @property
    def head_bytes(self) -> int:
        """Header, index and the buffers that travel with it."""
        if not self.head_buffers:
            return _HEADER.size + self.index_bytes
        return self.offsets[self.head_buffers - 1] + self.sizes[self.head_buffers - 1]

    @property
    def data_bytes(self) -> int:
        """Up to the end of the last buffer."""
        return self.offsets[-1] + self.sizes[-1] if self.offsets else _HEADER.size + self.index_bytes

    @property
    def nbytes(self) -> int:
        """Of the whole block."""
        return self.data_bytes + (4 * (len(self.sizes) + 1) if self.checksums else 0)


def layout_of(index_bytes: int, sizes: Sequence[int], head_buffers: int, checksums: bool = False) -> Layout:
    """Lays buffers out one after the other."""
    at, offsets = _HEADER.size + index_bytes, []
    for nbytes in sizes:
        at = aligned(at, nbytes)
        offsets.append(at)
        at += nbytes
    return Layout(index_bytes, tuple(offsets), tuple(sizes), head_buffers, checksums)


def copies(layout: Layout, chunks: Sequence[Chunk]) -> list[tuple[int, int, int]]:
    """`(offset, address, nbytes)` of the buffers that are copied as they are."""
    placed = zip(layout.offsets, chunks, strict=True)
    return [(offset, chunk.address, chunk.nbytes) for offset, chunk in placed if chunk.write is None and chunk.nbytes]


def write(layout: Layout, index: bytes, chunks: Sequence[Chunk], memory: np.ndarray) -> None:
    """Writes what is not plainly copied: the header, the index, the buffers that are made in place, and the gaps between buffers.

    Args:
        memory: The block's bytes: uint8 (layout.nbytes,), writable. Buffers that lie somewhere as they are have been copied already.
    """
    flags = _CHECKSUMS if layout.checksums else 0
    fixed = (_MAGIC, _VERSION, flags, layout.index_bytes, layout.head_bytes, layout.nbytes, layout.head_buffers)
    _HEADER.pack_into(memory, 0, *fixed)
    end = _HEADER.size + layout.index_bytes
    memory[_HEADER.size : end] = np.frombuffer(index, np.uint8)
    for offset, chunk in zip(layout.offsets, chunks, strict=True):
        memory[end:offset] = 0
        if chunk.write is not None and chunk.nbytes:
            chunk.write(memory.ctypes.data + offset)
        end = offset + chunk.nbytes
    if layout.checksums:
        memory[layout.data_bytes :] = checksums(layout, memory).view(np.uint8)


def checksums(layout: Layout, memory: np.ndarray) -> np.ndarray:
    """CRC-32 of the index and of each buffer, uint32 (buffers + 1,)."""
    spans = [(_HEADER.size, layout.index_bytes), *zip(layout.offsets, layout.sizes, strict=True)]
    return np.array([zlib.crc32(memory[at : at + n]) for at, n in spans], "<u4")


@dataclass(frozen=True, slots=True)
class Head:
    """What a header says."""

    index_bytes: int
    head_bytes: int
    nbytes: int
    head_buffers: int
    checksums: bool


def read_header(memory: np.ndarray) -> Head:
    """Reads and checks the header at the start of `memory` (uint8), which has at least the head of a block.

    Raises:
        CorruptBlockError: it is no block, of another version, or shorter than it says.
    """
    if len(memory) < _HEADER.size:
        raise CorruptBlockError(f"{len(memory)} bytes are no batch: a header has {_HEADER.size}")
    magic, version, flags, index_bytes, head_bytes, nbytes, head_buffers = _HEADER.unpack_from(memory)
    if magic != _MAGIC:
        raise CorruptBlockError(f"these bytes are no batch: they begin with {magic!r}, expected {_MAGIC!r}")
    if version != _VERSION:
        raise CorruptBlockError(f"the batch is written in version {version} of the format, this package reads version {_VERSION}")
    if not _HEADER.size + index_bytes <= head_bytes <= min(nbytes, len(memory)):
        raise CorruptBlockError(
            f"the batch's header says {index_bytes} bytes of index, {head_bytes} of head, {nbytes} in all; there are {len(memory)}"
        )
    return Head(index_bytes, head_bytes, nbytes, head_buffers, bool(flags & _CHECKSUMS))


def index_of(memory: np.ndarray, head: Head) -> bytes:
    return memory[_HEADER.size : _HEADER.size + head.index_bytes].tobytes()


def damaged(layout: Layout, memory: np.ndarray) -> int | None:
    """The first part of a whole block that differs from its checksum: -1 for the index, or the number of a buffer. None if all is well.

    Raises:
        CorruptBlockError: the block was written without checksums.
    """
    if not layout.checksums:
        raise CorruptBlockError("the batch was stored without checksums; nothing to verify it by")
    stored = memory[layout.data_bytes : layout.nbytes].copy().view("<u4")
    wrong = np.flatnonzero(stored != checksums(layout, memory))
    return int(wrong[0]) - 1 if wrong.size else None
