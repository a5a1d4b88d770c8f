"""Weights get from trainers on two nodes to engines on two, each node with a network and a pool of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.cluster import Cluster, unavailable
from mooncake_ray.testing import Allowed

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=f"no namespaces here: {unavailable()}")

PROGRAM = """
import ray, mooncake_ray
from mooncake_ray.sync.group import WeightSyncGroup
from weight_actors import EngineRank, TrainerRank
mooncake_ray.install(capacity_bytes=128 << 20, prefault_bytes=16 << 20, linger_s=1.0, spill_dir="off")
ray.init(log_to_driver=False)
def on(node): return dict(resources={f"node{node}": 0.01}, num_cpus=0)
group = WeightSyncGroup("nodes", bucket_bytes=1 << 10)
trainers = [TrainerRank.options(**on(n % 2)).remote(group, "trainer", n, 2) for n in range(2)]
engines = [EngineRank.options(**on(1 + n)).remote(group, "e0", n, 2) for n in range(2)]
engines.append(EngineRank.options(**on(2)).remote(group, "e1", 0, 1))
ray.get([a.ready.remote() for a in (*trainers, *engines)], timeout=150)
for version, mode in enumerate(["p2p", "nccl", "delta", "p2p", "delta"]):
    ray.get([t.train.remote(version) for t in trainers])
    report = group.sync(mode=mode, timeout_s=100)
    assert (report.mode, report.version, sorted(report.engines)) == (mode, version, ["e0", "e1"]), report
    assert not report.fallbacks and not report.lost, report
    assert all(ray.get([e.has.remote(version) for e in engines])), (version, mode)
group.shutdown()
print("all of them")
"""


@pytest.fixture
def leaks_allowed() -> Allowed:
    return Allowed(processes=("*",))


def test_every_mode_between_nodes():
    with Cluster(3, env={"PYTHONPATH": str(Path(__file__).parent)}) as cluster:
        done = cluster.run(0, [sys.executable, "-c", PROGRAM], timeout_s=240)
        assert "all of them" in done.stdout
