"""Each mode of syncing weights does what every one must, on a real Ray cluster of one node."""

from __future__ import annotations

import pytest
from sync_suite import SyncModeSuite
from weight_job import Job, S

from mooncake_ray.testing import Allowed

pytestmark = pytest.mark.slow

ONCE = ("test_version_order", "test_sender_death", "test_coordinator_death", "test_half_applied")


@pytest.fixture(scope="module")
def one_job(pool_ray):
    job = Job()
    job.heal()
    job.group.sync(timeout_s=S)
    yield job
    job.end()


@pytest.fixture
def leaks_allowed() -> Allowed:
    return Allowed(processes=("*",), descriptors=("socket:*",))  # those that were started anew


@pytest.fixture
def job(one_job):
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
