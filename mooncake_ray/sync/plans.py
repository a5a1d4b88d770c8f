"""The plans a coordinator has made, and what it checks with them. Members get each once, as a blob."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mooncake_ray.errors import ChecksumError, SyncAbortedError
from mooncake_ray.objects import blobs
from mooncake_ray.objects.blobs import Blob
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.plan import Delivery, Publication, Topology, deliver_plan, publish_plan

__all__ = ["Origin", "Plans", "Route", "check", "load"]

_ROOM_S = 60.0
_MOST = 8  # of each kind that are kept


@dataclass(frozen=True, eq=False)
class Origin:
    """How trainers publish."""

    publication: Publication
    spans: Mapping[str, tuple[int, int]]
    """Which fragments of the joined source are a rank's: from, to."""


@dataclass(frozen=True, eq=False)
class Route:
    """How a publication gets to some engines."""

    delivery: Delivery
    spans: Mapping[str, tuple[int, int]]
    """Which fragments of the joined target are a rank's: from, to."""

    def boxes(self, rank: str) -> np.ndarray:
        """int64: the boxes that rank wants, each once, rising."""
        first, last = self.spans[rank]
        return np.unique(self.delivery.box_of[first:last])


def load(blob: Blob) -> Origin | Route:
    return pickle.loads(blobs.view(blob))


def _stored(plan: Origin | Route) -> Blob:
    # Without what was worked out from it before, its digest above all: whoever gets it works that out anew.
    bare = (
        replace(plan, publication=replace(plan.publication)) if isinstance(plan, Origin) else replace(plan, delivery=replace(plan.delivery))
    )
    data = np.frombuffer(pickle.dumps(bare, protocol=5), np.uint8)

    def fill(out: np.ndarray) -> None:
        out[:] = data

    return blobs.write(len(data), fill, timeout_s=_ROOM_S, note="plan")


def _spans(joined: Placement) -> dict[str, tuple[int, int]]:
    """Joined placements have their ranks' fragments one after the other."""
    ends = np.cumsum([0, *np.bincount(joined.rank, minlength=len(joined.ranks))]).tolist()
    return {rank: (ends[i], ends[i + 1]) for i, rank in enumerate(joined.ranks)}


class Plans:
    """Makes each once. Used by one thread at a time."""

    def __init__(self, bucket_bytes: int, ignore: Collection[str]) -> None:
        self._bucket_bytes, self._ignore = bucket_bytes, ignore
        self._origins: dict[tuple[str, ...], tuple[Origin, Blob]] = {}
        self._routes: dict[tuple[str, ...], tuple[Route, Blob]] = {}

    def origin(self, source: Placement, hosts: Mapping[str, str], targets: Sequence[Placement]) -> tuple[Origin, Blob]:
        """How to publish, so that it is cut where those who are going to want it cut. The same for the same layouts, whoever has them.

        Args:
            hosts: Of the source's ranks.
            targets: Of the engines that there are.
        """
        layouts = {target.layout: target for target in targets}
        key = _origin_key(source, hosts, targets)
        if key not in self._origins:
            wanted = Placement.join([layouts[name] for name in sorted(layouts)]) if layouts else None
            plan = publish_plan(source, topology=Topology(hosts), target=wanted, bucket_bytes=self._bucket_bytes)
            origin = Origin(plan, _spans(source))
            while len(self._origins) >= _MOST:
                blobs.drop([self._origins.pop(next(iter(self._origins)))[1]])
            self._origins[key] = origin, _stored(origin)
        return self._origins[key]

    def origin_again(self, source: Placement, hosts: Mapping[str, str], targets: Sequence[Placement]) -> tuple[Origin, Blob] | None:
        """As `origin`, if it is made already: at once."""
        return self._origins.get(_origin_key(source, hosts, targets))

    def known(self, digest: str) -> tuple[Origin, Blob] | None:
        """The one whose publication has that digest."""
        return next((found for found in self._origins.values() if found[0].publication.digest == digest), None)

    def route(
        self, publication: Publication, targets: Sequence[Placement], hosts: Mapping[str, str], aliases: Collection[str]
    ) -> tuple[Route, Blob]:
        """`hosts`: of the ranks of both sides. `aliases`: tensors that nobody need want, besides those to ignore."""
        key = _route_key(publication, targets, hosts, aliases)
        if key not in self._routes:
            joined = Placement.join(targets)
            delivery = deliver_plan(publication, joined, topology=Topology(hosts), ignore={*self._ignore, *aliases})
            route = Route(delivery, _spans(joined))
            while len(self._routes) >= _MOST:
                blobs.drop([self._routes.pop(next(iter(self._routes)))[1]])
            self._routes[key] = route, _stored(route)
        return self._routes[key]

    def route_again(
        self, publication: Publication, targets: Sequence[Placement], hosts: Mapping[str, str], aliases: Collection[str]
    ) -> tuple[Route, Blob] | None:
        """As `route`, if it is made already: at once."""
        return self._routes.get(_route_key(publication, targets, hosts, aliases))


