"""Each mode of syncing weights does what every one must, on a real Ray cluster of one node; and what they share: members die and fail at every
step, no engine ever serves a mixture, every call ends, and who comes back is brought up to date."""

from __future__ import annotations

import pytest
import ray
from conftest import until
from sync_suite import SyncModeSuite
from weight_job import Job, S

import mooncake_ray
from mooncake_ray.errors import SyncAbortedError, SyncTimeoutError
from mooncake_ray.testing import Allowed

_PLANS = 512 << 10  # bytes: a coordinator keeps the last ones
ONCE = ("test_version_order", "test_sender_death", "test_coordinator_death", "test_half_applied")


@pytest.fixture(scope="module")
def one_job(pool_ray):
    objects = mooncake_ray.pool_stats()["objects"]
    job = Job()
    job.heal()
    job.group.sync(timeout_s=S)
    yield job
    job.end()
    until(lambda: mooncake_ray.pool_stats()["objects"] <= objects, "that nothing of a group that ended is in the pool")


@pytest.fixture
def leaks_allowed() -> Allowed:
    """What was started anew, and plans for those that were there meanwhile."""
    return Allowed(processes=("*",), descriptors=("socket:*",), pool_bytes=_PLANS)


@pytest.fixture
def job(one_job):
    """All serve one version, which `before` is, and trainers have the next."""
    one_job.heal()
    one_job.train(0)
    one_job.before = one_job.group.sync(timeout_s=S).version
    one_job.train(1)
    return one_job


class TestP2P(SyncModeSuite):
    mode = "p2p"


class TestNccl(SyncModeSuite):
    mode = "nccl"
    slow = ONCE


class TestDelta(SyncModeSuite):
    mode = "delta"
    slow = ONCE


@pytest.mark.parametrize(("step", "after"), [("stage", True), ("commit", True), ("resume", False)])
def test_an_engine_that_dies_is_left_out_and_comes_back(job, step, after):
    ray.get(job.engines["e1"][1].die_at.remote(step, after))
    report = job.group.sync(timeout_s=S)
    assert report.engines == ["e0"] and list(report.lost) == ["e1"]
    assert job.serve(1, "e0") and job.group.versions()["e0"] == report.version
    assert job.group.versions().get("e1", -1) != report.version
    job.heal()
    assert job.group.wait_for(report.version, engines=["e0", "e1"], timeout_s=S) == report.version
    assert job.serve(1, "e0", "e1")


def test_what_another_mode_can_do_is_said(job):
    ray.get(job.engines["e1"][0].fail_at.remote("stage"))
    report = job.group.sync(timeout_s=S)
    assert report.mode == "nccl" and "stage was to fail" in report.fallbacks[0] and job.serve(1, "e0", "e1")


def test_a_trainer_that_is_gone_is_waited_for_so_long(job):
    ray.kill(job.trainers[0])
    with pytest.raises((SyncTimeoutError, SyncAbortedError), match="trainer"):
        job.group.sync(timeout_s=6)
    assert job.serve(0, "e0", "e1")


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
