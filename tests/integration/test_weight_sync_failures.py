"""Members of a group die and fail at every step: no engine ever serves a mixture, every call ends, and who comes back is brought up to date."""

from __future__ import annotations

import uuid

import pytest
import ray
from conftest import until
from weight_actors import EngineRank, TrainerRank

from mooncake_ray.errors import StaleVersionError, SyncAbortedError, SyncTimeoutError
from mooncake_ray.sync.group import WeightSyncGroup

S = 60


@pytest.fixture
def group(pool_ray):
    group = WeightSyncGroup(f"test-{uuid.uuid4().hex[:8]}", liveness_s=5)
    yield group
    group.shutdown()


class Job:
    """Two trainer ranks, and two engines of two ranks each."""

    def __init__(self, group) -> None:
        self.group = group
        self.trainers = [TrainerRank.remote(group, "trainer", rank, 2) for rank in range(2)]
        self.engines = {name: self.engine(name) for name in ("e0", "e1")}
        self.ready(*self.trainers, *self.engines["e0"], *self.engines["e1"])

    def engine(self, name: str):
        return [EngineRank.remote(self.group, name, rank, 2) for rank in range(2)]

    def ready(self, *actors) -> None:
        ray.get([a.ready.remote() for a in actors], timeout=S)

    def train(self, seed: int) -> None:
        ray.get([t.train.remote(seed) for t in self.trainers], timeout=S)

    def serve(self, seed: int, *names: str) -> bool:
        return all(ray.get([e.has.remote(seed) for name in names for e in self.engines[name]], timeout=S))


@pytest.fixture
def job(group):
    job = Job(group)
    job.train(0)
    assert group.sync(timeout_s=S).version == 0
    job.train(1)
    return job


@pytest.mark.parametrize(("step", "after"), [("stage", False), ("stage", True), ("commit", False), ("commit", True), ("resume", False)])
def test_an_engine_that_dies_is_left_out_and_comes_back(job, group, step, after):
    ray.get(job.engines["e1"][1].die_at.remote(step, after))
    report = group.sync(timeout_s=S)
    assert report.engines == ["e0"] and list(report.lost) == ["e1"]
    assert job.serve(1, "e0") and group.versions()["e0"] == 1
    assert group.versions().get("e1", -1) != 1
    ray.kill(job.engines["e1"][0])  # whoever runs engines starts the whole of it anew
    job.engines["e1"] = job.engine("e1")
    job.ready(*job.engines["e1"])
    assert group.wait_for(1, timeout_s=S) == 1
    assert job.serve(1, "e0", "e1")


def test_an_engine_that_fails_to_stage_stops_the_version_for_all(job, group):
    ray.get(job.engines["e1"][0].fail_at.remote("stage", 2))  # in both modes that are tried
    with pytest.raises(SyncAbortedError, match="stage was to fail"):
        group.sync(timeout_s=S)
    assert job.serve(0, "e0", "e1") and group.versions() == {"e0": 0, "e1": 0}
    report = group.sync(timeout_s=S)
    assert report.version == 1 and job.serve(1, "e0", "e1"), "it was published already, and is delivered now"


def test_what_another_mode_can_do_is_said(job, group):
    ray.get(job.engines["e1"][0].fail_at.remote("stage"))
    report = group.sync(timeout_s=S)
    assert report.mode == "nccl" and "stage was to fail" in report.fallbacks[0] and job.serve(1, "e0", "e1")


def test_an_engine_that_fails_to_apply_is_restored(job, group):
    ray.get(job.engines["e0"][1].fail_at.remote("commit"))
    report = group.sync(timeout_s=S)
    assert report.engines == ["e1"] and list(report.lost) == ["e0"] and job.serve(1, "e1")
    assert group.wait_for(1, timeout_s=S) == 1 and job.serve(1, "e0")


@pytest.mark.parametrize("after", [False, True])
def test_a_trainer_that_dies_publishing_leaves_all_as_it_was(job, group, after):
    ray.get(job.trainers[1].die_at.remote("publish", after))
    with pytest.raises(SyncAbortedError, match=r"version 1 was not published .*trainer/1"):
        group.sync(timeout_s=S)
    assert job.serve(0, "e0", "e1") and group.versions() == {"e0": 0, "e1": 0}
    job.trainers[1] = TrainerRank.remote(group, "trainer", 1, 2)
    job.ready(job.trainers[1])
    job.train(2)
    assert group.sync(timeout_s=S).version >= 1 and job.serve(2, "e0", "e1")


def test_a_trainer_that_is_gone_is_waited_for_so_long(job, group):
    ray.kill(job.trainers[0])
    with pytest.raises((SyncTimeoutError, SyncAbortedError), match="trainer"):
        group.sync(timeout_s=6)
    assert job.serve(0, "e0", "e1")


@pytest.mark.parametrize("step", ["publish", "stage", "commit"])
def test_a_coordinator_that_dies_is_started_again(job, group, step):
    """In the middle of a step: what was asked for is done by the next."""
    victim = job.trainers[0] if step == "publish" else job.engines["e0"][0]
    ray.get(victim.kill_at.remote(step, group))
    report = group.sync(timeout_s=S)
    assert report.version == 1 and job.serve(1, "e0", "e1")
    job.train(2)
    assert group.sync(timeout_s=S).version == 2 and job.serve(2, "e0", "e1")


def test_late_joiners(job, group):
    job.engines["e2"] = job.engine("e2")
    job.ready(*job.engines["e2"])
    assert group.wait_for(0, engines=["e2"], timeout_s=S) == 0 and job.serve(0, "e2"), "what was published, not what is trained"
    group.sync(timeout_s=S)
    assert job.serve(1, "e0", "e1", "e2")


def test_versions_only_grow(job, group):
    assert group.publish(5, timeout_s=S) == 5
    with pytest.raises(StaleVersionError, match="version 3 is not newer than 5"):
        group.publish(3, timeout_s=S)
    assert group.sync(timeout_s=S).version == 5 and job.serve(1, "e0", "e1")
    with pytest.raises(StaleVersionError):
        group.sync(4, timeout_s=S)


def test_trainers_publish_by_themselves(job, group):
    assert ray.get([t.publish.remote() for t in job.trainers], timeout=S) == [1, 1]
    job.train(9)  # engines get what was published
    assert group.sync(timeout_s=S).version == 1 and job.serve(1, "e0", "e1")
    with pytest.raises(SyncTimeoutError, match=r"trainer ranks \[1\] have not published"):
        ray.get(job.trainers[0].publish.remote(1.0), timeout=S)


def test_nothing_is_left_in_the_pool(job, group):
    import mooncake_ray

    for version in range(1, 4):
        job.train(version)
        group.sync(timeout_s=S)
    until(lambda: mooncake_ray.pool_stats()["leases"] == 0)
    sizes = [mooncake_ray.pool_stats()["used_bytes"]]
    job.train(4)
    group.sync(timeout_s=S)
    until(lambda: mooncake_ray.pool_stats()["used_bytes"] <= sizes[0], lambda: (sizes, mooncake_ray.pool_stats()))
