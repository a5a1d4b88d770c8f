"""`Shard`: what one rank holds of a model, or wants of it: fragments, and the tensors they lie in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.placement import Fragment, Placement

__all__ = ["Shard", "views"]


@runtime_checkable
class Shard(Protocol):
    """One rank's part of a model: a source of weights, or a target for them, or both. Not thread-safe: whoever reads or writes through it
    sees to it that nobody else writes meanwhile."""

    def fragments(self) -> Iterable[Fragment]:
        """What there is, in place: nothing is gathered, converted or copied. The same for as long as the layout is."""
        ...

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The storages that fragments name, as they are now (an optimizer may have replaced them). A fragment's offset counts from the tensor's
        first element; the tensor's own shape does not matter, its dtype is the fragment's."""
        ...


def views(placement: Placement, buffers: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Each fragment of a one-rank placement as a tensor over its buffer, in order. Has the box's shape, with leading ones for dimensions the
    tensor has not. Alive as long as the buffer.

    Raises:
        PlanError: a buffer is missing, of another dtype, or too small for what the placement says.
    """
    itemsizes = placement.itemsize
    extents = placement.hi - placement.lo
    for i in range(len(placement)):
        name = placement.buffers[placement.buffer[i]]
        meta = placement.metas[placement.tensor[i]]
        buffer = buffers.get(name)
        if buffer is None:
            raise PlanError(f"{meta.name}: there is no buffer {name!r}")
        if buffer.dtype != getattr(torch, meta.dtype):
            raise PlanError(f"{meta.name}: buffer {name!r} is {buffer.dtype}, not {meta.dtype}")
        item = int(itemsizes[i])
        offset, strides = int(placement.offset[i]), placement.strides[i]
        if offset % item or np.any(strides % item):
            raise PlanError(f"{meta.name}: offset {offset} and strides {strides.tolist()} are not whole elements of {item} bytes")
        end = offset + int(np.dot(extents[i] - 1, strides)) + item
        there = buffer.untyped_storage().nbytes() - buffer.storage_offset() * item
        if end > there:
            raise PlanError(f"{meta.name}: ends at byte {end} of buffer {name!r}, which has {there}")
        yield torch.as_strided(buffer, extents[i].tolist(), (strides // item).tolist(), buffer.storage_offset() + offset // item)