def _origin_key(source: Placement, hosts: Mapping[str, str], targets: Sequence[Placement]) -> tuple[str, ...]:
    return (source.digest, repr(sorted(hosts.items())), *sorted({target.layout for target in targets}))


def _route_key(
    publication: Publication, targets: Sequence[Placement], hosts: Mapping[str, str], aliases: Collection[str]
) -> tuple[str, ...]:
    return (publication.digest, *(t.digest for t in targets), repr((sorted(hosts.items()), sorted(aliases))))


def check(publication: Publication, route: Route, digests: np.ndarray, prepared: Mapping[str, np.ndarray], engine: Sequence[str]) -> int:
    """Compares what one engine has staged with what was published, tensor by tensor.

    Args:
        digests: uint64: of each region of the publication.
        prepared: For each rank of that engine (by name), uint64: the digests of its boxes.
        engine: Names of its ranks.

    Returns how many tensors could be compared: those whose boxes do not overlap (rows of block scales at a cut may).

    Raises:
        ChecksumError: ranks that want the same differ, or the sum over a tensor's boxes is not that over its regions.
    """
    delivery = route.delivery
    found = np.zeros(len(delivery.tensor), np.uint64)
    seen = np.zeros(len(delivery.tensor), bool)
    for rank in engine:
        boxes, got = route.boxes(rank), prepared[rank]
        if len(boxes) != len(got):
            raise SyncAbortedError(f"{rank} has staged {len(got)} boxes of {len(boxes)}")
        twice = seen[boxes]
        if (differ := twice & (found[boxes] != got)).any():
            raise ChecksumError(_message(publication, delivery.tensor[boxes[differ]], f"{rank} has other bytes than another rank"))
        found[boxes], seen[boxes] = got, True
    tensors = len(publication.metas)
    held = np.bincount(delivery.tensor[seen], weights=delivery.nbytes[seen].astype(np.float64), minlength=tensors)
    whole = np.bincount(publication.tensor, weights=publication.nbytes.astype(np.float64), minlength=tensors)
    wanted, got = np.zeros(tensors, np.uint64), np.zeros(tensors, np.uint64)
    np.add.at(wanted, publication.tensor, digests)
    np.add.at(got, delivery.tensor[seen], found[seen])
    comparable = (held == whole) & (held > 0)
    if (wrong := comparable & (wanted != got)).any():
        raise ChecksumError(_message(publication, np.flatnonzero(wrong), "what arrived is not what was published"))
    return int(comparable.sum())


def _message(publication: Publication, tensors: np.ndarray, what: str) -> str:
    names = [publication.metas[t].name for t in np.unique(tensors).tolist()]
    return f"{len(names)} tensors: {what}: {', '.join(names[:3])}"
