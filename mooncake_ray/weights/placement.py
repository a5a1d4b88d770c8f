"""`Placement`: which boxes of which tensors lie where on which rank, as arrays with a row a fragment.

A fragment is a box `[lo, hi)` of one canonical tensor and the place of that box in one of the rank's own buffers: a byte offset and a stride in
bytes for each of the tensor's dimensions. There are no addresses in it, and no version: it stays the same for as long as the layout does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.meta import ParamMeta

__all__ = ["Fragment", "Placement", "packed_strides"]


@dataclass(frozen=True)
class Fragment:
    """One row of a placement, for those who make them one by one."""

    meta: ParamMeta
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    buffer: str
    """The rank's name for the storage: a parameter of its own module, say."""
    offset: int
    """Of the box's first element in the buffer, in bytes."""
    strides: tuple[int, ...]
    """In bytes, for each dimension of the tensor."""

    def __post_init__(self) -> None:
        n = len(self.meta.shape)
        if not len(self.lo) == len(self.hi) == len(self.strides) == n:
            raise PlanError(f"{self.meta.name}: {n} dimensions, but lo {self.lo}, hi {self.hi}, strides {self.strides}")
        if any(not 0 <= a <= b <= s for a, b, s in zip(self.lo, self.hi, self.meta.shape, strict=True)):
            raise PlanError(f"{self.meta.name}: [{self.lo}, {self.hi}) is not in a tensor of shape {self.meta.shape}")


