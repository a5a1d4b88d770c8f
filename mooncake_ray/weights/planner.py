"""`Planner`: plans that are remembered, so that engines that join or leave cost what is new about them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from typing import Any, TypeVar

from mooncake_ray.weights.delivery import Delivery, deliver
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.publication import BUCKET_BYTES, Publication, publish_plan
from mooncake_ray.weights.reach import Reach
from mooncake_ray.weights.topology import Topology

__all__ = ["Planner"]

T = TypeVar("T")


class Planner:
    """Plans for one topology. Answers what `publish_plan` and `deliver_plan` would, shared between callers. Thread-safe; one plan is made at a
    time."""

    def __init__(self, *, topology: Topology | None = None, bucket_bytes: int = BUCKET_BYTES, keep: int = 4) -> None:
        """
        Args:
            keep: how many publications, and how many deliveries, are remembered; those that were not asked for longest are forgotten.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._topology, self._bucket_bytes, self._keep = topology or Topology(), bucket_bytes, keep
        self._lock = threading.Lock()
        self._publications: OrderedDict[Hashable, Publication] = OrderedDict()
        self._reaches: OrderedDict[Hashable, Reach] = OrderedDict()
        self._deliveries: OrderedDict[Hashable, Delivery] = OrderedDict()

    def publish(self, source: Placement, target: Placement | None = None) -> Publication:
        """As `publish_plan`."""
        key = source.digest, target.digest if target is not None else None
        with self._lock:
            return self._remembered(
                self._publications,
                key,
                lambda: publish_plan(source, topology=self._topology, target=target, bucket_bytes=self._bucket_bytes),
            )

    def deliver(self, publication: Publication, target: Placement, ignore: Collection[str] = ()) -> Delivery:
        """As `deliver_plan`. Of a target that is like earlier ones but for some ranks, only boxes that nobody wanted before are intersected and
        proved. Who leads what is decided anew, among all ranks."""
        key = publication.digest, target.digest, frozenset(ignore)
        with self._lock:
            reach = self._remembered(self._reaches, publication.digest, lambda: Reach(publication))
            return self._remembered(self._deliveries, key, lambda: deliver(reach, target, self._topology, frozenset(ignore)))

    def _remembered(self, what: OrderedDict[Hashable, Any], key: Hashable, make: Callable[[], T]) -> T:
        if key not in what:
            what[key] = make()
            while len(what) > self._keep:
                what.popitem(last=False)
        what.move_to_end(key)
        return what[key]
