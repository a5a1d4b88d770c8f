"""verl's checkpoint engine manager and workers, with the weights in the pool: real Ray actors, verl's own classes and its own order of calls."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import ray

pytest.importorskip("codetiming", reason="verl's workers need it")
from verl_actors import Rollout, Trainer, model, same
from verl_group import SMALL, leaks_allowed  # noqa: F401 - a fixture
from waiting import eventually

from mooncake_ray.errors import SyncAbortedError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
BACKEND, MODULE = "mooncake_ray", "mooncake_ray.integrations.verl_checkpoint"
TRAINERS, ROLLOUTS = 2, 3


class Replica:
    """What the manager asks of a rollout replica besides its workers: noted."""

    def __init__(self, workers) -> None:
        self.workers, self.calls = workers, []

    def __getattr__(self, name):
        async def called(**kwargs):
            self.calls.append(name)

        return called


def config():
    from verl.workers.config import CheckpointEngineConfig

    return CheckpointEngineConfig(
        backend=BACKEND, update_weights_bucket_megabytes=1, engine_kwargs={BACKEND: SMALL}, custom_backend_module=MODULE
    )


@pytest.fixture(scope="module")
def places(pool_ray):
    """verl's places for workers: a processor each, which verl's probe of ports needs for a moment, and workers do without."""
    from verl.single_controller.ray import RayResourcePool

    pool = RayResourcePool([3], use_gpu=False, max_colocate_count=1)
    pool.get_placement_groups(device_name="cpu")
    yield pool
    for pg in pool.pgs:
        ray.util.remove_placement_group(pg)


def group_of(places, begin: int, world: int, cls, *args):
    from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
    from verl.single_controller.ray.base import split_resource_pool

    part = split_resource_pool(places, [n for n in (begin, world, 3 - begin - world) if n])[1 if begin else 0]
    made = RayClassWithInitArgs(ray.remote(cls), *args)
    made.update_options({"num_cpus": 0})
    return RayWorkerGroup(part, made, device_name="cpu", use_gpu=False)


class Cluster:
    """Trainers and rollouts of one configuration, and verl's manager over them."""

    def __init__(self, places) -> None:
        from verl.checkpoint_engine import CheckpointEngineManager

        self.places, self.config = places, config()
        self.trainers = group_of(places, 0, TRAINERS, Trainer, self.config)
        self.rollouts = [self.rollout(n) for n in range(ROLLOUTS)]
        self.manager = CheckpointEngineManager(self.config, self.trainers, [Replica(r.workers) for r in self.rollouts])

    def rollout(self, number: int):
        return group_of(self.places, number, 1, Rollout, SimpleNamespace(name="test", checkpoint_engine=self.config), SimpleNamespace())

    def step(self, seed: int):
        self.trainers.train(seed)
        return self.manager.update_weights(global_steps=seed)

    def have(self, seed: int, *numbers: int) -> bool:
        """Whether those rollouts (by default all) have exactly that version. Keeps nothing of it."""
        held = [self.rollouts[n].held()[0] for n in numbers or range(len(self.rollouts))]
        return all(version == seed and same(weights, model(seed)) for version, weights in held)

    def replace(self, number: int) -> None:
        self.end([self.rollouts[number]])
        self.rollouts[number] = self.rollout(number)
        self.manager.replicas[number] = Replica(self.rollouts[number].workers)

    def end(self, groups=None) -> None:
        for group in groups or (self.trainers, *self.rollouts):
            for worker in group.workers:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.kill(worker)


@pytest.fixture(scope="module")
def cluster(places):
    made = Cluster(places)
    yield made
    made.end()
    eventually(lambda: objects() == 0, "what the workers had is gone with them")


def objects() -> int:
    import mooncake_ray

    return mooncake_ray.pool_stats()["objects"]


def test_every_rollout_gets_what_the_trainers_have(cluster):
    before = objects()
    for seed in (1, 2, 3):
        metrics = cluster.step(seed)
        assert 0 < metrics["checkpoint_engine/payload_mbytes"] < sum(t.nbytes for t in model(seed).values()) / (1 << 20)  # a rank's share
        assert cluster.have(seed)
    assert cluster.manager.replicas[0].calls[:4] == ["abort_all_requests", "release_kv_cache", "resume_kv_cache", "resume_generation"]
    eventually(lambda: objects() == before, "nothing is left of what was sent")


@pytest.mark.slow
def test_a_rollout_that_dies_before_it_has_all_leaves_the_others_as_they_were(cluster):
    cluster.step(10)
    cluster.rollouts[1].die_at_first_fetch()
    with pytest.raises((SyncAbortedError, ray.exceptions.RayActorError)):
        cluster.step(11)
    eventually(lambda: not alive(cluster.rollouts[1]))
    assert cluster.have(10, 0, 2)
    cluster.replace(1)
    cluster.step(12)
    assert cluster.have(12)


@pytest.mark.slow
def test_a_trainer_that_dies_leaves_every_rollout_as_it_was(places, cluster):
    cluster.step(20)
    cluster.trainers.die_at(["", "layers.2.up"])
    with pytest.raises((SyncAbortedError, ray.exceptions.RayActorError)):
        cluster.step(21)
    assert cluster.have(20)
    cluster.end([cluster.trainers])
    cluster.trainers = cluster.manager.actor_wg = group_of(places, 0, TRAINERS, Trainer, cluster.config)
    cluster.step(22)
    assert cluster.have(22)
    before = objects()
    cluster.step(23)
    eventually(lambda: objects() <= before, "nothing is left of what failed")


def alive(group) -> bool:
    from mooncake_ray.sync import lives

    return not any(lives.dead([worker._actor_id.hex() for worker in group.workers]))
