"""Weights get from trainer ranks to engine ranks on a real Ray cluster of one node: any layout to any, all or nothing."""

from __future__ import annotations

import uuid

import pytest
import ray
from weight_actors import EngineRank, TrainerRank

from mooncake_ray.sync.group import WeightSyncGroup


@pytest.fixture
def group(pool_ray):
    group = WeightSyncGroup(f"test-{uuid.uuid4().hex[:8]}")
    yield group
    group.shutdown()


def started(kind, group, tp: int, *names: str):
    actors = [kind.remote(group, name, rank, tp) for name in names for rank in range(tp)]
    ray.get([a.ready.remote() for a in actors], timeout=150)
    return actors


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("source", "target", "mode"),
    [(2, 4, "p2p"), slow(1, 1, "auto"), slow(4, 2, "p2p"), slow(2, 3, "nccl"), slow(2, 3, "delta"), slow(3, 2, "delta")],
)
def test_every_engine_has_what_the_trainers_have(group, source, target, mode):
    trainers = started(TrainerRank, group, source, "trainer")
    engines = started(EngineRank, group, target, "e0", "e1")
    for version in range(3):
        ray.get([t.train.remote(version) for t in trainers])
        report = group.sync(mode=mode, timeout_s=150)
        if mode == "delta":
            assert report.mode == "delta"
        assert report.version == version and not report.fallbacks and sorted(report.engines) == ["e0", "e1"] and not report.lost
        assert all(ray.get([e.has.remote(version) for e in engines])), "bit for bit what the unsharded model's parts are"
        assert group.versions() == {"e0": version, "e1": version}
