"""`Units`: what one engine's rank gets by a route, worked out once for all versions that come by it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mooncake_ray.sync.plans import Origin, Route
from mooncake_ray.weights.lowering import lower
from mooncake_ray.weights.regions import Regions

__all__ = ["Unit", "Units"]


@dataclass(frozen=True, eq=False)
class Unit:
    """Some of a rank's boxes, which come together."""

    number: int
    nbytes: int
    leads: bool
    """Whether it gets it from the trainers, or from the rank that does."""
    alone: bool
    """Whether nobody else wants it."""
    boxes: np.ndarray
    """int64: indices in `Units.boxes`."""
    regions: Regions
    """Where these lie in it."""
    reads: tuple[tuple[int, np.ndarray], ...]
    """Numbers of published objects, and the runs of each as `Part` has them."""


class Units:
    """Of one rank. Thread-safe."""

    def __init__(self, origin: Origin, route: Route, rank: str) -> None:
        self.publication, self.delivery, self._rank = origin.publication, route.delivery, rank
        self.span = route.spans[rank]
        """Which fragments of the joined target are its: from, to."""
        self.boxes = route.boxes(rank)
        """int64: that it wants, each once, rising."""
        self._made: dict[int, Unit] = {}

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Numbers of its units, as it should get them."""
        return tuple(self.delivery.units_of(self._rank).tolist())

    @cached_property
    def _shapes(self) -> np.ndarray:
        """The publication's, with as many dimensions as the delivery has."""
        shapes = self.publication.shapes
        return np.pad(shapes, ((0, 0), (self.delivery.lo.shape[1] - shapes.shape[1], 0)), constant_values=1)

    def __getitem__(self, number: int) -> Unit:
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]

    def _make(self, number: int) -> Unit:
        publication, delivery = self.publication, self.delivery
        of = np.flatnonzero(delivery.unit[self.boxes] == number)
        boxes = self.boxes[of]
        tensor, lo = delivery.tensor[boxes], delivery.lo[boxes]
        item = publication.itemsize[tensor].astype(np.int32)
        reads = lower(publication, delivery, number)
        ends = np.searchsorted(reads.runs[:, 0], np.arange(len(reads.objects) + 1))
        return Unit(
            number,
            int(delivery.unit_nbytes[number]),
            delivery.ranks[delivery.leader[number]] == self._rank,
            len(delivery.members(number)) == 1,
            of,
            Regions(lo, delivery.hi[boxes], self._shapes[tensor], item, delivery.offset[boxes]),
            tuple((n, np.ascontiguousarray(reads.runs[ends[i] : ends[i + 1], 1:])) for i, n in enumerate(reads.objects.tolist())),
        )
