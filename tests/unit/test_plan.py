"""The planner against whole tensors: what its reads move is, byte for byte, what was asked for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.placement import Fragment, Placement, packed_strides
from mooncake_ray.weights.plan import Topology, deliver_plan, divide, lower, publish_plan

DTYPES = {"uint8": np.uint8, "bfloat16": np.uint16, "float32": np.uint32, "int64": np.uint64}


def cuts(draw, length, parts):
    """Where a length is cut into parts, some maybe empty."""
    inner = sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))
    return [0, *inner, length]


@st.composite
def models(draw):
    out = []
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        name = f"layers.{draw(st.integers(0, 3))}.t{number}" if draw(st.booleans()) else f"t{number}"
        out.append(ParamMeta(name, draw(st.sampled_from(sorted(DTYPES))), shape))
    return out


@st.composite
def grids(draw, metas, prefix):
    """A placement: each tensor cut into a grid, each cell on some ranks; buffers packed."""
    ranks = [f"{prefix}{i}" for i in range(draw(st.integers(1, 5)))]
    held = {rank: [] for rank in ranks}
    for meta in metas:
        edges = [cuts(draw, n, draw(st.integers(1, 3))) for n in meta.shape]
        cells = [((), ())]
        for edge in edges:
            cells = [((*lo, a), (*hi, b)) for lo, hi in cells for a, b in itertools.pairwise(edge)]
        for n, (lo, hi) in enumerate(cells):
            for rank in draw(st.sets(st.sampled_from(ranks), min_size=1)):
                extent = np.array([[b - a for a, b in zip(lo, hi, strict=True)]], np.int64).reshape(1, -1)
                strides = tuple(packed_strides(extent, np.array([meta.itemsize]))[0].tolist())
                held[rank].append(Fragment(meta, lo, hi, f"{meta.name}/{n}", 0, strides))
    return Placement.join([Placement.of(rank, draw(st.permutations(fragments))) for rank, fragments in held.items()])


def wholes(metas):
    rng = np.random.default_rng(0)
    return {m.name: rng.integers(0, 255, m.nbytes, np.uint8).view(DTYPES[m.dtype]).reshape(m.shape) for m in metas}


def part(whole, lo, hi):
    d = whole.ndim
    at = tuple(slice(a, b) for a, b in zip(lo[len(lo) - d :], hi[len(hi) - d :], strict=True))
    return np.ascontiguousarray(whole[at]).reshape(-1).view(np.uint8)


def published(publication, source, tensors):
    """The objects, as the owners would write them: each copies from its own fragments only."""
    objects = [np.zeros(n, np.uint8) for n in publication.object_nbytes]
    for r in range(len(publication)):
        at = publication.fragment[r]
        assert source.ranks[source.rank[at]] == publication.ranks[publication.owner[r]]
        assert source.tensor[at] == publication.tensor[r]
        assert np.all(source.lo[at] <= publication.lo[r]) and np.all(publication.hi[r] <= source.hi[at])
        assert publication.offset[r] % 64 == 0
        data = part(tensors[publication.metas[publication.tensor[r]].name], publication.lo[r], publication.hi[r])
        assert len(data) == publication.nbytes[r]
        objects[publication.object_of[r]][publication.offset[r] :][: len(data)] = data
    return objects


def delivered(publication, delivery, objects):
    units = []
    for u in range(delivery.units):
        unit = np.zeros(delivery.unit_nbytes[u], np.uint8)
        written = np.zeros(len(unit), np.uint8)
        reads = lower(publication, delivery, u)
        for j, offset, to, nbytes in reads.runs.astype(np.int64).tolist():
            data = objects[reads.objects[j]][offset : offset + nbytes]
            assert len(data) == nbytes
            unit[to : to + nbytes] = data
            written[to : to + nbytes] += 1
        assert written.max(initial=0) <= 1
        units.append(unit)
    return units


@st.composite
def topologies(draw, ranks):
    hosts = {rank: f"h{draw(st.integers(0, 2))}" for rank in draw(st.sets(st.sampled_from(ranks)))}
    racks = {host: f"r{draw(st.integers(0, 1))}" for host in draw(st.sets(st.sampled_from(["h0", "h1", "h2"])))}
    return Topology(hosts, racks, draw(st.integers(0, 2)))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(64, 400))
def test_what_is_read_is_what_was_asked_for(data, bucket_bytes):
    metas = data.draw(models())
    source = data.draw(grids(metas, "trainer/"))
    target = divide(data.draw(grids(metas, "e/")), data.draw(st.integers(1, 400)))
    tensors = wholes(metas)
    topology = data.draw(st.none() | topologies([*source.ranks, *target.ranks]))
    hint = target if data.draw(st.booleans()) else None
    publication = publish_plan(source, topology=topology, target=hint, bucket_bytes=bucket_bytes)
    assert publication.load.sum() == sum(m.nbytes for m in metas)
    delivery = deliver_plan(publication, target, topology=topology)
    units = delivered(publication, delivery, published(publication, source, tensors))
    got = {rank: set(delivery.units_of(rank).tolist()) for rank in delivery.ranks}
    assert sum(len(units) for units in got.values()) == sum(len(delivery.members(u)) for u in range(delivery.units))
    for f in range(len(target)):
        box = delivery.box_of[f]
        meta = target.metas[target.tensor[f]]
        assert publication.metas[delivery.tensor[box]] == meta
        assert delivery.unit[box] in got[target.ranks[target.rank[f]]]
        there = units[delivery.unit[box]][delivery.offset[box] :][: delivery.nbytes[box]]
        assert np.array_equal(there, part(tensors[meta.name], target.lo[f], target.hi[f])), meta.name
    for u in range(delivery.units):
        members = delivery.members(u)
        assert delivery.leader[u] in members
        assert {delivery.ranks[m] for m in members} == {rank for rank, units in got.items() if u in units}


def whole(meta, rank, lo=None, hi=None):
    lo, hi = lo or (0,) * len(meta.shape), hi or meta.shape
    return Placement.of(rank, [Fragment(meta, lo, hi, "b", 0, (0,) * len(meta.shape))])


A, B = ParamMeta("a", "bfloat16", (8, 4)), ParamMeta("b", "bfloat16", (8, 4))


def test_overlap_is_refused():
    source = Placement.join([whole(A, "t0", (0, 0), (5, 4)), whole(A, "t1", (4, 0), (8, 4))])
    with pytest.raises(PlanError, match=r"overlap without being the same, in a: \[\[0, 0\], \[5, 4\]\) and \[\[4, 0\], \[8, 4\]\)"):
        publish_plan(source)


def test_what_nobody_has_is_refused():
    publication = publish_plan(Placement.join([whole(A, "t0", (0, 0), (4, 4)), whole(A, "t1", (5, 0), (8, 4))]))
    with pytest.raises(PlanError, match=r"of 1 tensor: a; .*56 of 64 bytes"):
        deliver_plan(publication, whole(A, "e0"))


def test_names_of_one_side_only_are_refused():
    both = publish_plan(Placement.of("t0", [Fragment(m, (0, 0), m.shape, m.name, 0, (8, 2)) for m in (A, B)]))
    with pytest.raises(PlanError, match="no rank of the target wants anything of 1 tensor of the source: b"):
        deliver_plan(both, whole(A, "e0"))
    deliver_plan(both, whole(A, "e0"), ignore=["b"])
    with pytest.raises(PlanError, match="the source has nothing of 1 tensor that the target wants: b"):
        deliver_plan(publish_plan(whole(A, "t0")), Placement.of("e0", [Fragment(m, (0, 0), m.shape, "x", 0, (8, 2)) for m in (A, B)]))
    with pytest.raises(PlanError, match=r"a is bfloat16 \[8, 4\] here, float32 \[8, 4\] there"):
        deliver_plan(publish_plan(whole(A, "t0")), whole(ParamMeta("a", "float32", (8, 4)), "e0"))
