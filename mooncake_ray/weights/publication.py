"""`Publication`: the snapshot of a source that a version is: each distinct region once, by one rank, at a place in one of its objects.

A function of the source's placement (and of the topology, and of who will want it, if those are told), with no address and no version in it.
Every rank computes it for itself; the digest tells that they agree.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.alike import Alike
from mooncake_ray.weights.balance import fill, rounds
from mooncake_ray.weights.boxes import Ragged, busiest, distinct, divided, meetings, same_members
from mooncake_ray.weights.demand import demand
from mooncake_ray.weights.division import BUCKET_BYTES, cut_alike
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.topology import Topology

__all__ = ["ALIGNMENT", "BUCKET_BYTES", "Publication", "publish_plan"]

ALIGNMENT = 64
"""Bytes; what regions and boxes in objects begin at a multiple of."""
_SLACK = 0.005  # of a rank's mean share that a cut may be moved by to fall between two regions
_LEAST_PIECE = 4096  # bytes; a region is not split for less


@dataclass(frozen=True, eq=False)
class Publication:
    """`m` regions, which are disjoint and together are all that the source holds; sorted by object, and by offset in it. Immutable."""

    metas: tuple[ParamMeta, ...]
    ranks: tuple[str, ...]
    """Of the source, sorted."""
    bucket_bytes: int
    tensor: np.ndarray
    """int32 (m)."""
    lo: np.ndarray
    """int64 (m, d)."""
    hi: np.ndarray
    """int64 (m, d)."""
    fragment: np.ndarray
    """int64 (m): which fragment of the source placement the owner copies it from. The region is that fragment's box, or a part of it: boxes are
    split between owners, between buckets, and where the target cuts rows. Not in the digest, as it depends on the order in which the placement
    was joined."""
    owner: np.ndarray
    """int32 (m): index in `ranks`."""
    bucket: np.ndarray
    """int32 (m)."""
    buckets: int
    offset: np.ndarray
    """int64 (m): bytes, in the object of (owner, bucket), where the region lies packed in C order; a multiple of 64."""
    nbytes: np.ndarray
    """int64 (m)."""
    objects: np.ndarray
    """int32 (k, 2): (owner, bucket) of the objects there are, sorted."""
    object_nbytes: np.ndarray
    """int64 (k)."""
    object_of: np.ndarray
    """int32 (m)."""

    def __len__(self) -> int:
        return len(self.tensor)

    def regions_of(self, obj: int) -> np.ndarray:
        """int64: the regions of an object, by rising offset."""
        return np.arange(*np.searchsorted(self.object_of, [obj, obj + 1]))

    @cached_property
    def load(self) -> np.ndarray:
        """int64 (ranks): bytes that each rank publishes."""
        return np.bincount(self.owner, self.nbytes, minlength=len(self.ranks)).astype(np.int64)

    @cached_property
    def itemsize(self) -> np.ndarray:
        """int64 (metas)."""
        return np.array([m.itemsize for m in self.metas], np.int64)

    @cached_property
    def shapes(self) -> np.ndarray:
        """int64 (metas, d): dimensions that a tensor has not come first, and are 1."""
        out = np.ones((len(self.metas), self.lo.shape[1]), np.int64)
        for row, meta in zip(out, self.metas, strict=True):
            if meta.shape:
                row[len(row) - len(meta.shape) :] = meta.shape
        return out

    @cached_property
    def busiest(self) -> np.ndarray:
        """int64 (metas): the dimension each tensor is cut most in."""
        return busiest(self.tensor, self.lo, len(self.metas))

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex: the same in every process that planned from the same placement, in whatever order it joined the ranks."""
        out = hashlib.sha256(repr(([(m.name, m.dtype, m.shape) for m in self.metas], self.ranks, self.bucket_bytes)).encode())
        for array in (self.tensor, self.lo, self.hi, self.owner, self.bucket, self.offset, self.objects):
            out.update(np.ascontiguousarray(array).data)
        return out.hexdigest()


