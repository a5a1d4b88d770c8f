"""`Laid`: boxes as they lie in this process's memory, and copies of many of them at once."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from mooncake_ray._native import delta as _native
from mooncake_ray.weights.placement import Placement, packed_strides
from mooncake_ray.weights.shard import fitting, views

__all__ = ["Laid", "Sources", "copy", "in_memory", "tensor_over"]


@dataclass(frozen=True, eq=False)
class Laid:
    """`n` boxes of `d` dimensions. Nothing here keeps the memory alive."""

    address: np.ndarray
    """uint64 (n): of the first element of each."""
    strides: np.ndarray
    """int64 (n, d): bytes."""
    extents: np.ndarray
    """int64 (n, d)."""
    itemsize: np.ndarray
    """int32 (n): bytes of an element: 1, 2, 4 or 8."""

    def __len__(self) -> int:
        return len(self.address)

    @classmethod
    def of(cls, placement: Placement, buffers: Mapping[str, torch.Tensor]) -> Laid:
        """The fragments of a one-rank placement, in buffers that are in this process's memory. Raises as `shard.views`."""
        there = fitting(placement, buffers)
        base = np.array([0 if t is None else t.data_ptr() for t in there], np.uint64)
        address = base[placement.buffer] + placement.offset.astype(np.uint64)
        extents = np.ascontiguousarray(placement.hi - placement.lo)
        return cls(address, np.ascontiguousarray(placement.strides), extents, placement.itemsize.astype(np.int32))

    @classmethod
    def packed(cls, address: np.ndarray, extents: np.ndarray, itemsize: np.ndarray) -> Laid:
        """Each in C order, without gaps, at its address."""
        return cls(address, packed_strides(extents, itemsize), extents, itemsize)

    def only(self, which: np.ndarray) -> Laid:
        return Laid(self.address[which], self.strides[which], self.extents[which], self.itemsize[which])

    @cached_property
    def distinct(self) -> np.ndarray:
        """int64: those of them that are not where another one is already, rising."""
        rows = np.concatenate([self.address[:, None].view(np.int64), self.strides, self.extents], axis=1)
        return np.sort(np.unique(rows, axis=0, return_index=True)[1])


def copy(source: Laid, target: Laid) -> None:
    """The contents of each box to the one of the same number. Thread-safe, releases the GIL, and uses several threads where there is much.
    Nothing may be read where something is written.

    Raises:
        ValueError: they are not of the same shapes.
    """
    if not (np.array_equal(source.extents, target.extents) and np.array_equal(source.itemsize, target.itemsize)):
        raise ValueError(f"{len(source)} boxes are to be copied to {len(target)} of other shapes")
    _native.move(source.address, source.strides, target.address, target.strides, source.extents, source.itemsize)


class Sources:
    """The fragments of a one-rank placement, to be packed. In this process's memory, or in a device's. Not to be written meanwhile."""

    def __init__(self, placement: Placement, buffers: Mapping[str, torch.Tensor]) -> None:
        """Raises as `shard.views`."""
        self._laid = Laid.of(placement, buffers) if in_memory(buffers) else None
        self._tensors = [] if self._laid is not None else [t.detach() for t in views(placement, buffers)]

    def pack(self, which: np.ndarray, out: np.ndarray, offsets: np.ndarray) -> None:
        """Copies some of them into `out` (uint8), each packed at its offset; int64 (m), both."""
        if self._laid is not None:
            source = self._laid.only(which)
            copy(source, Laid.packed(np.uint64(out.ctypes.data) + offsets.astype(np.uint64), source.extents, source.itemsize))
            return
        whole = torch.from_numpy(out)
        for i, offset in zip(which.tolist(), offsets.tolist(), strict=True):
            source = self._tensors[i]
            whole[offset : offset + source.nbytes].view(source.dtype).view(source.shape).copy_(source)


def in_memory(buffers: Mapping[str, torch.Tensor]) -> bool:
    """Whether all are in this process's memory, not in a device's."""
    return all(t.device.type == "cpu" for t in buffers.values())


def tensor_over(array: np.ndarray) -> torch.Tensor:
    """The same bytes, as a tensor that lives as long as they do: torch wants to be able to write, and nobody does."""
    if not array.flags.writeable:
        array = np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data))
    return torch.from_numpy(array)
