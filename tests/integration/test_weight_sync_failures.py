"""Members of a group die and fail at every step: no engine ever serves a mixture, every call ends, and who comes back is brought up to date."""

from __future__ import annotations

import uuid

import pytest
import ray
from conftest import until
from weight_actors import EngineRank, TrainerRank

import mooncake_ray
from mooncake_ray.errors import StaleVersionError, SyncAbortedError, SyncTimeoutError
from mooncake_ray.sync.group import WeightSyncGroup
from mooncake_ray.testing import Allowed

S = 60


class Job:
    """Two trainer ranks, and two engines of two ranks each. What of it died in a test is there again in the next."""

    def __init__(self) -> None:
        self.group = WeightSyncGroup(f"test-{uuid.uuid4().hex[:8]}", liveness_s=5)
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

    def train(self, seed: int) -> None:
        ray.get([t.train.remote(seed) for t in self.trainers], timeout=S)

    def serve(self, seed: int, *names: str) -> bool:
        return all(ray.get([e.has.remote(seed) for name in names for e in self.engines[name]], timeout=S))


def lives(actor) -> bool:
    try:
        return ray.get(actor.ready.remote(), timeout=S)
    except ray.exceptions.RayActorError:
        return False


@pytest.fixture(scope="module")
def one_job(pool_ray):
    job = Job()
    job.heal()
    job.group.sync(timeout_s=S)
    yield job
    job.group.shutdown()
    for actor in (*job.trainers, *(e for ranks in job.engines.values() for e in ranks)):
        ray.kill(actor)


@pytest.fixture
def leaks_allowed() -> Allowed:
    return Allowed(processes=("*",), descriptors=("socket:*",))  # those that were started anew


@pytest.fixture
def job(one_job):
    """All serve one version, which `before` is, and trainers have the next."""
    one_job.heal()
    one_job.train(0)
    one_job.before = one_job.group.sync(timeout_s=S).version
    one_job.train(1)
    return one_job


@pytest.mark.parametrize(("step", "after"), [("stage", False), ("stage", True), ("commit", False), ("commit", True), ("resume", False)])
def test_an_engine_that_dies_is_left_out_and_comes_back(job, step, after):
    ray.get(job.engines["e1"][1].die_at.remote(step, after))
    report = job.group.sync(timeout_s=S)
    assert report.engines == ["e0"] and list(report.lost) == ["e1"]
    assert job.serve(1, "e0") and job.group.versions()["e0"] == report.version
    assert job.group.versions().get("e1", -1) != report.version
    job.heal()
    assert job.group.wait_for(report.version, engines=["e0", "e1"], timeout_s=S) == report.version
    assert job.serve(1, "e0", "e1")


def test_an_engine_that_fails_to_stage_stops_the_version_for_all(job):
    ray.get(job.engines["e1"][0].fail_at.remote("stage", 2))  # in both modes that are tried
    with pytest.raises(SyncAbortedError, match="stage was to fail"):
        job.group.sync(timeout_s=S)
    assert job.serve(0, "e0", "e1") and set(job.group.versions().values()) == {job.before}
    job.train(2)
    report = job.group.sync(timeout_s=S)
    assert report.version == job.before + 1 and job.serve(1, "e0", "e1"), "it was published already, and is delivered now"


def test_what_another_mode_can_do_is_said(job):
    ray.get(job.engines["e1"][0].fail_at.remote("stage"))
    report = job.group.sync(timeout_s=S)
    assert report.mode == "nccl" and "stage was to fail" in report.fallbacks[0] and job.serve(1, "e0", "e1")


def test_an_engine_that_fails_to_apply_is_restored(job):
    ray.get(job.engines["e0"][1].fail_at.remote("commit"))
    report = job.group.sync(timeout_s=S)
    assert report.engines == ["e1"] and list(report.lost) == ["e0"] and job.serve(1, "e1")
    assert job.group.wait_for(report.version, timeout_s=S) == report.version and job.serve(1, "e0")


@pytest.mark.parametrize("after", [False, True])
def test_a_trainer_that_dies_publishing_leaves_all_as_it_was(job, after):
    ray.get(job.trainers[1].die_at.remote("publish", after))
    with pytest.raises(SyncAbortedError, match=r"version \d+ was not published .*trainer/1"):
        job.group.sync(timeout_s=S)
    assert job.serve(0, "e0", "e1") and set(job.group.versions().values()) == {job.before}
    job.heal()
    job.train(2)
    assert job.group.sync(timeout_s=S).version > job.before and job.serve(2, "e0", "e1")


def test_a_trainer_that_is_gone_is_waited_for_so_long(job):
    ray.kill(job.trainers[0])
    with pytest.raises((SyncTimeoutError, SyncAbortedError), match="trainer"):
        job.group.sync(timeout_s=6)
    assert job.serve(0, "e0", "e1")


@pytest.mark.parametrize("step", ["publish", "stage", "commit"])
def test_a_coordinator_that_dies_is_started_again(job, step):
    """In the middle of a step: what was asked for is done by the next."""
    victim = job.trainers[0] if step == "publish" else job.engines["e0"][0]
    ray.get(victim.kill_at.remote(step, job.group))
    report = job.group.sync(timeout_s=S)
    assert report.version == job.before + 1 and job.serve(1, "e0", "e1")
    job.train(2)
    assert job.group.sync(timeout_s=S).version == job.before + 2 and job.serve(2, "e0", "e1")


def test_late_joiners(job):
    job.engines["e2"] = job.engine("e2")
    try:
        assert job.group.wait_for(job.before, engines=["e2"], timeout_s=S) == job.before
        assert job.serve(0, "e2"), "what was published, not what is trained"
        job.group.sync(timeout_s=S)
        assert job.serve(1, "e0", "e1", "e2")
    finally:
        for e in job.engines.pop("e2"):
            ray.kill(e)


def test_versions_only_grow(job):
    later = job.before + 5
    assert job.group.publish(later, timeout_s=S) == later
    with pytest.raises(StaleVersionError, match=f"version {later - 2} is not newer than {later}"):
        job.group.publish(later - 2, timeout_s=S)
    assert job.group.sync(timeout_s=S).version == later and job.serve(1, "e0", "e1")
    with pytest.raises(StaleVersionError):
        job.group.sync(later - 1, timeout_s=S)
    assert job.group.sync(later, timeout_s=S).engines == [], "they have it"


def test_trainers_publish_by_themselves(job):
    number = job.before + 1
    assert ray.get([t.publish.remote() for t in job.trainers], timeout=S) == [number, number]
    job.train(9)  # engines get what was published
    assert job.group.sync(timeout_s=S).version == number and job.serve(1, "e0", "e1")
    with pytest.raises(SyncTimeoutError, match=r"trainer ranks \[1\] have not published"):
        ray.get(job.trainers[0].publish.remote(1.0), timeout=S)


def test_nothing_piles_up_in_the_pool(job):
    sizes = []
    for version in range(1, 4):
        job.train(version)
        job.group.sync(timeout_s=S)
        until(lambda: mooncake_ray.pool_stats()["leases"] == 0)
        sizes.append(mooncake_ray.pool_stats()["objects"])
    until(lambda: mooncake_ray.pool_stats()["objects"] <= sizes[0], lambda: (sizes, mooncake_ray.pool_stats()))
