"""`Delivery`: who of the engines' ranks reads what of a publication, once for all that want the same box.

It proves, before a byte moves, that every element that the target wants is written exactly once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.alike import Alike
from mooncake_ray.weights.balance import least_loaded
from mooncake_ray.weights.boxes import Ragged, distinct, firsts, same_members
from mooncake_ray.weights.memory import refuse_shared
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.publication import ALIGNMENT, Publication, cut
from mooncake_ray.weights.reach import Ops, Reach, few, tensors
from mooncake_ray.weights.topology import Topology

__all__ = ["Delivery", "deliver", "deliver_plan"]

_LEAST_UNIT = 1 << 20
_UNITS_A_MEMBER = 12  # of a replica set, so that its members lead about equally much


@dataclass(frozen=True, eq=False)
class Delivery:
    """`b` distinct boxes that the target wants, in `u` units, by `p` reads of regions. Immutable."""

    publication: str
    """Its digest."""
    ranks: tuple[str, ...]
    """Of the target, sorted."""
    tensor: np.ndarray
    """int32 (b): index in the publication's metas. Boxes are sorted by unit."""
    lo: np.ndarray
    """int64 (b, d)."""
    hi: np.ndarray
    """int64 (b, d)."""
    nbytes: np.ndarray
    """int64 (b)."""
    unit: np.ndarray
    """int32 (b)."""
    offset: np.ndarray
    """int64 (b): bytes, in the unit's object, where the box lies packed in C order; a multiple of 64."""
    box_of: np.ndarray
    """int64 (fragments of the target): the box that each is. Not in the digest."""
    sets: Ragged
    """The replica sets: rising int32 indices in `ranks`."""
    unit_set: np.ndarray
    """int32 (u)."""
    leader: np.ndarray
    """int32 (u): the member that reads from the publication; the others read from it."""
    unit_bucket: np.ndarray
    """int32 (u): the last of the publication's buckets that it reads from. Units are sorted by it."""
    unit_nbytes: np.ndarray
    """int64 (u)."""
    unit_boxes: np.ndarray
    """int64 (u + 1): where the boxes of each begin."""
    unit_ops: np.ndarray
    """int64 (u + 1): where the ops of each begin."""
    op_region: np.ndarray
    """int64 (p): index in the publication. Ops are sorted by box, and so by unit."""
    op_box: np.ndarray
    """int64 (p)."""
    op_lo: np.ndarray
    """int64 (p, d): what of the tensor is read."""
    op_hi: np.ndarray
    """int64 (p, d)."""
    op_nbytes: np.ndarray
    """int64 (p)."""
    unit_source: np.ndarray
    """int32 (u): the source rank that its first read is from."""

    @property
    def units(self) -> int:
        return len(self.leader)

    def members(self, unit: int) -> np.ndarray:
        """int32, rising: the target ranks that want the unit."""
        return self.sets[self.unit_set[unit]]

    def units_of(self, rank: str) -> np.ndarray:
        """int64: the units that a rank is a member of, in the order in which it should get them: those that it leads before those that it gets
        from others; one from each sender in turn, so that all links are busy; and each rank begins with another sender.

        Raises:
            PlanError: no such rank.
        """
        if rank not in self.ranks:
            raise PlanError(f"{rank} is not a rank of this delivery, which has {len(self.ranks)}: {', '.join(self.ranks[:5])}")
        me = self.ranks.index(rank)
        in_set = np.zeros(len(self.sets), bool)
        in_set[np.repeat(np.arange(len(self.sets)), self.sets.lengths)[self.sets.values == me]] = True
        units = np.flatnonzero(in_set[self.unit_set])
        leads = self.leader[units] == me
        turn = (np.where(leads, self.unit_source[units], self.leader[units]) - me) % max(1, len(self.ranks), self._sources)
        of_sender = np.lexsort((units, turn, ~leads))  # one sender's after the other's, …
        run = 2 * turn[of_sender] + leads[of_sender]
        first = np.flatnonzero(np.append(True, run[1:] != run[:-1]))[: len(run)]
        nth = np.arange(len(run)) - np.repeat(first, np.diff(np.append(first, len(run))))
        return units[of_sender[np.lexsort((np.arange(len(run)), nth, ~leads[of_sender]))]]  # … and now one of each in turn

    @cached_property
    def _sources(self) -> int:
        return int(self.unit_source.max(initial=-1)) + 1

    @cached_property
    def load(self) -> np.ndarray:
        """int64 (ranks): bytes that each rank reads from the publication."""
        return np.bincount(self.leader, self._read, minlength=len(self.ranks)).astype(np.int64)

    @cached_property
    def _read(self) -> np.ndarray:
        done = np.concatenate([[0], np.cumsum(self.op_nbytes)])
        return done[self.unit_ops[1:]] - done[self.unit_ops[:-1]]

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex: the same in every process that planned for the same ranks, in whatever order it joined them."""
        out = hashlib.sha256(repr((self.publication, self.ranks)).encode())
        for array in (
            self.tensor, self.lo, self.hi, self.unit, self.offset, self.sets.start, self.sets.values, self.unit_set, self.leader,
            self.op_region, self.op_box, self.op_lo, self.op_hi,
        ):  # fmt: skip
            out.update(np.ascontiguousarray(array).data)
        return out.hexdigest()


def deliver_plan(
    publication: Publication, target: Placement, *, topology: Topology | None = None, ignore: Collection[str] = ()
) -> Delivery:
    """What each rank of the target reads, and from whom.

    Args:
        target: of all ranks together.
        topology: where ranks of both sides are; by default each is a host of its own.
        ignore: names of tensors of the source that no rank need want.

    Raises:
        PlanError: a tensor is of one side only, or of another dtype or shape there; some of what is wanted is in no region; or a byte of
            a rank's buffers would be written twice.
    """
    return deliver(Reach(publication), target, topology or Topology(), frozenset(ignore))


def deliver(reach: Reach, target: Placement, topology: Topology, ignore: frozenset[str]) -> Delivery:
    """As `deliver_plan`, but intersects only what the reach has not seen yet."""
    publication = reach.publication
    refuse_shared(target)
    tensor_of = _matched(publication, target, ignore)
    ranks = Alike.of(target, tensor_of[target.tensor])
    _extend(reach, target, ranks, tensor_of)
    held = [reach.boxes(digest) for digest in ranks.digests]
    every = np.concatenate(held) if held else np.zeros(0, np.int64)
    used, row = distinct([every])
    used = every[used]
    classes, which = same_members(row, np.repeat(np.arange(len(held)), [len(h) for h in held]), len(used))
    sets, place = ranks.ranks_of(classes)
    which, ready = place[which], reach.ready[used]
    tensor, lo, hi, nbytes = reach.tensor[used], reach.lo[used], reach.hi[used], reach.nbytes[used]

    padded = -(-nbytes // ALIGNMENT) * ALIGNMENT
    order = np.lexsort((*hi.T[::-1], *lo.T[::-1], tensor, which, ready))
    total = np.bincount(which, padded, minlength=len(sets))
    limit = np.clip(total // (_UNITS_A_MEMBER * np.maximum(sets.lengths, 1)), _LEAST_UNIT, publication.bucket_bytes).astype(np.int64)
    limit[sets.lengths == 1] = publication.bucket_bytes  # nobody else waits for it
    run = (ready * len(sets) + which)[order]
    chunk, offset = cut(run, padded[order], limit[which[order]])
    new = np.ones(len(order), bool)
    new[1:] = (run[1:] != run[:-1]) | (chunk[1:] != chunk[:-1])
    unit = np.cumsum(new) - 1
    begun = np.flatnonzero(new)
    unit_boxes = np.append(begun, len(order))
    last = unit_boxes[1:] - 1
    at = np.empty(len(order), np.int64)
    at[order] = np.arange(len(order))

    op_start, ops = reach.ops_of(used[order])
    unit_ops = op_start[unit_boxes]
    unit_set = which[order][begun]
    nbytes = nbytes[order]
    return Delivery(
        publication.digest,
        ranks.ranks,
        tensor[order].astype(np.int32),
        lo[order],
        hi[order],
        nbytes,
        unit.astype(np.int32),
        offset,
        _boxes_of(ranks, np.split(at[row], np.cumsum([len(h) for h in held])[:-1]), len(target)),
        sets,
        unit_set.astype(np.int32),
        _leaders(publication, topology, ranks.ranks, sets, unit_set, unit_ops, ops),
        ready[order][begun].astype(np.int32),
        offset[last] + nbytes[last],
        unit_boxes,
        unit_ops,
        ops.region,
        np.repeat(np.arange(len(order)), np.diff(op_start)),
        ops.lo,
        ops.hi,
        ops.nbytes,
        publication.owner[ops.region[unit_ops[:-1]]],
    )


def _extend(reach: Reach, target: Placement, ranks: Alike, tensor: np.ndarray) -> None:
    """Adds the classes that the reach has not."""
    new = [i for i, digest in enumerate(ranks.digests) if digest not in reach]
    if not new:
        return
    held = ranks.fragments.take(ranks.first[new])
    rows = held.values
    reach.add([ranks.digests[i] for i in new], held.start, tensor[target.tensor[rows]], target.lo[rows], target.hi[rows])


def _boxes_of(ranks: Alike, held: list[np.ndarray], n: int) -> np.ndarray:
    """int64 (n): the box of each fragment, from those of each class of ranks."""
    out = np.empty(n, np.int64)
    for rank, kind in enumerate(ranks.class_of.tolist()):
        out[ranks.fragments[rank]] = held[kind]
    return out


def _matched(publication: Publication, target: Placement, ignore: frozenset[str]) -> np.ndarray:
    """int64 (metas of the target): the same tensors' numbers in the publication; -1 for those that no fragment is of."""
    at = {m.name: i for i, m in enumerate(publication.metas)}
    has = (np.bincount(publication.tensor, minlength=len(publication.metas)) > 0).tolist()
    wanted = (np.bincount(target.tensor, minlength=len(target.metas)) > 0).tolist()
    out = [-1] * len(target.metas)
    unknown: list[str] = []
    different: list[tuple[ParamMeta, ParamMeta]] = []
    for number, meta in enumerate(target.metas):
        if not wanted[number]:
            continue
        found = at.get(meta.name)
        if found is None or not has[found]:
            unknown.append(meta.name)
        elif publication.metas[found] is not meta and publication.metas[found] != meta:
            different.append((publication.metas[found], meta))
        else:
            out[number] = found
    mapped = set(out)
    unwanted = [m.name for i, m in enumerate(publication.metas) if has[i] and i not in mapped and m.name not in ignore]
    unwanted = [name for name in unwanted if name not in {a.name for a, _ in different}]
    problems = []
    if different:
        shown = "; ".join(f"{a.name} is {a.dtype} {list(a.shape)} here, {b.dtype} {list(b.shape)} there" for a, b in different[:5])
        problems.append(f"{tensors(len(different))} not the same to source and target: {shown}")
    if unknown:
        problems.append(f"the source has nothing of {tensors(len(unknown))} that the target wants: {few(unknown)}")
    if unwanted:
        problems.append(f"no rank of the target wants anything of {tensors(len(unwanted))} of the source: {few(unwanted)}")
    if problems:
        raise PlanError("; and ".join(problems))
    return np.array(out, np.int64)


