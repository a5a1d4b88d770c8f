"""Samples between rollout workers and learners: none is lost, learned from twice, or too old, whoever dies."""

from __future__ import annotations

import gc
import os
import signal
import uuid
from collections import Counter

import numpy as np
import pytest
import ray
import torch
from conftest import until

import mooncake_ray
from mooncake_ray.errors import ConfigError, GetTimeoutError, LeaseLostError, SchemaError, StaleVersionError, StoreError, StoreFullError
from mooncake_ray.rollout.spans import VersionSpans

LENGTH = 8192  # of a row: a batch of four is passed on, not copied
SIZE = 2  # samples of a group
LONG_S = 600.0  # a lease whose deadline no test comes to


def rows(uids):
    """A batch whose rows tell which they are."""
    return {"tokens": torch.stack([torch.full((LENGTH,), int(uid[1:])) for uid in uids])}


def names(first, last):
    """Of each sample of these groups."""
    return [f"g{n}" for n in range(first, last) for _ in range(SIZE)]


def read(share) -> list[int]:
    """The samples of a share; they are those that it says."""
    found = [int(row[-1]) for row in share.ref.get()["tokens"]]
    assert found == [int(uid[1:]) for uid in share.uids]
    return found


class Worker:
    """Makes samples, learns from them, and dies."""

    def put(self, buffer, uids, version=0, **more):
        return buffer.put(rows(uids), uids=uids, version=version, **more)

    def reserve(self, buffer, uids, put=()):
        self.ticket = buffer.reserve(uids)
        if put:
            self.ticket.put(rows(put), uids=put, version=0)
        return os.getpid()

    def resume(self, buffer, most, finish=True):
        ticket = buffer.resume(most, timeout_s=200)
        told = [(work.uid, work.reason, 0 if work.ref is None else len(work.ref)) for work in ticket.works]
        self.ticket = ticket
        if finish:
            uids = [uid for uid in ticket.uids for _ in range(SIZE)]
            ticket.put(rows(uids), uids=uids, version=0)
        return told

    def take(self, buffer, step, groups, **more):
        self.share = buffer.take(step, 0, groups, **more)
        return sorted(read(self.share))

    def commit(self, buffer):
        return buffer.commit(self.share)

    def forget(self):
        self.ticket = self.share = None
        gc.collect()  # errors keep frames, and frames refs


@pytest.fixture
def buffer(pool):
    made = []

    def make(**settings):
        made.append(mooncake_ray.RolloutBuffer.create(f"buffer-{uuid.uuid4().hex}", **{"group_size": SIZE, "lease_s": LONG_S} | settings))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


@pytest.fixture(scope="module")
def _workers(pool_ray):
    made = [ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(Worker).remote() for _ in range(2)]
    yield made
    for worker in made:
        ray.kill(worker)


@pytest.fixture
def workers(_workers):
    """Two of them. Who is killed is started again."""
    yield _workers
    for worker in _workers:
        until(lambda worker=worker: forgets(worker), "a worker is there again")


def forgets(worker) -> bool:
    try:
        ray.get(worker.forget.remote())
    except ray.exceptions.ActorUnavailableError:
        return False
    return True


def kill_actor(handle):
    """At once, so that it is started again."""
    ray.kill(handle, no_restart=False)


def test_ranks_learn_from_parts_of_one_batch(buffer, workers):
    buffer = buffer()
    ray.get([w.put.remote(buffer, names(4 * n, 4 * n + 4), tokens=[1, 2] * 4) for n, w in enumerate(workers)])
    shares = ray.get([w.take.remote(buffer, 0, 8, rank=n, world=2) for n, w in enumerate(workers)])
    assert [len(share) for share in shares] == [SIZE * 4] * 2
    assert Counter(shares[0] + shares[1]) == Counter({n: SIZE for n in range(8)})
    assert ray.get(workers[0].take.remote(buffer, 0, 8, rank=0, world=2)) == shares[0]
    assert ray.get(workers[0].commit.remote(buffer)) == 16
    assert buffer.stats()["parcels"] == 0
    with pytest.raises(StaleVersionError, match="step 0 is committed"):
        buffer.take(0, 0, 8)