@dataclass(frozen=True, eq=False)
class Placement:
    """Fragments of one or several ranks. Immutable; its arrays are not to be written.

    `n` fragments, `d` the most dimensions any tensor has. Dimensions a tensor has not are [0, 1) with stride 0, and come first, so that the last
    one is always the innermost. Empty boxes are left out.
    """

    metas: tuple[ParamMeta, ...]
    """Sorted by name, each once."""
    ranks: tuple[str, ...]
    """Whose fragments these are: "trainer/3", "e0/1"."""
    buffers: tuple[str, ...]
    """Names of storages, each once for all ranks."""
    tensor: np.ndarray
    """int32 (n): which meta."""
    rank: np.ndarray
    """int32 (n): which rank."""
    lo: np.ndarray
    """int64 (n, d)."""
    hi: np.ndarray
    """int64 (n, d)."""
    buffer: np.ndarray
    """int32 (n): which buffer (of that rank)."""
    offset: np.ndarray
    """int64 (n): bytes."""
    strides: np.ndarray
    """int64 (n, d): bytes."""

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def of(cls, rank: str, fragments: Iterable[Fragment]) -> Placement:
        """One rank's fragments.

        Raises:
            PlanError: two of them disagree on what their tensor is.
        """
        rows = [f for f in fragments if all(a < b for a, b in zip(f.lo, f.hi, strict=True))]
        metas = _joined(f.meta for f in rows)
        buffers = tuple(dict.fromkeys(f.buffer for f in rows))
        d = max((len(f.meta.shape) for f in rows), default=0)
        at = {m.name: i for i, m in enumerate(metas)}
        numbers = {b: i for i, b in enumerate(buffers)}

        def padded(values: Sequence[tuple[int, ...]], fill: int) -> np.ndarray:
            out = np.full((len(rows), d), fill, np.int64)
            for row, value in zip(out, values, strict=True):
                if value:
                    row[d - len(value) :] = value
            return out

        return cls(
            metas,
            (rank,),
            buffers,
            np.array([at[f.meta.name] for f in rows], np.int32),
            np.zeros(len(rows), np.int32),
            padded([f.lo for f in rows], 0),
            padded([f.hi for f in rows], 1),
            np.array([numbers[f.buffer] for f in rows], np.int32),
            np.array([f.offset for f in rows], np.int64),
            padded([f.strides for f in rows], 0),
        )

    @classmethod
    def join(cls, parts: Sequence[Placement]) -> Placement:
        """The fragments of all of them.

        Raises:
            PlanError: two parts disagree on dtype or shape of a tensor, or both speak for the same rank.
        """
        metas = _joined(m for p in parts for m in p.metas)
        ranks = tuple(r for p in parts for r in p.ranks)
        if len(set(ranks)) != len(ranks):
            twice = sorted({r for r in ranks if ranks.count(r) > 1})
            raise PlanError(f"{len(twice)} ranks are described twice: {', '.join(twice[:5])}")
        buffers = tuple(dict.fromkeys(b for p in parts for b in p.buffers))
        at = {m.name: i for i, m in enumerate(metas)}
        numbers = {b: i for i, b in enumerate(buffers)}
        d = max((p.lo.shape[1] for p in parts), default=0)
        first = np.cumsum([0, *(len(p.ranks) for p in parts)])

        def renamed(of: Sequence[int], what: np.ndarray) -> np.ndarray:
            return np.asarray(of, np.int32)[what] if len(what) else what.astype(np.int32)

        def widened(a: np.ndarray, fill: int) -> np.ndarray:
            return np.concatenate([np.full((len(a), d - a.shape[1]), fill, np.int64), a], axis=1)

        return cls(
            metas,
            ranks,
            buffers,
            np.concatenate([renamed([at[m.name] for m in p.metas], p.tensor) for p in parts]),
            np.concatenate([p.rank + np.int32(n) for p, n in zip(parts, first, strict=False)]),
            np.concatenate([widened(p.lo, 0) for p in parts]),
            np.concatenate([widened(p.hi, 1) for p in parts]),
            np.concatenate([renamed([numbers[b] for b in p.buffers], p.buffer) for p in parts]),
            np.concatenate([p.offset for p in parts]),
            np.concatenate([widened(p.strides, 0) for p in parts]),
        )

    def only(self, rank: str) -> Placement:
        """One rank's fragments, in their order; tensors and buffers keep their numbers."""
        mine = self.take(np.flatnonzero(self.rank == self.ranks.index(rank)))
        return replace(mine, ranks=(rank,), rank=np.zeros(len(mine), np.int32))

    def take(self, which: np.ndarray) -> Placement:
        """Some of the fragments; int64 (m). Tensors, ranks and buffers keep their numbers."""
        names = ("tensor", "rank", "lo", "hi", "buffer", "offset", "strides")
        return replace(self, **{name: getattr(self, name)[which] for name in names})

    @cached_property
    def itemsize(self) -> np.ndarray:
        """int64 (n): bytes of an element of each fragment."""
        return np.array([m.itemsize for m in self.metas], np.int64)[self.tensor]

    @cached_property
    def nbytes(self) -> np.ndarray:
        """int64 (n): bytes of each fragment."""
        return np.prod(self.hi - self.lo, axis=1) * self.itemsize

    @cached_property
    def layout(self) -> str:
        """As `digest`, whatever its ranks are called."""
        return replace(self, ranks=tuple(str(i) for i in range(len(self.ranks)))).digest

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all of it, in hex. The same for the same layout in another process."""
        out = hashlib.sha256()
        out.update(repr(([(m.name, m.dtype, m.shape) for m in self.metas], self.ranks, self.buffers)).encode())
        for array in (self.tensor, self.rank, self.lo, self.hi, self.buffer, self.offset, self.strides):
            out.update(np.ascontiguousarray(array).data)
        return out.hexdigest()


def _joined(metas: Iterable[ParamMeta]) -> tuple[ParamMeta, ...]:
    out: dict[str, ParamMeta] = {}
    for meta in metas:
        if (known := out.setdefault(meta.name, meta)) is not meta and known != meta:
            raise PlanError(f"{meta.name} is {known.dtype} {list(known.shape)} to one and {meta.dtype} {list(meta.shape)} to another")
    return tuple(out[name] for name in sorted(out))


def packed_strides(extent: np.ndarray, itemsize: np.ndarray) -> np.ndarray:
    """int64 (n, d): the strides in bytes of boxes of `extent` (n, d) that lie packed, in C order, with elements of `itemsize` (n) bytes."""
    out = np.empty_like(extent)
    step = np.asarray(itemsize, np.int64).copy()
    for dim in range(extent.shape[1] - 1, -1, -1):
        out[:, dim] = step
        step = step * extent[:, dim]
    return out
