"""Boxes in parts: where another side cuts their rows, so that what is read is one piece; and large ones, so that others share the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mooncake_ray.weights.boxes import distinct, divided
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.placement import Placement

if TYPE_CHECKING:
    from mooncake_ray.weights.publication import Publication

__all__ = ["BUCKET_BYTES", "cut_alike", "divide"]

BUCKET_BYTES = 64 << 20
_LEAST_PIECE = 4096  # bytes; smaller ones are not worth a place of their own


def divide(placement: Placement, most: int = BUCKET_BYTES, along: Publication | None = None) -> Placement:
    """The same placement with some fragments in parts, one after the other: what a `Delivery` should be planned for, and staged boxes be copied
    by. Who divides one rank's fragments gets that rank's part of all fragments, divided.

    Args:
        most: bytes, from which on fragments are cut by rows, about evenly: or one rank has to read all of it for all that want it, and these
            wait for the end of it.
        along: a publication. Fragments are cut where its regions cut their rows: or rows are read bit by bit.

    Raises:
        ValueError: `most` is not positive.
    """
    if most < 1:
        raise ValueError(f"most must be positive, got {most}")
    of, lo, hi = np.arange(len(placement)), placement.lo, placement.hi
    if along is not None:
        of, lo, hi = cut_alike(placement.metas, (placement.tensor, lo, hi), along.metas, (along.tensor, along.lo, along.hi))
    part, lo, hi = divided(lo, hi, placement.itemsize[of], most)
    of = of[part]
    if len(of) == len(placement):
        return placement
    offset = placement.offset[of] + ((lo - placement.lo[of]) * placement.strides[of]).sum(axis=1)
    tensor, rank, buffer = placement.tensor[of], placement.rank[of], placement.buffer[of]
    return Placement(placement.metas, placement.ranks, placement.buffers, tensor, rank, lo, hi, buffer, offset, placement.strides[of])


def cut_alike(
    metas: Sequence[ParamMeta],
    boxes: tuple[np.ndarray, np.ndarray, np.ndarray],
    other_metas: Sequence[ParamMeta],
    others: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts boxes (tensor, lo, hi) where others begin or end within their rows, so that what both have in common is packed if either is. Boxes
    are left whole where less than 4 KiB a part would be left.

    Returns:
        (of, lo, hi): rising int64: which box each part is of; and the parts' edges.
    """
    tensor, lo, hi = boxes
    other_tensor, other_lo, other_hi = others
    at = {m.name: i for i, m in enumerate(metas)}
    tensor_of = np.array([at.get(m.name, -1) for m in other_metas], np.int64)[other_tensor]
    itemsize = np.array([m.itemsize for m in metas], np.int64)
    of = np.arange(len(tensor))
    behind = lo.shape[1] - other_lo.shape[1]
    for dim in range(max(1, behind), lo.shape[1]):
        edges = np.concatenate([other_lo[:, dim - behind], other_hi[:, dim - behind]])
        first, _ = distinct([np.tile(tensor_of, 2), edges])
        whose, edge = np.tile(tensor_of, 2)[first], edges[first]
        length = int(max(hi[:, dim].max(initial=0), edge.max(initial=0))) + 1
        line = whose * length + edge  # rises
        begin = np.searchsorted(line, tensor[of] * length + lo[:, dim], side="right")
        inside = np.searchsorted(line, tensor[of] * length + hi[:, dim], side="left") - begin
        extent = hi - lo
        small = np.prod(extent, axis=1) * itemsize[tensor[of]] < _LEAST_PIECE * (inside + 1)
        # Where there is but one row, its parts lie in one piece as they are.
        inside = np.where(small | np.all(extent[:, :dim] == 1, axis=1), 0, np.maximum(inside, 0))
        if not inside.any():
            continue
        i = np.repeat(np.arange(len(of)), inside + 1)
        n = np.arange(len(i)) - np.repeat(np.cumsum(inside + 1) - (inside + 1), inside + 1)
        of, lo, hi, begin, inside = of[i], lo[i], hi[i], begin[i], inside[i]
        lo[:, dim] = np.where(n > 0, edge[np.clip(begin + n - 1, 0, len(edge) - 1)], lo[:, dim])
        hi[:, dim] = np.where(n < inside, edge[np.clip(begin + n, 0, len(edge) - 1)], hi[:, dim])
    return of, lo, hi