def test_staleness(buffer):
    buffer = buffer(max_staleness=1)
    for version in range(4):
        uids = names(version, version + 1)
        spans = VersionSpans.of([[], [(version + 1, 0, 5), (version, 5, LENGTH)]])
        buffer.put(rows(uids), uids=uids, version=spans if version % 2 else [version + 1, version])
    share = buffer.take(0, 3, 2)
    assert sorted(read(share)) == [2, 2, 3, 3] and share.ages.tolist() == [1, 1, 0, 0]
    buffer.commit(share)
    found = buffer.stats()
    assert (found["groups_stale"], found["staleness"], found["bytes"]) == (2, [1, 1], 0)


@pytest.mark.slow
def test_waiting(buffer, workers):
    buffer = buffer(capacity_groups=2)
    with pytest.raises(GetTimeoutError, match="fewer than 1 groups for step 0 within 0 s"):
        buffer.take(0, 0, 1, timeout_s=0)
    learner, producer = workers
    taking = learner.take.remote(buffer, 0, 2)
    ray.get(producer.put.remote(buffer, names(0, 2)))
    assert ray.get(taking) == [0, 0, 1, 1]
    with pytest.raises(StoreFullError, match="no room within 0 s: 2 of 2 groups are on their way, and 1 more wanted"):
        buffer.reserve(["g2"], timeout_s=0)
    putting = producer.put.remote(buffer, names(2, 3))
    assert not ray.wait([putting], timeout=0.2)[0]
    ray.get(learner.commit.remote(buffer))
    ray.get(putting)


def test_a_dead_producers_groups_are_for_others(buffer, workers):
    buffer = buffer()
    dies, goes_on = workers
    ray.get(dies.reserve.remote(buffer, ["g1", "g2", "g3"], [*names(1, 2), "g2"]))
    kill_actor(dies)
    found = ray.get(goes_on.resume.remote(buffer, 1)) + ray.get(goes_on.resume.remote(buffer, 5))
    assert sorted(found) == [("g2", "orphaned", 1), ("g3", "orphaned", 0)]
    assert sorted(read(buffer.take(0, 0, 3))) == [1, 1, 2, 2, 3, 3]


def test_partial(buffer):
    buffer = buffer()
    with buffer.reserve(["g1", "g2"]) as ticket:
        ticket.park(rows(["g1", "g1"]), uids=["g1", "g1"], version=3)
    ticket = buffer.resume(2)
    assert [(work.uid, work.reason, work.oldest) for work in ticket.works] == [("g1", "partial", 3), ("g2", "orphaned", 0)]
    assert ticket.works[0].ref.get()["tokens"][0, -1] == 1 and ticket.works[1].ref is None
    ticket.put(rows(names(1, 3)), uids=names(1, 3), version=3)
    assert buffer.resume() is None and sorted(read(buffer.take(0, 3, 2))) == [1, 1, 2, 2]
    with pytest.raises(LeaseLostError):
        ticket.put(rows(names(1, 2)), uids=names(1, 2), version=3)


def test_a_dead_learner_gets_the_same_again(buffer, workers):
    buffer = buffer()
    buffer.put(rows(names(0, 4)), uids=names(0, 4), version=0)
    first, second = workers
    before = ray.get(first.take.remote(buffer, 0, 2))
    kill_actor(first)
    assert ray.get(second.take.remote(buffer, 0, 2)) == before
    ray.get(second.commit.remote(buffer))
    assert ray.get(second.take.remote(buffer, 1, 2)) == [2, 2, 3, 3]


@pytest.mark.slow
def test_at_least_once(buffer, workers):
    buffer = buffer(consumption="at-least-once")
    buffer.put(rows(names(0, 2)), uids=names(0, 2), version=0)
    first, second = workers
    before = ray.get(first.take.remote(buffer, 0, 2))
    kill_actor(first)
    assert ray.get(second.take.remote(buffer, 1, 2)) == before
    assert buffer.stats()["leases_lost"] == 1


