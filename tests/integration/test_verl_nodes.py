"""verl's weights between nodes: rollout workers read from the pools of the trainers' nodes, and those on one node share a copy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.cluster import Cluster, unavailable
from mooncake_ray.testing import Allowed

pytest.importorskip("codetiming", reason="verl's workers need it")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(unavailable()), reason=f"no namespaces here: {unavailable()}")]

PROGRAM = """
import ray, mooncake_ray
from ray._private import state
mooncake_ray.install(capacity_bytes=128 << 20, prefault_bytes=16 << 20, linger_s=5.0, spill_dir="off")
ray.init(log_to_driver=False)

@ray.remote(num_cpus=0)
class Rank:
    def __init__(self, staging):
        from mooncake_ray.integrations.verl_checkpoint import MooncakeRayCheckpointEngine
        self.engine = MooncakeRayCheckpointEngine(1 << 20, chunk_megabytes=1 / 16, staging=staging, window=2, timeout_s=100)
    def call(self, method, **kwargs): return getattr(self.engine, method)(**kwargs)
    async def send(self, seed):
        from verl_actors import model
        return await self.engine.send_weights(iter(model(seed).items()), global_steps=seed)
    async def receive(self, seed):
        from verl_actors import model, same
        return same({n: t.clone() async for n, t in self.engine.receive_weights(global_steps=seed)}, model(seed))
    def put_here(self): return mooncake_ray.pool_stats()["bytes_put"]
    def objects(self): return mooncake_ray.pool_stats()["objects"]

def topology(metadata):
    from mooncake_ray.integrations.verl_checkpoint import MooncakeRayCheckpointEngine
    return MooncakeRayCheckpointEngine.build_topology(2, 3, metadata)

def on(node): return dict(resources={f"node{node}": 0.01})
for staging in ("version", "buckets"):
    senders = [Rank.options(**on(n)).remote(staging) for n in range(2)]
    receivers = [Rank.options(**on(n)).remote(staging) for n in (2, 2, 1)]
    everybody = senders + receivers
    for seed in (1, 2):
        metadata = ray.get([a.call.remote("prepare") for a in everybody], timeout=150)
        kwargs = [{k: v[i] for k, v in of.items()} for of, n in zip(topology(metadata), (2, 3)) for i in range(n)]
        board = kwargs[0]["topology"].board  # on the driver's node, with which it would end
        assert ray.get(board.is_there.remote(), timeout=150)
        assert state.actors(board._actor_id.hex())["Address"]["NodeID"] == ray.get_runtime_context().get_node_id()
        ray.get([a.call.remote("init_process_group", **k) for a, k in zip(everybody, kwargs)])
        before = ray.get(receivers[0].put_here.remote())
        done = ray.get([a.send.remote(seed) for a in senders] + [a.receive.remote(seed) for a in receivers], timeout=150)
        assert done[2:] == [True] * 3, done
        sent = sum(d["checkpoint_engine/payload_mbytes"] for d in done[:2]) * (1 << 20)
        came = ray.get(receivers[0].put_here.remote()) - before
        assert sent * 0.99 <= came <= sent * 1.1, (staging, sent, came)
        ray.get([a.call.remote("finalize") for a in everybody])
    for a in everybody: ray.kill(a)
print("all of them")
"""


@pytest.fixture
def leaks_allowed() -> Allowed:
    return Allowed(processes=("*",))


def test_between_nodes():
    with Cluster(3, env={"PYTHONPATH": str(Path(__file__).parent)}) as cluster:
        done = cluster.run(0, [sys.executable, "-c", PROGRAM], timeout_s=300)
        assert "all of them" in done.stdout
