"""The same job in both modes: what is learned from was made by one version of the weights, not too old, once, whoever dies or fails."""

from __future__ import annotations

import os
import signal
import threading
import uuid

import numpy as np
import pytest
import ray
import torch
from conftest import until

import mooncake_ray
from mooncake_ray.errors import ConfigError, LearnerLostError, StoreError
from mooncake_ray.loops import AsyncLoop, LoopSettings, LoopSnapshots, Rolled, SyncLoop

LENGTH = 8192  # of a row: a batch of four is stored in the pool
GROUP, STEP = 2, 4  # samples of a group, groups of a step
LOOPS = pytest.mark.parametrize("kind", [SyncLoop, AsyncLoop])
MOSTLY_ASYNC = pytest.mark.parametrize("kind", [pytest.param(SyncLoop, marks=pytest.mark.slow), AsyncLoop])


class Rollout:
    """Its samples tell their group, the weights that made them, and which version that is."""

    def __init__(self, group, name, fail=()):
        from mooncake_ray.engines.torch_module import TorchModuleEngine

        self.module = torch.nn.Linear(LENGTH, 1, bias=False)
        self.engine = TorchModuleEngine(self.module)
        self.member = group.engine(self.engine, name)
        self.fail, self.gates, self.seen = dict(fail), {}, []
        self.gate = threading.Event()
        self.gate.set()

    def generate(self, task):
        assert task.group_size == GROUP and [f"prompt {uid.rpartition('-')[2]}" for uid in task.uids] == list(task.prompts)
        self.gate.wait(60)
        numbers = [int(uid.rpartition("-")[2]) for uid in task.uids]
        for number, begun in zip(numbers, task.begun, strict=True):
            self.seen.append((number, None if begun is None else len(begun)))
            if self.fail.get(number, 0):
                self.fail[number] -= 1
                raise ValueError(f"no samples of {number}")
        with self.engine.serving() as version:
            value = self.module.weight.detach()[0].clone()
            assert torch.all(value == value[0])
        rows = torch.stack([value for _ in range(GROUP * len(numbers))])
        uids = [uid for uid in task.uids for _ in range(GROUP)]
        made = {"weights": rows, "number": torch.tensor(numbers).repeat_interleave(GROUP), "version": torch.full((len(rows),), version)}
        half = {uid for uid, n, begun in zip(task.uids, numbers, task.begun, strict=True) if n % 5 == 3 and begun is None}
        return Rolled(made, uids, version, tokens=[LENGTH] * len(uids), unfinished=frozenset(half))

    def close_gate(self):
        self.gate.clear()

    def open_gate(self):
        self.gate.set()

    def done(self):
        return self.seen

    def pid(self):
        return os.getpid()


class Reward:
    def score(self, rolled):
        return rolled.scored({"reward": rolled.batch.get(["number"])["number"].float()}, {"reward": np.zeros(len(rolled.uids))})


class Learner:
    """Its weights are the number of the version."""

    def __init__(self, group, rank, world, strict=True):
        from mooncake_ray.weights.source import ModuleSource

        self.module = torch.nn.Linear(LENGTH, 1, bias=False)
        torch.nn.init.zeros_(self.module.weight)
        self.rank, self.seen, self.strict = rank, [], strict
        self.member = group.trainer(ModuleSource(self.module), rank, world)

    def update(self, batch, task):
        got = batch.get()
        if self.strict:
            assert torch.equal(got["weights"][:, 0], got["version"].float())
        assert torch.all(got["weights"][:, 0] <= got["version"]) and torch.equal(got["reward"], got["number"].float())
        assert [int(uid.rpartition("-")[2]) for uid in task.uids] == got["number"].tolist()
        assert all(age >= task.version - version for age, version in zip(task.ages.tolist(), got["version"].tolist(), strict=True))
        self.seen += [(task.step, *sample) for sample in zip(got["number"].tolist(), task.ages.tolist(), strict=True)]
        with torch.no_grad():
            self.module.weight += 1
        return {"rank": float(self.rank), "rows": float(len(task.uids))}

    def save(self, folder):
        torch.save({"weights": self.module.weight, "seen": self.seen}, f"{folder}/{self.rank}.pt")

    def restore(self, folder):
        found = torch.load(f"{folder}/{self.rank}.pt")
        self.seen = found["seen"]
        with torch.no_grad():
            self.module.weight.copy_(found["weights"])

    def all(self):
        return self.seen

    def has(self):
        return int(self.module.weight[0, 0])

    def pid(self):
        return os.getpid()


