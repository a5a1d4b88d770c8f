"""From boxes to runs of bytes: what to copy from where to where, so that a unit's object comes together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mooncake_ray.weights.delivery import Delivery
from mooncake_ray.weights.placement import packed_strides
from mooncake_ray.weights.publication import Publication

__all__ = ["Reads", "lower"]


@dataclass(frozen=True, eq=False)
class Reads:
    """What a unit is made of."""

    objects: np.ndarray
    """int32 (j): rising indices in the publication's `objects`."""
    runs: np.ndarray
    """uint64 (r, 4): (index in `objects` above, offset in that object, offset in the unit's object, bytes). Sorted by object, and by where they
    go; two that are contiguous on both sides are one."""

    @property
    def nbytes(self) -> int:
        return int(self.runs[:, 3].sum())


def lower(publication: Publication, delivery: Delivery, unit: int) -> Reads:
    """The reads that make up one unit. What lies between its boxes, of less than 64 bytes each, is read by none.

    Raises:
        IndexError: there is no such unit.
    """
    if not 0 <= unit < delivery.units:
        raise IndexError(f"there is no unit {unit} among {delivery.units}")
    ops = slice(*delivery.unit_ops[unit : unit + 2])
    region, box = delivery.op_region[ops], delivery.op_box[ops]
    lo, hi = delivery.op_lo[ops], delivery.op_hi[ops]
    d = lo.shape[1]
    pad = d - publication.lo.shape[1]
    item = publication.itemsize[publication.tensor[region]]
    from_lo = np.pad(publication.lo[region], ((0, 0), (pad, 0)))
    from_extent = np.pad(publication.hi[region], ((0, 0), (pad, 0)), constant_values=1) - from_lo
    to_lo, to_extent = delivery.lo[box], delivery.hi[box] - delivery.lo[box]
    from_strides, to_strides = packed_strides(from_extent, item), packed_strides(to_extent, item)
    begin = publication.offset[region] + ((lo - from_lo) * from_strides).sum(axis=1)
    to = delivery.offset[box] + ((lo - to_lo) * to_strides).sum(axis=1)
    extent = hi - lo

    # The innermost dimensions are one run as long as each is whole on both sides.
    length = item.copy()
    counts = extent.copy()
    joined = np.ones(len(extent), bool)
    for dim in range(d - 1, -1, -1):
        length = np.where(joined, length * extent[:, dim], length)
        counts[:, dim] = np.where(joined, 1, extent[:, dim])
        joined &= (extent[:, dim] == from_extent[:, dim]) & (extent[:, dim] == to_extent[:, dim])
    each = np.prod(counts, axis=1)
    op = np.repeat(np.arange(len(each)), each)
    left = np.arange(len(op)) - np.repeat(np.cumsum(each) - each, each)
    begin, to = begin[op], to[op]
    for dim in range(d - 1, -1, -1):
        left, step = np.divmod(left, counts[op, dim])
        begin += step * from_strides[op, dim]
        to += step * to_strides[op, dim]

    objects, which = np.unique(publication.object_of[region], return_inverse=True)
    which, length = which.reshape(-1)[op], length[op]
    order = np.lexsort((to, which))
    which, begin, to, length = which[order], begin[order], to[order], length[order]
    new = np.ones(len(which), bool)
    new[1:] = (which[1:] != which[:-1]) | (begin[1:] != begin[:-1] + length[:-1]) | (to[1:] != to[:-1] + length[:-1])
    first = np.flatnonzero(new)
    nbytes = np.add.reduceat(length, first) if len(first) else length
    return Reads(objects.astype(np.int32), np.stack([which[first], begin[first], to[first], nbytes], axis=1).astype(np.uint64))
