"""`PackedPieces`: what an engine's rank gets, as it lies in the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mooncake_ray.weights.laid import Laid, tensor_over
from mooncake_ray.weights.placement import Placement

__all__ = ["PackedPieces"]


@dataclass(frozen=True, eq=False)
class PackedPieces:
    """For each fragment of a placement its whole content, packed. May be iterated as any other pieces of an update."""

    placement: Placement
    """The engine's own."""
    memory: Sequence[np.ndarray]
    """uint8 arrays, which are only read."""
    array: np.ndarray
    """int64 (n): which of them a fragment's content is in, …"""
    offset: np.ndarray
    """int64 (n): … and from which byte on."""

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        p, memory = self.placement, [tensor_over(m) for m in self.memory]
        rows = zip(self.array.tolist(), self.offset.tolist(), (p.hi - p.lo).tolist(), p.nbytes.tolist(), p.tensor.tolist(), strict=True)
        for i, (array, offset, shape, nbytes, tensor) in enumerate(rows):
            yield i, memory[array][offset : offset + nbytes].view(getattr(torch, p.metas[tensor].dtype)).view(shape)

    def laid(self) -> Laid:
        """Where they are. As long as this is there."""
        p = self.placement
        base = np.array([m.ctypes.data for m in self.memory], np.uint64)
        address = base[self.array] + self.offset.astype(np.uint64)
        return Laid.packed(address, np.ascontiguousarray(p.hi - p.lo), p.itemsize.astype(np.int32))
