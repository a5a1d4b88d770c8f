"""A job that weights are synced in: its members die and fail in tests, and are there again for the next."""

from __future__ import annotations

import uuid

import ray
from weight_actors import EngineRank, TrainerRank

from mooncake_ray.sync.group import WeightSyncGroup

S = 150


class Job:
    """Two trainer ranks, and two engines of two ranks each. What of it died in a test is there again in the next."""

    def __init__(self) -> None:
        self.group = WeightSyncGroup(f"test-{uuid.uuid4().hex[:8]}", liveness_s=30)
        self.trainers = [self.trainer(rank) for rank in range(2)]
        self.engines = {name: self.engine(name) for name in ("e0", "e1")}

    def trainer(self, rank: int):
        return TrainerRank.remote(self.group, "trainer", rank, 2)

    def engine(self, name: str):
        return [EngineRank.remote(self.group, name, rank, 2) for rank in range(2)]

    def heal(self) -> None:
        for rank, trainer in enumerate(self.trainers):
            if not lives(trainer):
                self.trainers[rank] = self.trainer(rank)
        for name, ranks in self.engines.items():
            if not all([lives(e) for e in ranks]):
                for e in ranks:  # whoever runs engines starts the whole of one anew
                    ray.kill(e)
                self.engines[name] = self.engine(name)
        members = [*self.trainers, *(e for ranks in self.engines.values() for e in ranks)]
        ray.get([m.no_trap.remote() for m in members], timeout=S)

    def end(self) -> None:
        self.group.shutdown()
        for actor in (*self.trainers, *(e for ranks in self.engines.values() for e in ranks)):
            ray.kill(actor)

    def train(self, seed: int) -> None:
        ray.get([t.train.remote(seed) for t in self.trainers], timeout=S)

    def serve(self, seed: int, *names: str) -> bool:
        return all(ray.get([e.has.remote(seed) for name in names for e in self.engines[name]], timeout=S))


def lives(actor) -> bool:
    try:
        return ray.get(actor.ready.remote(), timeout=S)
    except ray.exceptions.RayActorError:
        return False
