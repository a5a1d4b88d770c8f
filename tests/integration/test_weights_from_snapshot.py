"""A snapshot on disk is a trainer like any other: engines of a group get its weights, in their own layout."""

from __future__ import annotations

import uuid

import ray
from weight_actors import EngineRank, cut, model

from mooncake_ray.sync.group import WeightSyncGroup


@ray.remote(num_cpus=0)
class SnapshotRank:
    def __init__(self, group, directory: str, rank: int, world: int) -> None:
        import mooncake_ray
        from mooncake_ray.weights.snapshot import SnapshotSource

        mooncake_ray.install()
        self.member = group.trainer(SnapshotSource(directory, rank=rank, world=world), rank, world)

    def ready(self) -> bool:
        return True


def test_engines_start_from_a_snapshot(pool_ray, tmp_path):
    from mooncake_ray.weights.snapshot import SnapshotStore
    from mooncake_ray.weights.source import StateDictSource

    SnapshotStore(tmp_path).save(7, {f"t{n}": StateDictSource(*cut(model(7), n, 4)) for n in range(4)})
    group = WeightSyncGroup(f"test-{uuid.uuid4().hex[:8]}")
    try:
        ranks = [SnapshotRank.remote(group, str(tmp_path), n, 2) for n in range(2)]
        engines = [EngineRank.remote(group, "e0", n, 3) for n in range(3)]
        ray.get([a.ready.remote() for a in (*ranks, *engines)], timeout=150)
        assert group.sync(7, timeout_s=150).version == 7
        assert all(ray.get([e.has.remote(7) for e in engines]))
    finally:
        group.shutdown()