def publish_plan(
    source: Placement, *, topology: Topology | None = None, target: Placement | None = None, bucket_bytes: int = BUCKET_BYTES
) -> Publication:
    """Which rank publishes what, and where in which object.

    Boxes that several ranks hold alike are replicas; one of these ranks is the owner, so that all network devices get about the same to send
    (in bytes times distance to who wants them, if `target` is given). A region is split where whole ones would be more than half a percent off.

    Args:
        source: of all ranks together.
        topology: where ranks of source and target are; by default each rank is a host of its own.
        target: who will want it. Only a hint: others can have it too. Regions are cut where it cuts rows, so that each rank reads few long runs
            instead of many short ones, and are published near to it.
        bucket_bytes: about what an object may have at most.

    Raises:
        PlanError: two boxes of the source overlap and are not the same.
    """
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"bucket_bytes must be at least {ALIGNMENT}, got {bucket_bytes}")
    topology = topology or Topology()
    ranks = Alike.of(source, source.tensor)
    held = ranks.fragments.take(ranks.first)  # by one rank of each class
    rows = held.values
    first, region = distinct([source.tensor[rows], *source.lo[rows].T, *source.hi[rows].T])
    tensor, lo, hi = source.tensor[rows[first]], source.lo[rows[first]], source.hi[rows[first]]
    _refuse_overlaps(source, tensor, lo, hi)
    holding = np.repeat(np.arange(len(held)), held.lengths)
    classes, which = same_members(region, holding, len(first))
    sets, place = ranks.ranks_of(classes)
    which = place[which]
    itemsize = np.array([m.itemsize for m in source.metas], np.int64)
    whole = np.arange(len(tensor))
    if target is not None and len(target):
        whole, lo, hi = cut_alike(source.metas, (tensor, lo, hi), target.metas, (target.tensor, target.lo, target.hi))
    part, lo, hi = divided(lo, hi, itemsize[tensor[whole]], bucket_bytes)
    whole = whole[part]
    tensor, which = tensor[whole], which[whole]
    layers = np.array([m.layer for m in source.metas], np.int64)[tensor]
    share = _Shares(ranks.ranks, topology, sets, which, layers, np.prod(hi - lo, axis=1) * itemsize[tensor], lo, hi)
    if target is not None and len(target):
        share.toward(demand(source.metas, (tensor, lo, hi), target, topology, share.hosts))
    piece, lo, hi, owner = share.all()
    tensor, layers, whole = tensor[piece], layers[piece], whole[piece]
    nbytes = np.prod(hi - lo, axis=1) * itemsize[tensor]

    # The owner's class has the region in some row; the owner has it in its own row of that number.
    key = region * len(held) + holding
    order = np.argsort(key, kind="stable")
    kind = ranks.class_of[owner]
    row = order[np.searchsorted(key[order], whole * len(held) + kind)] - held.start[kind]
    fragment = ranks.fragments.values[ranks.fragments.start[owner] + row]

    bucket, offset, order = _buckets(owner, layers, tensor, lo, nbytes, len(ranks.ranks), bucket_bytes)
    tensor, lo, hi, owner, fragment, nbytes = (a[order] for a in (tensor, lo, hi, owner, fragment, nbytes))
    first, object_of = distinct([owner, bucket])
    last = np.append(first[1:], len(owner))[: len(first)] - 1
    return Publication(
        source.metas,
        ranks.ranks,
        bucket_bytes,
        tensor.astype(np.int32),
        lo,
        hi,
        fragment,
        owner.astype(np.int32),
        bucket,
        int(bucket.max(initial=-1)) + 1,
        offset,
        nbytes,
        np.stack([owner[first], bucket[first]], axis=1).astype(np.int32),
        offset[last] + nbytes[last],
        object_of.astype(np.int32),
    )