def _leaders(
    publication: Publication, topology: Topology, ranks: tuple[str, ...], sets: Ragged, unit_set: np.ndarray, unit_ops: np.ndarray,
    ops: Ops,
) -> np.ndarray:  # fmt: skip
    """int32 (u): by received bytes times distance, the longest unit first."""
    nic, nics = topology.nics_of(ranks)
    done = np.concatenate([[0], np.cumsum(ops.nbytes)])
    sizes = done[unit_ops[1:]] - done[unit_ops[:-1]]
    host, hosts = topology.hosts_of(ranks)
    from_host, from_hosts = topology.hosts_of(publication.ranks)
    distance = topology.distances(from_hosts, hosts)
    if np.all(distance == distance[:, :1]):  # nobody is nearer than anybody else
        return least_loaded(sizes, unit_set, sets, None, nic, np.zeros(nics))
    unit = np.repeat(np.arange(len(sizes)), np.diff(unit_ops))
    first, pair = distinct([unit, from_host[publication.owner[ops.region]]])
    share = np.bincount(pair, ops.nbytes) / sizes[unit[first]]
    start, far = firsts(unit[first], len(sizes)), distance[from_host[publication.owner[ops.region[first]]]] * share[:, None]
    each = np.add.reduceat(far, start[:-1], axis=0) if len(sizes) else far
    return least_loaded(sizes, unit_set, sets, lambda items, members: each[items][:, host[members]], nic, np.zeros(nics))