@pytest.fixture
def job(pool, pool_ray):
    """Makes one: a buffer, two rollout workers, a reward and two learner ranks, with a loop around them."""
    ended = []

    def make(
        kind,
        *,
        bound=1,
        workers=2,
        world=2,
        fail=(),
        rewards=1,
        on_step=None,
        restarts=0,
        snapshots=None,
        resume=None,
        strict=True,
        **settings,
    ):
        name = f"loop-{uuid.uuid4().hex[:8]}"
        group = mooncake_ray.WeightSyncGroup(name, liveness_s=15.0)
        buffer = mooncake_ray.RolloutBuffer.create(
            name,
            group_size=GROUP,
            max_staleness=bound,
            capacity_groups=STEP * (bound + 1),
            stale="return",
            restore=None if resume is None else resume.buffer,
        )
        actor = {"num_cpus": 0, "max_restarts": restarts}
        rollouts = [ray.remote(**actor, max_concurrency=4)(Rollout).remote(group, f"engine-{n}", fail) for n in range(workers)]
        learners = [ray.remote(**actor)(Learner).remote(group, rank, world, strict) for rank in range(world)]
        scorers = [ray.remote(**actor)(Reward).remote() for _ in range(rewards)]
        chosen = LoopSettings(**{"groups_per_step": STEP, "groups_per_call": 2, **settings})
        more = {"rewards": scorers, "on_step": on_step, "snapshots": snapshots, "resume": resume}
        loop = kind(buffer, group, rollouts, learners, "prompt {}".format, chosen, **more)
        ended.extend([loop.close, group.shutdown, buffer.shutdown, *(lambda a=a: ray.kill(a) for a in (*rollouts, *learners, *scorers))])
        return loop, buffer, rollouts, learners

    yield make
    for end in ended:
        end()


def learned(learners):
    """(step, group, age) of each sample of each rank."""
    return [sample for seen in ray.get([learner.all.remote() for learner in learners]) for sample in seen]


def pid(actor):
    """None: it is being started again."""
    try:
        return ray.get(actor.pid.remote())
    except ray.exceptions.ActorUnavailableError:
        return None


@LOOPS
def test_a_job(job, kind):
    reports = []
    loop, buffer, rollouts, learners = job(kind, on_step=reports.append)
    report = loop.run(6)
    assert reports == report.steps and [step.step for step in reports] == list(range(6))
    assert all(step.version == step.step for step in reports)  # each makes one version
    samples = learned(learners)
    assert len(samples) == 6 * STEP * GROUP == report.samples
    groups = [number for _, number, _ in samples]
    assert all(groups.count(number) == GROUP for number in groups)
    bound = 1 if kind is AsyncLoop else 0
    assert max(age for _, _, age in samples) <= bound and max(report.staleness) <= bound
    assert sum(report.staleness.values()) == report.samples
    assert all(step.metrics == {"rank": 0.5, "rows": STEP * GROUP / 2} for step in reports)
    assert 0 < report.utilisation < 1 and len(report.pauses_s) + report.skipped >= 4
    assert {span.who for span in report.timeline} == {"learner", "weights", "rollout 0", "rollout 1"}
    parked = [(number, begun) for seen in ray.get([r.done.remote() for r in rollouts]) for number, begun in seen if number % 5 == 3]
    assert (3, None) in parked and (3, GROUP) in parked  # given back before it was done, and gone on with
    again = loop.run(1)
    assert [step.step for step in again.steps] == [6]
    loop.close()
    loop.close()
    assert buffer.stats()["groups_making"] == 0
    with pytest.raises(StoreError, match="closed"):
        loop.run(1)


@MOSTLY_ASYNC
def test_workers_die(job, kind):
    """One comes back, and one does not."""
    loop, _, rollouts, learners = job(kind, workers=3, restarts=1)
    ray.get([r.__ray_ready__.remote() for r in rollouts])
    pids = ray.get([r.pid.remote() for r in rollouts])
    loop.run(1)
    os.kill(pids[0], signal.SIGKILL)
    ray.kill(rollouts[1])
    report = loop.run(4)
    assert len(report.steps) == 4
    until(lambda: pid(rollouts[0]) not in (None, pids[0]), "another process")
    groups = [number for _, number, _ in learned(learners)]
    assert len(groups) == 5 * STEP * GROUP and all(groups.count(number) == GROUP for number in groups)