def _refuse_overlaps(source: Placement, tensor: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> None:
    boxes = (tensor, lo, hi)
    bad: list[tuple[int, int]] = []
    for i, j in meetings(boxes, boxes, busiest(tensor, lo, len(source.metas))):
        both = np.flatnonzero(i < j)
        bad += zip(i[both[:5]].tolist(), j[both[:5]].tolist(), strict=True)
    if bad:
        names = [source.metas[tensor[i]].name for i, _ in bad]
        i, j = bad[0]
        raise PlanError(
            f"boxes of the source overlap without being the same, in {', '.join(dict.fromkeys(names[:5]))}: "
            f"[{lo[i].tolist()}, {hi[i].tolist()}) and [{lo[j].tolist()}, {hi[j].tolist()}) of {names[0]}"
        )


class _Shares:
    """Regions on their way to owners."""

    def __init__(
        self, ranks: tuple[str, ...], topology: Topology, sets: Ragged, which: np.ndarray, layers: np.ndarray, nbytes: np.ndarray,
        lo: np.ndarray, hi: np.ndarray,
    ) -> None:  # fmt: skip
        self.sets, self.which, self.layers, self.nbytes, self.lo, self.hi = sets, which, layers, nbytes, lo, hi
        self.nic, nics = topology.nics_of(ranks)
        self.host, self.hosts = topology.hosts_of(ranks)
        self.load = np.zeros(nics)
        self.slack = max(_SLACK * float(nbytes.sum()) / max(1, len(ranks)), _LEAST_PIECE)
        self.distance = np.ones((len(sets), max(1, len(self.hosts))))  # from each host to where regions of a set go

    def toward(self, wanted: tuple[np.ndarray, np.ndarray]) -> None:
        """Takes into account how far it is to who wants each region: (kind of each region, distance of each kind from each host)."""
        kind, distance = wanted
        if np.all(distance == distance[:, :1]):  # nobody is nearer than anybody else
            return
        first, which = distinct([self.which, kind])
        self.sets, self.which, self.distance = self.sets.take(self.which[first]), which, distance[kind[first]]

    def all(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(region, lo, hi, owner) of the pieces."""
        single = self.sets.lengths[self.which] == 1
        only = np.flatnonzero(single)
        owners = self.sets.values[self.sets.start[self.which[only]]].astype(np.int64)
        self._add(owners, self.nbytes[only], self.which[only])
        parts = [(only, self.lo[only], self.hi[only], owners)]
        shared = np.flatnonzero(~single)
        turn = np.zeros(len(self.sets), np.int64)
        for number, chosen in enumerate(rounds(self.sets, self.nic), 1):
            turn[chosen] = number
        first, step = distinct([turn[self.which[shared]], self.layers[shared]])
        order = np.argsort(step, kind="stable")
        parts += [self._share(shared[i]) for i in np.split(order, np.searchsorted(step[order], np.arange(1, len(first)))) if len(i)]
        piece, lo, hi, owner = (np.concatenate(a) for a in zip(*parts, strict=True))
        return piece, lo, hi, owner

    def _add(self, owner: np.ndarray, nbytes: np.ndarray, which: np.ndarray) -> None:
        np.add.at(self.load, self.nic[owner], nbytes * self.distance[which, self.host[owner]])

    def _share(self, regions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Regions of one layer, of sets of one size that have no member in common: laid end to end, and cut where the next owner begins."""
        regions = regions[np.argsort(self.which[regions], kind="stable")]
        first, row = distinct([self.which[regions]])
        members = self.sets.take(self.which[regions][first]).values.reshape(len(first), -1)
        size = self.nbytes[regions]
        ends = np.cumsum(size)
        amount = np.bincount(row, size)
        nic = self.nic[members]
        sharing = (nic[:, :, None] == nic[:, None, :]).sum(axis=2)  # members of one device fill it together
        cost = self.distance[self.which[regions][first][:, None], self.host[members]]
        got = fill(self.load[nic], cost * sharing, amount)
        base = np.concatenate([[0], np.cumsum(amount)[:-1]])
        cuts = np.rint(base[:, None] + np.cumsum(got, axis=1)).astype(np.int64)
        cuts[:, -1] = np.rint(base + amount)
        flat = np.minimum(cuts.reshape(-1), ends[-1])

        extent = self.hi[regions] - self.lo[regions]
        dim = (extent > 1).argmax(axis=1) if extent.shape[1] else np.zeros(len(regions), np.int64)
        rows = extent[np.arange(len(regions)), dim] if extent.shape[1] else np.ones(len(regions), np.int64)
        into = np.minimum(np.searchsorted(ends, flat, side="left"), len(regions) - 1)
        inside = flat - (ends[into] - size[into])
        at_row = np.rint(inside / (size[into] / rows[into])).astype(np.int64)
        near = np.minimum(inside, size[into] - inside) <= self.slack
        at_row = np.where(near, np.where(inside * 2 >= size[into], rows[into], 0), np.clip(at_row, 0, rows[into]))
        flat = ends[into] - size[into] + at_row * (size[into] // rows[into])
        flat = np.maximum.accumulate(flat)

        inner = np.flatnonzero((at_row > 0) & (at_row < rows[into]))
        splits, _ = distinct([into[inner], at_row[inner]])
        at, where = into[inner][splits], at_row[inner][splits]
        piece = np.concatenate([np.arange(len(regions)), at])
        begin = np.concatenate([np.zeros(len(regions), np.int64), where])
        order = np.lexsort((begin, piece))
        piece, begin = piece[order], begin[order]
        end = np.append(begin[1:], 0)
        final = np.append(piece[1:] != piece[:-1], True)
        end[final] = rows[piece[final]]
        row_bytes = size[piece] // rows[piece]
        start = (ends - size)[piece] + begin * row_bytes
        owner = members.reshape(-1)[np.searchsorted(flat, start, side="right")].astype(np.int64)
        taken = (end - begin) * row_bytes
        self._add(owner, taken, self.which[regions][piece])
        lo, hi = self.lo[regions][piece], self.hi[regions][piece]
        if lo.shape[1]:
            along = dim[piece]
            numbers = np.arange(len(piece))
            old = lo[numbers, along]
            lo[numbers, along], hi[numbers, along] = old + begin, old + end
        return regions[piece], lo, hi, owner


def _buckets(
    owner: np.ndarray, layers: np.ndarray, tensor: np.ndarray, lo: np.ndarray, nbytes: np.ndarray, ranks: int, limit: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bucket, offset, order): layers that follow each other are one bucket while no owner has more of it than the limit; a layer of which
    somebody has more is several. `bucket` and `offset` are in `order`, which is by object and place in it."""
    padded = -(-nbytes // ALIGNMENT) * ALIGNMENT
    names, layer = np.unique(layers, return_inverse=True)
    group = np.zeros(len(names), np.int64)
    if len(names):
        each = np.bincount(owner * len(names) + layer, padded, minlength=ranks * len(names)).reshape(ranks, len(names))
        held = each[:, 0].copy()
        for n in range(1, len(names)):
            held = held + each[:, n]
            group[n] = group[n - 1] + bool(held.max() > limit)
            if group[n] != group[n - 1]:
                held = each[:, n].copy()
    mine = group[layer]
    order = np.lexsort((*lo.T[::-1], tensor, layer, mine, owner))
    mine, padded, owner = mine[order], padded[order], owner[order]
    chunk, before = cut(owner * (len(names) + 1) + mine, padded, np.full(len(order), limit))
    chunks = np.zeros(len(names) + 1, np.int64)
    np.maximum.at(chunks, mine + 1, chunk + 1)
    return (np.cumsum(chunks)[mine] + chunk).astype(np.int32), before, order


def cut(run: np.ndarray, sizes: np.ndarray, limit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cuts runs of items (equal `run`, which are neighbours) into pieces of about the limit: (piece in its run, place in the piece), int64."""
    if not len(run):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    before = np.cumsum(sizes) - sizes
    new = np.concatenate([[True], run[1:] != run[:-1]])
    before -= np.maximum.accumulate(np.where(new, before, 0))
    piece = before // limit
    new |= np.concatenate([[True], piece[1:] != piece[:-1]])
    begun = np.flatnonzero(new)
    of = np.cumsum(new) - 1
    place = before - before[begun][of]
    # pieces of a run are numbered without gaps
    run_start = np.concatenate([[True], run[1:] != run[:-1]])
    return of - np.maximum.accumulate(np.where(run_start, of, 0)), place
