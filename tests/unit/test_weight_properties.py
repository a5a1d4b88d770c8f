"""Random models from random layouts to random layouts, by every mode: bit for bit the unsharded model, or nothing has changed."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from local_group import Group
from weight_models import Part, Weights, layouts, models

from mooncake_ray.errors import ChecksumError, DeltaBaseError

MODES = ("p2p", "nccl", "delta", "auto")


def tries(n: int) -> settings:
    return settings(
        max_examples=n,
        deadline=None,
        phases=set(Phase) - {Phase.explain},  # takes minutes here, and explains little
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


class Setup:
    """Trainers with weights, and engines without, joined to a group."""

    def __init__(self, data: st.DataObject, group: Group, *, most: int = 4) -> None:
        self.group, self.model, self._data, self._most = group, data.draw(models()), data, most
        self._seed = data.draw(st.integers(0, 2**32 - 1))
        self.weights = Weights(self.model, self._seed)
        self.trained = self.parts(data.draw(layouts(self.model, source=True, most=most)))
        for rank, part in enumerate(self.trained):
            group.trainer(part.shard, rank, len(self.trained))
        self.served: dict[str, list[Part]] = {}
        self._like = None
        self.write()

    def parts(self, layout) -> list[Part]:
        out = []
        for held in layout.ranks:
            self._seed += 1
            out.append(Part(held, self._seed))
        return out

    def write(self) -> None:
        for part in self.trained:
            part.fill(self.weights)

    def change(self, how: str) -> None:
        self.weights.change(how)
        self.write()

    def join(self, *, disjoint: bool = False) -> str:
        """One more engine, laid out like the last one or otherwise."""
        name = f"e{len(self.served)}"
        if self._like is None or self._data.draw(st.booleans()):
            self._like = self._data.draw(layouts(self.model, source=disjoint, most=self._most))
        self.served[name] = self.parts(self._like)
        for rank, part in enumerate(self.served[name]):
            self.group.engine(part.shard, name, rank, len(self.served[name]))
        return name

    def check(self, version: int) -> None:
        assert self.group.versions() == dict.fromkeys(self.served, version)
        for name, parts in self.served.items():
            for rank, part in enumerate(parts):
                assert not (wrong := part.has(self.weights)), f"{name}/{rank} at version {version}: {wrong}"
        for part in self.trained:
            assert not (wrong := part.has(self.weights)), f"a trainer: {wrong}"


@st.composite
def ways(draw) -> list[tuple[str, str]]:
    """(mode, or "publish" for not at all; what changed since the last version) for some versions; the last one is delivered."""
    changes = st.sampled_from(["some", "some", "all", "tensor", "none"])
    some = draw(st.lists(st.tuples(st.sampled_from([*MODES, "publish"]), changes), max_size=3))
    return [*some, (draw(st.sampled_from(MODES)), draw(changes))]


@tries(120)
@given(st.data(), st.integers(64, 5000), st.sampled_from(MODES), ways())
def test_every_engine_has_the_unsharded_model(data, bucket_bytes, mode, ways):
    with Group(mode=mode, bucket_bytes=bucket_bytes) as group:
        setup = Setup(data, group)
        for _ in range(data.draw(st.integers(1, 2))):
            setup.join()
        version, late = -1, data.draw(st.integers(1, 4))
        for number, (way, change) in enumerate(ways):
            setup.change(change)
            version += 1
            if way == "publish":
                assert group.publish() == version
                continue
            if number == late:
                setup.join()
            report = group.sync(version, mode=way)
            event(f"mode {report.mode}")
            assert report.version == version and not report.lost
            assert way == "auto" or (report.mode == way and not [f for f in report.fallbacks if not f.startswith("delta: ")])
            setup.check(version)
        assert all(engine.weight_version == version for ranks in group.engines.values() for engine in ranks)


def flipped(rng: random.Random, notes: tuple[str, ...]):
    """Flips one bit of one of the things that come in under a note that begins so: soon, not necessarily the first."""
    left = [rng.randint(0, 3)]

    def spoil(note: str, data: np.ndarray) -> None:
        if not note.startswith(notes) or not len(data):
            return
        left[0] -= 1
        if left[0] == -1:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

    return spoil


@tries(80)
@given(st.data(), st.sampled_from(("p2p", "nccl", "delta")), st.integers(0, 2**32 - 1), st.sampled_from(("some", "all")))
def test_a_flipped_bit_is_found_and_nothing_has_changed(data, mode, seed, change):
    """Of what was read, broadcast or sent as a patch. Where nobody looks, between two boxes say, it does not matter."""
    with Group() as group:
        setup = Setup(data, group, most=3)
        setup.join(disjoint=True)
        setup.join(disjoint=True)
        group.sync()
        before = {part: part.snapshot() for parts in setup.served.values() for part in parts}
        setup.change(change)
        group.memory.spoil = flipped(random.Random(seed), ("unit", "received", "weights, 0 to 1"))
        try:
            group.sync(mode=mode)
        except ChecksumError:
            event(f"{mode}: found")
            assert set(group.versions().values()) == {0} and all(part.is_as(was) for part, was in before.items())
            assert not any(engine.is_paused or engine.poisoned for ranks in group.engines.values() for engine in ranks)
            group.memory.spoil = lambda note, data: None
            group.sync(mode="nccl" if mode == "nccl" else "p2p")  # a patch is as it is
        setup.check(1)


@tries(30)
@given(st.data())
def test_a_patch_against_another_version_is_refused_and_nothing_has_changed(data):
    with Group(mode="delta") as group:
        setup = Setup(data, group, most=3)
        setup.join()
        group.sync()
        (engine,) = [m for m in group.members if m.member.name == "e0/0"]
        seen, stage = [], engine.do_stage

        def with_older_patches(command):
            if (patches := command.arguments["patches"]) is not None:
                seen.append(
                    {n: group.memory.write(b.nbytes, partial(np.copyto, src=group.memory.view(b)), timeout_s=1) for n, b in patches.items()}
                )
                command = replace(command, arguments={**command.arguments, "patches": seen[0]})
            return stage(command)

        engine.do_stage = with_older_patches
        setup.change("all")
        assert group.sync().mode == "delta"
        setup.check(1)
        before = {part: part.snapshot() for part in setup.served["e0"]}
        setup.change("some")
        if not setup.served["e0"][0].held or not any(p.numel() for p in setup.served["e0"][0].views.values()):
            return  # this rank wants nothing, and so gets no patch
        with pytest.raises(DeltaBaseError, match="a patch to version 1 is against version 0; here is version 1"):
            group.sync()
        assert group.versions() == {"e0": 1} and all(part.is_as(was) for part, was in before.items())
        del engine.do_stage
        group.sync()
        setup.check(2)


@tries(30)
@given(st.data(), st.sampled_from(("p2p", "nccl", "delta")), st.integers(0, 2**32 - 1))
def test_ranks_that_want_the_same_and_have_something_else_are_found(data, mode, seed):
    rng = random.Random(seed)
    with Group() as group:
        setup = Setup(data, group, most=3)
        setup.join(disjoint=True)
        group.sync()
        victim = rng.choice([m for m in group.members if m.member.role == "engine"])
        stage = victim.do_stage

        def with_something_else(command):
            digests = stage(command).copy()
            if len(digests):
                digests[rng.randrange(len(digests))] ^= np.uint64(1 + rng.randrange(2**63))
            return digests

        victim.do_stage = with_something_else
        before = {part: part.snapshot() for part in setup.served["e0"]}
        setup.change("some")
        if not any(part.numel() for part in setup.served["e0"][victim.member.rank].views.values()):
            return  # it wants nothing
        with pytest.raises(ChecksumError, match=r"has other bytes than another rank|what arrived is not what was published"):
            group.sync(mode=mode)
        assert group.versions() == {"e0": 0} and all(part.is_as(was) for part, was in before.items())
        del victim.do_stage
        group.sync(mode=mode)
        setup.check(1)
