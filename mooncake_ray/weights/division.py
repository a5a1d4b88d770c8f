"""Large fragments as several, so that no one rank has to read all of one for its replicas, and others need not wait for the end of it."""

from __future__ import annotations

import numpy as np

from mooncake_ray.weights.boxes import divided
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.publication import BUCKET_BYTES

__all__ = ["divide"]


def divide(placement: Placement, most: int = BUCKET_BYTES) -> Placement:
    """The same placement with fragments of more than `most` bytes in parts, one after the other: what a `Delivery` should be planned for, and
    staged boxes be copied by. Who divides one rank's fragments gets that rank's part of all fragments, divided.

    Raises:
        ValueError: `most` is not positive.
    """
    if most < 1:
        raise ValueError(f"most must be positive, got {most}")
    of, lo, hi = divided(placement.lo, placement.hi, placement.itemsize, most)
    if len(of) == len(placement):
        return placement
    offset = placement.offset[of] + ((lo - placement.lo[of]) * placement.strides[of]).sum(axis=1)
    tensor, rank, buffer = placement.tensor[of], placement.rank[of], placement.buffer[of]
    return Placement(placement.metas, placement.ranks, placement.buffers, tensor, rank, lo, hi, buffer, offset, placement.strides[of])


def parts_of(placement: Placement, most: int = BUCKET_BYTES) -> np.ndarray:
    """int64: for each fragment of `divide(placement, most)` the one of `placement` that it is a part of."""
    return divided(placement.lo, placement.hi, placement.itemsize, most)[0]
