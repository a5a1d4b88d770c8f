"""The planner against whole tensors: what its reads move is, byte for byte, what was asked for."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.errors import PlanError
from mooncake_ray.weights import division
from mooncake_ray.weights.balance import fill
from mooncake_ray.weights.described import Parallel, described
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.models import config_of
from mooncake_ray.weights.placement import Fragment, Placement, packed_strides
from mooncake_ray.weights.plan import Planner, Topology, deliver_plan, divide, lower, publish_plan

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
            cells = [((*lo, a), (*hi, b)) for lo, hi in cells for a, b in pairwise(edge)]
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


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(64, 400))
def test_what_is_read_is_what_was_asked_for(data, bucket_bytes):
    metas = data.draw(models())
    source = data.draw(grids(metas, "trainer/"))
    target = data.draw(grids(metas, "e/"))
    tensors = wholes(metas)
    topology = data.draw(st.none() | topologies([*source.ranks, *target.ranks]))
    hint = target if data.draw(st.booleans()) else None
    with mock.patch.object(division, "_LEAST_PIECE", data.draw(st.sampled_from([1, 8, 4096]))):
        publication = publish_plan(source, topology=topology, target=hint, bucket_bytes=bucket_bytes)
        target = divide(target, data.draw(st.integers(1, 400)), data.draw(st.sampled_from([None, publication])))
    assert publication.load.sum() == sum(m.nbytes for m in metas) and np.all(publication.nbytes > 0)
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


def places(placement, f):
    """The bytes of a fragment, one by one."""
    extent, strides = placement.hi[f] - placement.lo[f], placement.strides[f]
    at = np.zeros(1, np.int64) + placement.offset[f]
    for n, stride in zip(extent, strides, strict=True):
        at = (at[:, None] + np.arange(n) * stride).reshape(-1)
    return (at[:, None] + np.arange(placement.itemsize[f])).reshape(-1)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_byte_is_written_once(data):
    """Boxes at random places of one matrix, or of its transpose: refused if they share a byte and are not at one place."""
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    turned = data.draw(st.booleans())
    strides = (4, 4 * rows) if turned else (4 * columns, 4)
    fragments = []
    for i in range(data.draw(st.integers(2, 4))):
        r0, c0 = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
        r1, c1 = data.draw(st.integers(r0 + 1, rows)), data.draw(st.integers(c0 + 1, columns))
        meta = ParamMeta(f"m{i}", "float32", (r1 - r0, c1 - c0))
        fragments.append(Fragment(meta, (0, 0), meta.shape, data.draw(st.sampled_from("xy")), r0 * strides[0] + c0 * strides[1], strides))
    target = Placement.of("e0", fragments)
    sharing = False
    for i in range(len(target)):
        for j in range(i):
            here, there = places(target, i), places(target, j)
            one = np.array_equal(here, there) and np.array_equal(target.hi[i], target.hi[j])
            sharing |= bool(target.buffer[i] == target.buffer[j] and not one and np.isin(here, there).any())
    publication = publish_plan(Placement.of("t0", fragments))
    if sharing:
        with pytest.raises(PlanError, match=r"e0 would be written twice, in buffer '[xy]': by m"):
            deliver_plan(publication, target)
    else:
        deliver_plan(publication, target)


# ---------------------------------------------------------------- invariants


def shuffled(data, placement):
    """The same ranks, joined in another order."""
    return Placement.join([placement.only(rank) for rank in data.draw(st.permutations(placement.ranks))])


def sent(publication):
    """What is published, by names."""
    owners = (publication.ranks[i] for i in publication.owner)
    return [*zip(publication.tensor.tolist(), publication.lo.tolist(), owners, publication.bucket.tolist(), strict=True)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_order_of_ranks_does_not_matter(data):
    metas = data.draw(models())
    source, target = data.draw(grids(metas, "t")), data.draw(grids(metas, "e"))
    one, other = publish_plan(source, bucket_bytes=256), publish_plan(shuffled(data, source), bucket_bytes=256)
    assert one.digest == other.digest and sent(one) == sent(other)
    turned = shuffled(data, target)
    first, second = deliver_plan(one, target), deliver_plan(other, turned)
    assert first.digest == second.digest
    for rank in first.ranks:
        assert np.array_equal(first.units_of(rank), second.units_of(rank))
        mine, same = (d.box_of[t.rank == t.ranks.index(rank)] for d, t in ((first, target), (second, turned)))
        assert np.array_equal(mine, same)


def same_delivery(a, b):
    assert a.digest == b.digest and np.array_equal(a.box_of, b.box_of) and np.array_equal(a.unit_nbytes, b.unit_nbytes)
    assert np.array_equal(a.op_nbytes, b.op_nbytes) and np.array_equal(a.unit_ops, b.unit_ops)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_planned_again_is_as_planned_from_nothing(data):
    """Engines come and go; what is planned on top of what is known equals a plan that knows nothing."""
    metas = data.draw(models())
    source = data.draw(grids(metas, "t"))
    engines = [data.draw(grids(metas, f"e{i}/")) for i in range(3)]
    engines.append(renamed(engines[0], "e9/"))
    planner = Planner(bucket_bytes=256, keep=data.draw(st.integers(1, 4)))
    for _ in range(4):
        chosen = data.draw(st.lists(st.integers(0, 3), min_size=1, unique=True))
        target = Placement.join([engines[i] for i in chosen])
        publication = planner.publish(source)
        same_delivery(planner.deliver(publication, target), deliver_plan(publish_plan(source, bucket_bytes=256), target))


def renamed(placement, prefix):
    ranks = tuple(f"{prefix}{i}" for i in range(len(placement.ranks)))
    return dataclasses.replace(placement, ranks=ranks)


def test_boxes_that_begin_alike_have_one_order():
    """A rank that wants the first rows of a tensor, and more of it elsewhere: it does not matter which was known first."""
    wide, narrow = (Fragment(A, (0, 0), (n, 4), f"b{n}", 0, (8, 2)) for n in (8, 4))
    publication = publish_plan(whole(A, "t0"))
    both = Placement.of("e0", [narrow, wide])
    for before in (narrow, wide):
        planner = Planner()
        planner.deliver(publication, Placement.of("e0", [before]))
        same_delivery(planner.deliver(publication, both), deliver_plan(publication, both))


def test_a_plan_is_made_once():
    planner = Planner()
    source, target = whole(A, "t0"), whole(A, "e0")
    publication = planner.publish(source)
    assert planner.publish(whole(A, "t0")) is publication
    assert planner.deliver(publication, target) is planner.deliver(publication, whole(A, "e0"))


def test_a_refused_engine_leaves_the_planner_as_it_was():
    planner = Planner()
    publication = planner.publish(whole(A, "t0", (0, 0), (4, 4)))
    good = whole(A, "e0", (0, 0), (4, 4))
    planner.deliver(publication, good)
    for _ in range(2):
        with pytest.raises(PlanError, match="32 of 64 bytes"):
            planner.deliver(publication, Placement.join([good, whole(A, "e1")]))
    same_delivery(planner.deliver(publication, good), deliver_plan(publication, good))


IN_ANOTHER_PROCESS = """
from mooncake_ray.weights import described, models, plan
config = models.config_of("qwen3-0.6b")
source = described.described(config, described.Parallel(tp=2, pp=2, dp=2), engine=False)
target = plan.divide(described.described(config, described.Parallel(tp=4, dp=2), engine=True))
publication = plan.publish_plan(source)
print(publication.digest, plan.deliver_plan(publication, target).digest)
"""


def test_digests_are_the_same_in_another_process():
    said = {
        subprocess.run(
            [sys.executable, "-c", IN_ANOTHER_PROCESS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1 and len(said.pop().split()) == 2


def test_nothing_at_all():
    nothing = Placement.join([Placement.of("t0", []), Placement.of("t1", [])])
    publication = publish_plan(nothing)
    delivery = deliver_plan(publication, Placement.of("e0", []))
    assert len(publication) == publication.buckets == delivery.units == 0
    assert len(delivery.units_of("e0")) == 0


def test_tensors_without_elements_or_dimensions():
    empty, scalar = ParamMeta("empty", "float32", (0, 4)), ParamMeta("scalar", "float32", ())
    fragments = [Fragment(empty, (0, 0), (0, 4), "x", 0, (16, 4)), Fragment(scalar, (), (), "y", 0, ())]
    publication = publish_plan(Placement.of("t0", fragments))
    delivery = deliver_plan(publication, Placement.of("e0", fragments))
    assert lower(publication, delivery, 0).runs.tolist() == [[0, 0, 0, 4]]


@pytest.mark.parametrize(
    ("shape", "most", "parts"),
    [
        ((10, 8), 160, [(10, 8)]),
        ((10, 8), 80, [(5, 8)] * 2),
        ((7, 8), 40, [(2, 8), (2, 8), (3, 8)]),  # a row too much is better than a part whose rows lie apart
        ((2, 8), 8, [(1, 4)] * 4),
        ((1, 8), 8, [(1, 4)] * 2),
        ((4,), 4, [(2,)] * 2),
        ((), 1, [()]),
    ],
)
def test_large_fragments_are_divided(shape, most, parts):
    meta = ParamMeta("m", "bfloat16", shape)
    strides = tuple(packed_strides(np.array([shape], np.int64).reshape(1, -1), np.array([2]))[0].tolist())
    placement = Placement.of("e0", [Fragment(meta, (0,) * len(shape), shape, "b", 64, strides)])
    out = divide(placement, most)
    assert sorted(tuple(e) for e in (out.hi - out.lo).tolist()) == sorted(parts)
    assert np.concatenate([places(out, i) for i in range(len(out))]).tolist() == places(placement, 0).tolist()


def columns(prefix, meta, edges):
    """A rank for each stretch of columns, from edge to edge."""
    parts = []
    for i, (a, b) in enumerate(pairwise(edges)):
        fragment = Fragment(meta, (0, a), (meta.shape[0], b), "m", 0, ((b - a) * meta.itemsize, meta.itemsize))
        parts.append(Placement.of(f"{prefix}{i}", [fragment]))
    return Placement.join(parts)


@pytest.mark.parametrize(("source", "target"), [([0, 96], [0, 32, 64, 96]), ([0, 32, 64, 96], [0, 96]), ([0, 48, 96], [0, 32, 64, 96])])
def test_rows_are_not_read_bit_by_bit(source, target):
    """Where either side has some columns of a matrix, both are cut alike, and each part is one run."""
    meta = ParamMeta("m", "bfloat16", (1000, 96))
    source, target = columns("t", meta, source), columns("e", meta, target)
    publication = publish_plan(source, target=target)
    parts = divide(target, along=publication)
    delivery = deliver_plan(publication, parts)
    runs = [lower(publication, delivery, u).runs for u in range(delivery.units)]
    assert sum(map(len, runs)) <= 4
    for u, data in enumerate(delivered(publication, delivery, published(publication, source, tensors := wholes([meta])))):
        for box in np.flatnonzero(delivery.unit == u):
            there = data[delivery.offset[box] :][: delivery.nbytes[box]]
            assert np.array_equal(there, part(tensors["m"], delivery.lo[box], delivery.hi[box]))
    assert np.all(publication.nbytes > 0) and np.all(delivery.nbytes > 0)
    # Without the hints it is right as well, but takes a run a row.
    publication = publish_plan(source)
    delivery = deliver_plan(publication, target)
    assert sum(len(lower(publication, delivery, u).runs) for u in range(delivery.units)) >= 1000


def test_small_boxes_are_not_cut_alike():
    meta = ParamMeta("m", "bfloat16", (16, 96))
    assert len(publish_plan(columns("t", meta, [0, 96]), target=columns("e", meta, [0, 32, 64, 96]))) == 1


def test_more_than_four_gibibytes():
    """Offsets in a tensor of 12 GiB, of which one rank wants the columns of a corner."""
    meta = ParamMeta("big", "bfloat16", (1 << 17, 49152))
    strides = (49152 * 2, 2)
    source = Placement.of("t0", [Fragment(meta, (0, 0), meta.shape, "b", 0, strides)])
    lo = (meta.shape[0] - 2, meta.shape[1] - 3)
    target = Placement.of("e0", [Fragment(meta, lo, meta.shape, "c", 0, (6, 2))])
    publication = publish_plan(source, bucket_bytes=1 << 40)
    reads = lower(publication, deliver_plan(publication, target), 0)
    begin = (lo[0] * meta.shape[1] + lo[1]) * 2
    assert begin > 1 << 33 and reads.runs.tolist() == [[0, begin, 0, 6], [0, begin + strides[0], 6, 6]]


def test_neighbours_are_read_in_one():
    """Rows that one rank has and another wants, of tensors that lie side by side in both objects."""
    metas = [ParamMeta(f"m{i}", "float32", (64, 16)) for i in range(4)]
    fragments = [Fragment(m, (0, 0), (64, 16), m.name, 0, (64, 4)) for m in metas]
    publication = publish_plan(Placement.of("t0", fragments))
    reads = lower(publication, deliver_plan(publication, Placement.of("e0", fragments)), 0)
    assert reads.runs.tolist() == [[0, 0, 0, 4 * 64 * 16 * 4]]


# ---------------------------------------------------------------- balance


def spread_of(loads):
    return loads.max() / loads.mean()


LAYOUTS = [
    ("qwen3-30b-a3b", "ep=8,etp=1,tp=2,dp=8,pp=2", "tp=4,dp=4"),
    ("qwen3-30b-a3b", "ep=4,etp=2,tp=4,dp=4", "ep=8,dp=16"),
    ("qwen3-0.6b", "tp=2,dp=8", "tp=1,dp=8"),
    ("qwen3-8b", "tp=8,cp=2,dp=2", "tp=2,pp=2,dp=3"),
]


@pytest.mark.parametrize(("model", "trainer", "engine"), LAYOUTS)
def test_senders_and_receivers_have_equal_shares(model, trainer, engine):
    config = config_of(model)
    source = described(config, Parallel.parse(trainer), engine=False)
    target = divide(described(config, Parallel.parse(engine), engine=True))
    publication = publish_plan(source)
    delivery = deliver_plan(publication, target)
    total = sum(m.nbytes for m in source.metas)
    assert publication.load.sum() == total
    assert delivery.op_nbytes.sum() == total, "each byte leaves once, however many engines there are"
    # Stages of a pipeline hold different amounts, which nobody can balance: each is looked at by itself.
    stages = Parallel.parse(trainer).pp
    for ranks in np.split(np.argsort([int(r.split("/")[1]) for r in publication.ranks]), stages):
        assert spread_of(publication.load[ranks]) <= 1.02
    assert spread_of(delivery.load) <= 1.05


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_random_sources_are_balanced(data):
    """Tensors of random sizes on all ranks alike: however they fall, everybody sends about the same."""
    ranks = data.draw(st.integers(2, 6))
    rows = data.draw(st.lists(st.integers(1, 3000), min_size=1, max_size=12))
    metas = [ParamMeta(f"layers.{i}.w", "float32", (n, 256)) for i, n in enumerate(rows)]
    fragments = [Fragment(m, (0, 0), m.shape, m.name, 0, (1024, 4)) for m in metas]
    publication = publish_plan(Placement.join([Placement.of(f"t{i}", fragments) for i in range(ranks)]))
    assert publication.load.max() <= publication.load.mean() * 1.02 + 2 * 4096


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_vessels_are_filled_to_one_level(data):
    k, r = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    numbers = lambda least: st.lists(st.lists(st.floats(least, 1e3), min_size=r, max_size=r), min_size=k, max_size=k)  # noqa: E731
    load, cost = np.array(data.draw(numbers(0.0))), np.array(data.draw(numbers(0.1)))
    amount = np.array(data.draw(st.lists(st.floats(1.0, 1e3), min_size=k, max_size=k)))
    got = fill(load, cost, amount)
    assert np.all(got >= 0) and np.allclose(got.sum(axis=1), amount)
    level = load + got * cost
    for i in range(k):
        top = level[i][got[i] > 1e-6 * amount[i]].max()
        assert np.all(level[i] >= top * (1 - 1e-6) - 1e-6), "who has less than the fullest that got something should have got more"


def test_who_is_near_sends():
    """Of two replicas the one on the receiver's host."""
    source = Placement.join([whole(A, "t0"), whole(A, "t1")])
    target = whole(A, "e0")
    for near in ("t0", "t1"):
        topology = Topology({near: "here", "e0": "here"})
        publication = publish_plan(source, topology=topology, target=target)
        assert [publication.ranks[o] for o in set(publication.owner.tolist())] == [near]
    # Whom it has come to once passes it on: of two that want it, the nearer one counts.
    target = Placement.join([target, whole(A, "e1")])
    for near in ("t0", "t1"):
        publication = publish_plan(source, topology=Topology({near: "here", "e0": "here", "e1": "there"}), target=target)
        assert [publication.ranks[o] for o in set(publication.owner.tolist())] == [near]
    for near in ("e0", "e1"):
        publication = publish_plan(whole(A, "t0"))
        delivery = deliver_plan(publication, target, topology=Topology({near: "here", "t0": "here"}))
        assert delivery.ranks[delivery.leader[0]] == near