def test_the_buffer_dies(buffer, workers):
    """At rest, while it is waited for, and again."""
    buffer = buffer(replay_bytes=1 << 20, capacity_groups=4)
    producer, learner = workers
    ray.get(producer.put.remote(buffer, names(0, 2)))
    before = buffer.take(0, 0, 1)
    ticket = buffer.reserve(["g7"])
    for _ in range(2):
        kill_actor(buffer._actor)
        assert sorted(read(buffer.take(0, 0, 1))) == sorted(read(before)) == [0, 0]
    ticket.put(rows(names(7, 8)), uids=names(7, 8), version=0)
    taking = learner.take.remote(buffer, 1, 3)
    putting = producer.put.remote(buffer, names(8, 10))
    assert not ray.wait([taking, putting], timeout=0.2)[0], "both wait: one for groups, one for room"
    kill_actor(buffer._actor)
    buffer.commit(before)
    ray.get(putting)
    assert ray.get(taking) == [1, 1, 7, 7, 8, 8]
    with pytest.raises(StaleVersionError):
        buffer.take(0, 0, 1)
    assert buffer.stats()["groups_in_replay"] == 1


@pytest.mark.slow
def test_a_put_is_done_once(buffer):
    buffer = buffer()
    for _ in range(2):
        buffer.put(rows(names(0, 1)), uids=names(0, 1), version=0, operation_id="first")
        kill_actor(buffer._actor)
    assert buffer.stats()["samples_put"] == SIZE and read(buffer.take(0, 0, 1)) == [0, 0]


def test_samples_survive_their_producer(buffer, workers):
    buffer = buffer()
    ray.get(workers[0].put.remote(buffer, names(0, 2)))
    kill_actor(workers[0])
    assert sorted(read(buffer.take(0, 0, 2))) == [0, 0, 1, 1]


def test_nothing_is_left(buffer, pool):
    """Of what was learned from, parked, cancelled, filtered, and too old."""
    buffer = buffer(max_staleness=0, filters=(_alike,))
    buffer.put(rows(names(0, 3)), uids=names(0, 3), version=0, tags={"reward": np.array([1, 0, 1, 1, 0, 1])})
    with buffer.reserve(["g4", "g5"]) as ticket:
        ticket.park(rows(["g4"]), uids=["g4"], version=0)
    buffer.commit(buffer.take(0, 0, 1))
    buffer.advance(1)
    buffer.resume(5).cancel()
    found = buffer.stats()
    assert (found["groups_filtered"], found["groups_stale"], found["parcels"], found["bytes"]) == (1, 2, 0, 0)
    pool.settles_at(0)


def _alike(group) -> bool:
    return group.tags["reward"].min() < group.tags["reward"].max()


@pytest.mark.slow
def test_closed(buffer, workers):
    buffer = buffer()
    taking = workers[0].take.remote(buffer, 0, 2)
    buffer.put(rows(names(0, 1)), uids=names(0, 1), version=0)
    buffer.close()
    assert ray.get(taking) == [0, 0]
    last = buffer.take(1, 0, 2)
    assert len(last) == 0 and last.ref is None
    with pytest.raises(StoreError, match="closed"):
        buffer.put(rows(names(1, 2)), uids=names(1, 2), version=0)


@pytest.mark.slow
def test_names(buffer):
    one = buffer()
    assert mooncake_ray.RolloutBuffer.connect(one.name).stats() == one.stats()
    with pytest.raises(ConfigError, match="cannot be created"):
        mooncake_ray.RolloutBuffer.create(one.name)
    with pytest.raises(ConfigError, match="there is no buffer 'nobody'"):
        mooncake_ray.RolloutBuffer.connect("nobody")
    with pytest.raises(ConfigError, match="no such setting"):
        mooncake_ray.RolloutBuffer.create("any", size=3)
    with pytest.raises(SchemaError, match="3 uids and 2 rows"):
        one.put(rows(names(0, 1)), uids=["g0"] * 3, version=0)
    one.shutdown()
    with pytest.raises(StoreError, match="is gone"):
        one.stats()


@pytest.mark.slow
def test_a_killed_process_is_noticed_without_ray_being_told(buffer, workers):
    buffer = buffer()
    os.kill(ray.get(workers[0].reserve.remote(buffer, ["g1"])), signal.SIGKILL)
    until(lambda: buffer.stats()["groups_waiting"] == 1)
