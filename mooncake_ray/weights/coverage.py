"""`Coverage`: whether what is written to a tensor is all of it, and nothing twice."""

from __future__ import annotations

import math

import numpy as np

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.strided import Axis, boxes, storage_order

__all__ = ["Coverage"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
_CHUNK = 1 << 22  # pairs of boxes that are compared at once


class Coverage:
    """The boxes of one tensor that are written. Dimensions are in the order in which they lie in memory, outermost first."""

    def __init__(self, name: str, lengths: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """Raises PlanError unless the tensor lies in memory without gaps."""
        order = storage_order(lengths, strides)
        if order is None:
            raise PlanError(f"parameter {name} of shape {list(lengths)} and strides {list(strides)} does not lie in memory without gaps")
        self._name = name
        self._shape = tuple(lengths[i] for i in order)
        self._loads: list[Box] = []
        self._sources: list[str] = []
        self._fills: list[Box] = []

    def load(self, source: str, offset: int, lengths: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """Notes that a part of tensor `source` goes here, at that offset and with those strides, in elements."""
        for box in self._boxes(offset, lengths, strides):
            self._loads.append(box)
            self._sources.append(source)

    def fill(self, offset: int, lengths: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """Notes that a constant goes there. Weights may be written over it afterwards.

        Raises:
            PlanError: there are weights already.
        """
        for box in self._boxes(offset, lengths, strides):
            for other, source in zip(self._loads, self._sources, strict=True):
                if _overlap(box, other):
                    raise PlanError(f"parameter {self._name}: the loader writes a constant over what it loaded from {source}")
            self._fills.append(box)

    def gap(self) -> str:
        """The first part that is not written, as text; "" if all is.

        Raises:
            PlanError: two loads write the same element.
        """
        self._prove_disjoint()
        if sum(math.prod(b - a for a, b in zip(lo, hi, strict=True)) for lo, hi in self._loads) == math.prod(self._shape):
            return ""
        left: list[Box] = [((0,) * len(self._shape), self._shape)]
        for box in [*self._loads, *self._fills]:
            left = [rest for one in left for rest in _without(one, box)]
        if not left:
            return ""
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(*min(left), strict=True)) + "]"

    def _boxes(self, offset: int, lengths: tuple[int, ...], strides: tuple[int, ...]) -> list[Box]:
        return [(p.lo, p.hi) for p in boxes(self._shape, [Axis(n, s, s) for n, s in zip(lengths, strides, strict=True)], offset)]

    def _prove_disjoint(self) -> None:
        n, d = len(self._loads), len(self._shape)
        lo = np.array([b[0] for b in self._loads], np.int64).reshape(n, d)
        hi = np.array([b[1] for b in self._loads], np.int64).reshape(n, d)
        step = max(1, _CHUNK // max(n, 1))
        for first in range(0, n, step):
            a, b = slice(first, first + step), slice(first, n)
            both = np.ones((len(lo[a]), len(lo[b])), bool)
            for dim in range(lo.shape[1]):
                both &= (lo[a, None, dim] < hi[None, b, dim]) & (lo[None, b, dim] < hi[a, None, dim])
            both &= np.arange(len(both))[:, None] < np.arange(both.shape[1])[None, :]
            if both.any():
                i, j = np.argwhere(both)[0] + first
                raise PlanError(f"parameter {self._name}: the loader writes {self._sources[i]} and {self._sources[j]} to the same place")


def _overlap(a: Box, b: Box) -> bool:
    return all(la < hb and lb < ha for la, ha, lb, hb in zip(*a, *b, strict=True))


def _without(box: Box, hole: Box) -> list[Box]:
    """What is left of a box."""
    if not _overlap(box, hole):
        return [box]
    out = []
    lo, hi = list(box[0]), list(box[1])
    for dim in range(len(lo)):
        if lo[dim] < hole[0][dim]:
            out.append((tuple(lo), (*hi[:dim], hole[0][dim], *hi[dim + 1 :])))
            lo[dim] = hole[0][dim]
        if hole[1][dim] < hi[dim]:
            out.append(((*lo[:dim], hole[1][dim], *lo[dim + 1 :]), tuple(hi)))
            hi[dim] = hole[1][dim]
    return out