def test_network_devices_are_shared():
    """Three ranks on a host with one device send together what the one on another host sends."""
    big = ParamMeta("big", "float32", (4096, 1024))
    source = Placement.join([whole(big, f"t{i}") for i in range(4)])
    hosts = {"t0": "a", "t1": "a", "t2": "a", "t3": "b"}
    load = publish_plan(source, topology=Topology(hosts, nics=1)).load
    assert load[3] == pytest.approx(load[:3].sum(), rel=0.02) and load[:3].max() <= 1.05 * load[:3].mean()


def test_receivers_begin_with_different_senders():
    metas = [ParamMeta(f"m{i}", "uint8", (1 << 20,)) for i in range(8)]
    rows = lambda rank, mine: Placement.of(rank, [Fragment(m, (0,), m.shape, m.name, 0, (1,)) for m in mine])  # noqa: E731
    source = Placement.join([rows(f"t{i}", metas[2 * i : 2 * i + 2]) for i in range(4)])
    target = Placement.join([rows(f"e{i}", metas) for i in range(4)])
    publication = publish_plan(source)
    delivery = deliver_plan(publication, target)
    first = []
    for me, rank in enumerate(delivery.ranks):
        units = delivery.units_of(rank)
        lead = delivery.leader[units] == me
        assert lead.sum() == 2 and lead[:2].all(), "what a rank leads comes first"
        first.append(delivery.leader[units[2]])
    assert len(set(first)) == 4
