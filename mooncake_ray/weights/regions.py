"""`Regions`: what lies where in one published object."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_ray._native import delta as _native
from mooncake_ray.weights.digest import steps_of

if TYPE_CHECKING:
    from mooncake_ray.weights.publication import Publication

__all__ = ["Regions", "bytes_of"]


@dataclass(frozen=True, eq=False)
class Regions:
    """The regions of one published object: packed boxes of tensors, each at an offset. Arrays are not to be written.

    `m` regions, `d` dimensions; those a tensor has not are [0, 1) of 1, and come first.
    """

    lo: np.ndarray
    """int64 (m, d): in the whole tensor."""
    hi: np.ndarray
    """int64 (m, d)."""
    shape: np.ndarray
    """int64 (m, d): of the whole tensor."""
    itemsize: np.ndarray
    """int32 (m): bytes of an element: 1, 2, 4 or 8."""
    offset: np.ndarray
    """int64 (m): bytes, in the object."""

    def __len__(self) -> int:
        return len(self.offset)

    @cached_property
    def extents(self) -> np.ndarray:
        """int64 (m, d)."""
        return np.ascontiguousarray(self.hi - self.lo)

    @cached_property
    def elements(self) -> np.ndarray:
        """int64 (m)."""
        return np.prod(self.extents, axis=1, dtype=np.int64)

    @cached_property
    def steps(self) -> np.ndarray:
        """int64 (m, d): from one element to the next along each dimension of the whole tensor."""
        return np.ascontiguousarray(steps_of(self.shape))

    @cached_property
    def index(self) -> np.ndarray:
        """uint64 (m): of each region's first element in the whole tensor."""
        return np.einsum("md,md->m", self.lo, self.steps).astype(np.uint64)

    @cached_property
    def strides(self) -> np.ndarray:
        """int64 (m, d): of the packed region, in bytes."""
        return np.ascontiguousarray(steps_of(self.extents) * self.itemsize[:, None])

    def addresses(self, data: np.ndarray) -> np.ndarray:
        """uint64 (m): where each region is in an object's bytes, uint8 (bytes,).

        Raises:
            ValueError: the object is shorter than what should be in it.
        """
        ends = self.offset + self.elements * self.itemsize
        if len(self) and int(ends.max()) > len(data):
            raise ValueError(f"an object of {len(data)} bytes; its regions end at byte {int(ends.max())}")
        return np.uint64(data.ctypes.data) + self.offset.astype(np.uint64)

    @classmethod
    def of(cls, publication: Publication, obj: int) -> Regions:
        """The regions of an object of a publication, by rising offset: `publication.regions_of(obj)`."""
        which = publication.regions_of(obj)
        tensor = publication.tensor[which]
        item = publication.itemsize[tensor].astype(np.int32)
        return cls(publication.lo[which], publication.hi[which], publication.shapes[tensor], item, publication.offset[which])

    def only(self, which: np.ndarray) -> Regions:
        """Some of them; int64 (n)."""
        return Regions(self.lo[which], self.hi[which], self.shape[which], self.itemsize[which], self.offset[which])

    def digests(self, data: Any) -> np.ndarray:
        """uint64 (m): content digest of each region, from an object's bytes."""
        at = self.addresses(bytes_of(data))
        return _native.digests(at, self.itemsize, self.index, self.extents, self.steps, self.strides)


def bytes_of(data: Any) -> np.ndarray:
    """uint8 (bytes,): a view of anything with the buffer protocol."""
    if isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1 and data.flags.c_contiguous:
        return data
    return np.frombuffer(data, np.uint8)
