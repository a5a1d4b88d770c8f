"""Buffers of a block to be: how many bytes each has, and how they get there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Builder", "Chunk", "raw"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The bytes of one buffer. Either they lie at `address` as they are, or `write(address)` makes them at the place they go to.

    `write` gets the address of `nbytes` writable bytes, aligned to 64 bytes, whose contents it must not rely on. It is called at most once.
    """

    nbytes: int
    owner: Any  # keeps the source alive, and unchanged until it is written
    address: int = 0
    write: Callable[[int], None] | None = None


def raw(array: np.ndarray) -> Chunk:
    """The bytes of a C-contiguous array, as they are."""
    return Chunk(array.nbytes, array, address=array.ctypes.data)


@dataclass(slots=True)
class Builder:
    """Collects the buffers of one block; nodes name them by number."""

    chunks: list[Chunk] = field(default_factory=list)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each column: its first buffer, and the one after its last."""

    @contextlib.contextmanager
    def column(self, name: str) -> Iterator[None]:
        """What is added meanwhile is of that column; dropped again if encoding it fails."""
        first = len(self.chunks)
        try:
            yield
        except Exception:
            del self.chunks[first:]
            raise
        self.ranges[name] = first, len(self.chunks)

    def add(self, chunk: Chunk | np.ndarray) -> int:
        """Returns the number of the buffer."""
        self.chunks.append(chunk if isinstance(chunk, Chunk) else raw(np.ascontiguousarray(chunk)))
        return len(self.chunks) - 1
