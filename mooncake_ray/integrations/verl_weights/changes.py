"""`Changes`: what is different in a bucket since the version before, compared bit by bit, as places and values.

verl's loaders write values over what is there, and mark what did not change by NaN. So what changed to NaN, or in a tensor that is not of
floating point, cannot be sent in this way: then all is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mooncake_ray.integrations.verl_weights.stream import Named

__all__ = ["Changes", "changes_of", "parts"]

_ALIGNMENT = 8  # of each tensor's values
_MOST = (1 << 31) - 1  # elements of a tensor: places are int32


@dataclass(frozen=True)
class Changes:
    """Of a bucket, for its tensors in their order."""

    counts: tuple[int, ...]
    places: np.ndarray  # int32, (changed,): in the flat tensors
    values: list[np.ndarray]  # uint8, those of a tensor each

    @property
    def nbytes(self) -> int:
        return _aligned(self.places.nbytes) + sum(_aligned(v.nbytes) for v in self.values)

    def write(self, out: np.ndarray) -> None:
        """All places, one tensor after the other, and then all values. `parts` reads it."""
        out[:] = 0
        out[: self.places.nbytes] = self.places.view(np.uint8)
        at = _aligned(self.places.nbytes)
        for values in self.values:
            out[at : at + values.nbytes] = values
            at += _aligned(values.nbytes)


def parts(tensors: Sequence[Named], counts: Sequence[int], data: np.ndarray) -> Iterator[tuple[Named, torch.Tensor, torch.Tensor]]:
    """Of each tensor that changed: places (int32) and values, as views of what `Changes.write` wrote."""
    written = torch.from_numpy(data)
    place, value = 0, _aligned(4 * sum(counts))
    for named, n in zip(tensors, counts, strict=True):
        nbytes = n * named.kind.itemsize
        if n:
            yield named, written[place : place + 4 * n].view(torch.int32), written[value : value + nbytes].view(named.kind)
        place += 4 * n
        value += _aligned(nbytes)


def changes_of(tensors: Sequence[Named], begin: int, size: int, old: np.ndarray, new: np.ndarray) -> Changes | None:
    """What is different in a bucket. None where that cannot be sent as changes.

    Args:
        begin: Where the bucket begins in the stream.
        size: Of whole buckets.
        old, new: The bucket's bytes, uint8, of one length.
    """
    counts, places, values = [], [np.zeros(0, np.int32)], []
    for named in tensors:
        kind = named.kind
        lo, _, where = named.part(begin, begin + size)
        before, now = (data[where].view(f"u{kind.itemsize}") for data in (old, new))
        changed = np.flatnonzero(before != now)
        found = now[changed].view(np.uint8)
        if len(changed) and (not kind.is_floating_point or named.nbytes // kind.itemsize > _MOST or _has_nan(found, kind)):
            return None
        counts.append(len(changed))
        places.append((changed + lo // kind.itemsize).astype(np.int32))
        values.append(found)
    return Changes(tuple(counts), np.concatenate(places), values)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _has_nan(data: np.ndarray, kind: torch.dtype) -> bool:
    return bool(torch.from_numpy(data).view(kind).isnan().any())
