"""Parcels for tests of the books of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

from mooncake_ray.rollout.group import Parcel

__all__ = ["parcel"]

_numbers = count()


def parcel(uids: Sequence[str], *, version: int | Sequence[int] = 0, tokens: int | Sequence[int] = 10, nbytes: int = 100, **more) -> Parcel:
    """With a name of its own, one sample for each uid."""
    columns = [np.broadcast_to(np.asarray(column, np.int64), len(uids)).copy() for column in (tokens, version)]
    return Parcel(f"parcel-{next(_numbers)}", list(uids), *columns, nbytes, **more)
