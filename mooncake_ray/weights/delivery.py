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
from mooncake_ray.weights.balance import least_loaded
from mooncake_ray.weights.boxes import Ragged, distinct, firsts, meetings, same_members
from mooncake_ray.weights.demand import widened
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.publication import ALIGNMENT, Publication, cut
from mooncake_ray.weights.topology import Topology

__all__ = ["Delivery", "deliver_plan"]

_LEAST_UNIT = 1 << 20
_UNITS_A_MEMBER = 32  # of a replica set, so that its members lead about equally much


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
        """int64: the units that a rank is a member of, in the order in which it should get them: by bucket; those that it leads before those
        that it gets from others; and each rank begins with another sender.

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
        return units[np.lexsort((units, turn, ~leads, self.unit_bucket[units]))]

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
        PlanError: a tensor is of one side only, or of another dtype or shape there; or some of what is wanted is in no region.
    """
    topology = topology or Topology()
    tensor_of = _matched(publication, target, frozenset(ignore))
    names = np.array(target.ranks, object)
    by_name = np.argsort(names, kind="stable") if len(names) else np.zeros(0, np.int64)
    place = np.empty(len(names), np.int32)
    place[by_name] = np.arange(len(names), dtype=np.int32)
    ranks = tuple(names[by_name].tolist())
    d = max(publication.lo.shape[1], target.lo.shape[1])
    regions = (publication.tensor, widened(publication.lo, d, 0), widened(publication.hi, d, 1))

    first, box_of = distinct([tensor_of[target.tensor], *target.lo.T, *target.hi.T])
    tensor = tensor_of[target.tensor[first]]
    lo, hi = widened(target.lo[first], d, 0), widened(target.hi[first], d, 1)
    itemsize = publication.itemsize[tensor] if len(tensor) else np.zeros(0, np.int64)
    nbytes = np.prod(hi - lo, axis=1) * itemsize
    found = [np.stack(pairs) for pairs in meetings((tensor, lo, hi), regions, publication.busiest)]
    box, region = np.concatenate(found, axis=1) if found else np.zeros((2, 0), np.int64)
    op_lo, op_hi = np.maximum(lo[box], regions[1][region]), np.minimum(hi[box], regions[2][region])
    op_nbytes = np.prod(op_hi - op_lo, axis=1) * itemsize[box]
    _prove(publication, tensor, lo, hi, nbytes, np.bincount(box, op_nbytes, minlength=len(tensor)))

    sets, which = same_members(box_of, place[target.rank], len(first))
    ready = np.zeros(len(first), np.int64)  # the bucket that a box is complete with
    np.maximum.at(ready, box, publication.bucket[region])
    padded = -(-nbytes // ALIGNMENT) * ALIGNMENT
    order = np.lexsort((*lo.T[::-1], tensor, which, ready))
    total = np.bincount(which, padded, minlength=len(sets))
    limit = np.clip(total // (_UNITS_A_MEMBER * np.maximum(sets.lengths, 1)), _LEAST_UNIT, publication.bucket_bytes).astype(np.int64)
    run = ready[order] * len(sets) + which[order]
    chunk, offset = cut(run, padded[order], limit[which[order]])
    new = np.ones(len(order), bool)
    new[1:] = (run[1:] != run[:-1]) | (chunk[1:] != chunk[:-1])
    unit = np.cumsum(new) - 1
    begun = np.flatnonzero(new)
    unit_boxes = np.append(begun, len(order))
    last = unit_boxes[1:] - 1
    at = np.empty(len(order), np.int64)
    at[order] = np.arange(len(order))

    box = at[box]
    by_box = np.lexsort((region, box))
    box, region, op_lo, op_hi, op_nbytes = (a[by_box] for a in (box, region, op_lo, op_hi, op_nbytes))
    unit_ops = firsts(unit[box], len(begun))
    unit_set = which[order][begun]
    first_region = region[unit_ops[:-1]]
    unit_source = publication.owner[first_region]
    leader = _leaders(publication, topology, ranks, sets, unit_set, unit_ops, op_nbytes, region)
    return Delivery(
        publication.digest,
        ranks,
        tensor[order].astype(np.int32),
        lo[order],
        hi[order],
        nbytes[order],
        unit.astype(np.int32),
        offset,
        at[box_of],
        sets,
        unit_set.astype(np.int32),
        leader,
        ready[order][begun].astype(np.int32),
        offset[last] + nbytes[order][last],
        unit_boxes,
        unit_ops,
        region,
        box,
        op_lo,
        op_hi,
        op_nbytes,
        unit_source,
    )


def _matched(publication: Publication, target: Placement, ignore: frozenset[str]) -> np.ndarray:
    """int64 (metas of the target): the same tensors' numbers in the publication; -1 for those that no fragment is of."""
    at = {m.name: i for i, m in enumerate(publication.metas)}
    has = np.zeros(len(publication.metas), bool)
    has[publication.tensor] = True
    wanted = np.zeros(len(target.metas), bool)
    wanted[target.tensor] = True
    out = np.full(len(target.metas), -1, np.int64)
    unknown: list[str] = []
    different: list[tuple[ParamMeta, ParamMeta]] = []
    for number, meta in enumerate(target.metas):
        if not wanted[number]:
            continue
        found = at.get(meta.name)
        if found is None or not has[found]:
            unknown.append(meta.name)
        elif publication.metas[found] != meta:
            different.append((publication.metas[found], meta))
        else:
            out[number] = found
    mapped = set(out.tolist())
    unwanted = [m.name for i, m in enumerate(publication.metas) if has[i] and i not in mapped and m.name not in ignore]
    unwanted = [name for name in unwanted if name not in {a.name for a, _ in different}]
    problems = []
    if different:
        shown = "; ".join(f"{a.name} is {a.dtype} {list(a.shape)} here, {b.dtype} {list(b.shape)} there" for a, b in different[:5])
        problems.append(f"{_tensors(len(different))} not the same to source and target: {shown}")
    if unknown:
        problems.append(f"the source has nothing of {_tensors(len(unknown))} that the target wants: {_few(unknown)}")
    if unwanted:
        problems.append(f"no rank of the target wants anything of {_tensors(len(unwanted))} of the source: {_few(unwanted)}")
    if problems:
        raise PlanError("; and ".join(problems))
    return out


def _prove(publication: Publication, tensor: np.ndarray, lo: np.ndarray, hi: np.ndarray, nbytes: np.ndarray, covered: np.ndarray) -> None:
    """Regions have nothing in common, so a box is covered exactly once if what it has in common with them adds up to it."""
    bad = np.flatnonzero(covered != nbytes)
    if not len(bad):
        return
    tensors = list(dict.fromkeys(publication.metas[t].name for t in tensor[bad].tolist()))
    i = bad[0]
    raise PlanError(
        f"the source lacks some of what the target wants of {_tensors(len(tensors))}: {_few(tensors)}; "
        f"of [{lo[i].tolist()}, {hi[i].tolist()}) of {publication.metas[tensor[i]].name} it has {int(covered[i])} of {int(nbytes[i])} bytes"
    )


def _leaders(
    publication: Publication, topology: Topology, ranks: tuple[str, ...], sets: Ragged, unit_set: np.ndarray, unit_ops: np.ndarray,
    op_nbytes: np.ndarray, region: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """int32 (u): by received bytes times distance, the longest unit first."""
    nic, nics = topology.nics_of(ranks)
    done = np.concatenate([[0], np.cumsum(op_nbytes)])
    sizes = done[unit_ops[1:]] - done[unit_ops[:-1]]
    host, hosts = topology.hosts_of(ranks)
    from_host, from_hosts = topology.hosts_of(publication.ranks)
    distance = topology.distances(from_hosts, hosts)
    if np.all(distance == distance[:, :1]):  # nobody is nearer than anybody else
        return least_loaded(sizes, unit_set, sets, None, nic, np.zeros(nics))
    unit = np.repeat(np.arange(len(sizes)), np.diff(unit_ops))
    first, pair = distinct([unit, from_host[publication.owner[region]]])
    share = np.bincount(pair, op_nbytes) / sizes[unit[first]]
    start, far = firsts(unit[first], len(sizes)), distance[from_host[publication.owner[region[first]]]] * share[:, None]
    each = np.add.reduceat(far, start[:-1], axis=0) if len(sizes) else far
    return least_loaded(sizes, unit_set, sets, lambda items, members: each[items][:, host[members]], nic, np.zeros(nics))


def _tensors(n: int) -> str:
    return "1 tensor" if n == 1 else f"{n} tensors"


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
