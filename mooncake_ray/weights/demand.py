"""Who wants each region, as far as it matters to whose it should be: how far it is to them from each host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mooncake_ray.weights.boxes import busiest, distinct, meetings, same_members
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.topology import Topology

__all__ = ["demand", "widened"]


def demand(
    metas: Sequence[ParamMeta],
    regions: tuple[np.ndarray, np.ndarray, np.ndarray],
    target: Placement,
    topology: Topology,
    hosts: Sequence[str],
) -> tuple[np.ndarray, np.ndarray]:
    """How far regions go.

    Args:
        metas: of the source.
        regions: (tensor, lo, hi), disjoint.
        target: tensors in it that the source has not are passed over.
        hosts: from where.

    Returns:
        (kind, distance): int64 (regions), and float64 (kinds, hosts): a byte's cost from a host to the nearest of each set of target ranks that
        wants the same box, on average over the sets that want anything of a region of that kind; 1 where nobody does.
    """
    tensor, lo, hi = regions
    at = {m.name: i for i, m in enumerate(metas)}
    tensor_of = np.array([at.get(m.name, -1) for m in target.metas], np.int64)
    known = np.flatnonzero(tensor_of[target.tensor] >= 0)
    d = max(lo.shape[1], target.lo.shape[1])
    first, box = distinct([tensor_of[target.tensor[known]], *target.lo[known].T, *target.hi[known].T])
    boxes = tensor_of[target.tensor[known[first]]], widened(target.lo[known[first]], d, 0), widened(target.hi[known[first]], d, 1)
    sets, which = same_members(box, target.rank[known], len(first))
    host, there = topology.hosts_of(target.ranks)
    each = topology.distances(hosts, there)[:, host[sets.values]]
    near = np.minimum.reduceat(each, sets.start[:-1], axis=1).T if len(sets) else np.ones((0, len(hosts)))

    wide = tensor, widened(lo, d, 0), widened(hi, d, 1)
    found = [np.stack(pairs) for pairs in meetings(boxes, wide, busiest(tensor, lo, len(metas)))]
    i, region = np.concatenate(found, axis=1) if found else np.zeros((2, 0), np.int64)
    wanting, kind = same_members(region, which[i], len(tensor))
    distance = np.ones((len(wanting), len(hosts)))
    some = np.flatnonzero(wanting.lengths)
    if len(some):
        distance[some] = np.add.reduceat(near[wanting.values], wanting.start[some], axis=0) / wanting.lengths[some, None]
    return kind, distance


def widened(places: np.ndarray, d: int, fill: int) -> np.ndarray:
    """(n, d): with leading dimensions that are `fill`."""
    return np.concatenate([np.full((len(places), d - places.shape[1]), fill, np.int64), places], axis=1)
