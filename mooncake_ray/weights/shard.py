"""`Shard`: what one rank holds of a model, or wants of it: fragments, and the tensors they lie in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.placement import Fragment, Placement

__all__ = ["Shard", "fitting", "views"]


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


def fitting(placement: Placement, buffers: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
    """The buffers that a one-rank placement names, in its order; None for one that no fragment is in.

    Raises:
        PlanError: a buffer is missing, of another dtype, or too small for what the placement says.
    """
    used = np.bincount(placement.buffer, minlength=len(placement.buffers)) > 0
    there = [buffers.get(name) if use else None for name, use in zip(placement.buffers, used.tolist(), strict=True)]

    def refuse(wrong: np.ndarray, why: Callable[[int, str], str]) -> None:
        if wrong.any():
            i = int(wrong.argmax())
            name = placement.buffers[placement.buffer[i]]
            raise PlanError(f"{placement.metas[placement.tensor[i]].name}: {why(i, name)}")

    missing = np.array([buffer is None for buffer in there], bool)
    refuse(missing[placement.buffer], lambda _, name: f"there is no buffer {name!r}")
    is_a = np.array([None if buffer is None else buffer.dtype for buffer in there], object)
    wanted = np.array([getattr(torch, meta.dtype) for meta in placement.metas], object)
    refuse(
        is_a[placement.buffer] != wanted[placement.tensor],
        lambda i, name: f"buffer {name!r} is {buffers[name].dtype}, not {placement.metas[placement.tensor[i]].dtype}",
    )
    item, offset, strides = placement.itemsize, placement.offset, placement.strides
    refuse(
        (offset % item != 0) | (strides % item[:, None] != 0).any(axis=1),
        lambda i, _: f"offset {offset[i]} and strides {strides[i].tolist()} are not whole elements of {item[i]} bytes",
    )
    end = offset + ((placement.hi - placement.lo - 1) * strides).sum(axis=1) + item
    sizes = [0 if b is None else b.untyped_storage().nbytes() - b.storage_offset() * b.element_size() for b in there]
    room = np.array(sizes, np.int64)[placement.buffer]
    refuse(end > room, lambda i, name: f"ends at byte {end[i]} of buffer {name!r}, which has {room[i]}")
    return there


def views(placement: Placement, buffers: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Each fragment of a one-rank placement as a tensor over its buffer, in order. Has the box's shape, with leading ones for dimensions the
    tensor has not. Alive as long as the buffer. Raises as `fitting`."""
    there, item = fitting(placement, buffers), placement.itemsize
    rows = zip(
        placement.buffer.tolist(),
        (placement.hi - placement.lo).tolist(),
        (placement.strides // item[:, None]).tolist(),
        (placement.offset // item).tolist(),
        strict=True,
    )
    for number, extent, strides, offset in rows:
        if (buffer := there[number]) is not None:
            yield torch.as_strided(buffer, extent, strides, buffer.storage_offset() + offset)
