"""A block that is not on this node: what is wanted of it comes over the network, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from mooncake_ray.counters import count
from mooncake_ray.data.block.index import parse
from mooncake_ray.data.block.read import Read
from mooncake_ray.data.lazy import Handle
from mooncake_ray.errors import CorruptBlockError
from mooncake_ray.store.packing import Region

__all__ = ["Distant"]

_MOST = 0.5  # of a block: if a request wants more, all of it is brought here, and others on this node have it too


class Distant(Handle):
    """A stored block in a pool object of another node. Thread-safe."""

    __slots__ = ("_lock", "_nbytes", "_offset", "_region")

    def __init__(self, region: Region, offset: int, nbytes: int, head_bytes: int) -> None:
        """Reads the head of the block, by one request.

        Raises:
            CorruptBlockError: it is none.
            StoreError: it cannot be had.
        """
        self._region, self._offset, self._nbytes, self._lock = region, offset, nbytes, threading.Lock()
        self.index = parse(region.read(np.array([[offset, head_bytes]], np.uint64)))
        if self.index.nbytes > nbytes:
            raise CorruptBlockError(f"the batch is truncated: {nbytes} of {self.index.nbytes} bytes")

    @property
    def _memory(self) -> np.ndarray:  # type: ignore[override]
        with self._lock:
            return np.frombuffer(self._region.private(), np.uint8, self._nbytes, self._offset)

    def fetch(self, reads: Sequence[Read]) -> list[np.ndarray]:
        wanted = sum(read.nbytes for read in reads)
        if self._region.is_here or wanted > _MOST * self.nbytes:
            return super().fetch(reads)
        starts, lengths = map(np.concatenate, zip(*map(self.place, reads), strict=True))
        got = self._region.read(np.stack((starts + self._offset, lengths), axis=1).astype(np.uint64))
        count("batch_bytes_read", wanted)
        return np.split(got, np.cumsum([read.nbytes for read in reads])[:-1])
