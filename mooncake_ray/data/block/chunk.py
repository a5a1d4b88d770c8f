"""Buffers of a block to be: how many bytes each has, and how they get there."""

from __future__ import annotations

from collections.abc import Callable
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

    def add(self, chunk: Chunk | np.ndarray) -> int:
        """Returns the number of the buffer."""
        self.chunks.append(chunk if isinstance(chunk, Chunk) else raw(np.ascontiguousarray(chunk)))
        return len(self.chunks) - 1