@MOSTLY_ASYNC
def test_learners_die_and_the_job_goes_on_elsewhere(job, kind, tmp_path):
    """What they learned since the last snapshot is forgotten; what they have in the end, they have learned from different groups."""
    killed = []

    def on_step(report):
        if report.step == 2 and not killed:
            killed.append(ray.get(learners[1].pid.remote()))
            os.kill(killed[0], signal.SIGKILL)

    snapshots = LoopSnapshots(tmp_path / "job")
    loop, _, _, learners = job(kind, restarts=-1, on_step=on_step, snapshots=snapshots, snapshot_every=2, strict=False)
    report = loop.run(5)
    assert killed and report.failures >= 1 and [step.step for step in report.steps] == list(range(5))
    check(learners, range(5))
    versions = [step.version for step in report.steps]
    assert versions == sorted(set(versions)) and max(report.staleness) <= 1  # the bound of the buffer
    loop.close()
    assert list(snapshots.versions()) == [2, 4]
    with pytest.raises(ConfigError, match="there is a snapshot of step 4"):
        job(kind, snapshots=snapshots)

    with snapshots.open() as last:
        assert last.state.step == 4
        again, buffer, _, learners = job(kind, resume=last, snapshots=snapshots, snapshot_every=2, strict=False)
        report = again.run(2)
    assert [step.step for step in report.steps] == [4, 5] and report.steps[0].version >= last.state.version
    check(learners, range(6))
    assert list(snapshots.versions()) == [4, 6]
    again.close()
    found = buffer.stats()
    there = [found[f"groups_{name}"] for name in ("trained", "queued", "waiting", "taken", "making")]
    assert sum(there) == found["groups_begun"] == again.groups, "a group was lost on the way"


def check(learners, steps):
    """All ranks have learned from those steps, once, and each group was in one of them."""
    assert ray.get([learner.has.remote() for learner in learners]) == [len(steps)] * len(learners)
    samples = learned(learners)
    assert sorted({step for step, _, _ in samples}) == list(steps)
    groups = [number for _, number, _ in samples]
    assert len(groups) == len(steps) * STEP * GROUP and all(groups.count(number) == GROUP for number in groups)


def test_learners_die_without_snapshots(job):
    loop, buffer, _, learners = job(AsyncLoop, restarts=-1)
    loop.run(1)
    before = ray.get(learners[0].pid.remote())
    os.kill(before, signal.SIGKILL)
    until(lambda: pid(learners[0]) not in (None, before), "another process")
    with pytest.raises(LearnerLostError, match=r"have not got what those had|died"):
        loop.run(3)
    loop.close()
    assert buffer.stats()["groups_making"] == 0


def test_what_fails(job):
    loop, _, _, learners = job(AsyncLoop, fail={1: 2, 2: 1}, workers=1, retries=2)
    assert loop.run(3).failures >= 2
    assert {1, 2} <= {number for _, number, _ in learned(learners)}
    loop, buffer, _, _ = job(AsyncLoop, fail={6: 1000}, workers=1, retries=2)
    with pytest.raises(ray.exceptions.RayTaskError, match="no samples of 6"):
        loop.run(10)
    loop.close()
    assert buffer.stats()["groups_making"] == 0


def test_it_ends_while_everybody_waits(job):
    loop, buffer, rollouts, _ = job(AsyncLoop)
    loop.run(1)
    ray.get([r.close_gate.remote() for r in rollouts])
    ended = threading.Thread(target=loop.run, args=(1000,))
    ended.start()
    until(lambda: buffer.stats()["groups_making"] == 4, "workers that wait")
    loop.stop()
    ended.join(60)
    assert not ended.is_alive()
    loop.close()
    assert buffer.stats()["groups_making"] == 0
    ray.get([r.open_gate.remote() for r in rollouts])


def test_no_room_for_a_step(job):
    with pytest.raises(ConfigError, match="at least 100"):
        job(SyncLoop, groups_per_step=100)
