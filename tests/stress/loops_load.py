"""The load of `stress loops`: an `AsyncLoop` whose driver, buffer and learner's folder are on node 0, with rollout workers, a reward and learner
ranks on the other nodes, any of which dies, and so does the buffer.

Says what it has done, and is told to stop, as `stress.chaos_load`. What the learners have in the end, they have learned from whole groups, from
none twice, and from none that was too old; and every group that was begun was learned from, or is still there.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from stress.weights_load import say

_LENGTH = 8192  # of a row: a batch is stored in the pool
_GROUP, _STEP, _BOUND, _WORKERS, _RANKS = 2, 8, 2, 4, 2
_READY_S = 120.0
_SNAPSHOT_EVERY = 5
_EVERY_S = 12.0  # from one kill to the next, on average
_RETRIES = 20
_TOLD_S = 5.0


class Rollout:
    """Its samples tell their group, and the version of their weights."""

    def __init__(self, group: Any, name: str) -> None:
        import torch

        from mooncake_ray.engines.torch_module import TorchModuleEngine

        torch.set_num_threads(1)
        self.engine = TorchModuleEngine(torch.nn.Linear(_LENGTH, 1, bias=False))
        self.member = group.engine(self.engine, name, timeout_s=_READY_S)

    def generate(self, task: Any) -> Any:
        import torch

        from mooncake_ray.loops import Rolled

        with self.engine.serving() as version:
            weights = self.engine.module.weight.detach()[0].clone()
        time.sleep(random.uniform(0.0, 0.1))
        numbers = torch.tensor([int(uid.rpartition("-")[2]) for uid in task.uids]).repeat_interleave(task.group_size)
        rows = {
            "weights": weights.expand(len(numbers), -1).contiguous(),
            "number": numbers,
            "version": torch.full((len(numbers),), version),
        }
        return Rolled(rows, [uid for uid in task.uids for _ in range(task.group_size)], version)


class Reward:
    def score(self, rolled: Any) -> Any:
        return rolled.scored({"reward": rolled.batch.get(["number"])["number"].float()})


class Learner:
    """Keeps what it has learned from with its weights, which are the number of its steps."""

    def __init__(self, group: Any, rank: int) -> None:
        import torch

        from mooncake_ray.weights.source import ModuleSource

        torch.set_num_threads(1)
        self.rank, self.seen = rank, []
        self.module = torch.nn.Linear(_LENGTH, 1, bias=False)
        torch.nn.init.zeros_(self.module.weight)
        self.member = group.trainer(ModuleSource(self.module), rank, _RANKS, timeout_s=_READY_S)

    def update(self, batch: Any, task: Any) -> dict[str, float]:
        import torch

        got = batch.get()
        numbers, versions = got["number"].tolist(), got["version"].tolist()
        wrong = int(numbers != [int(uid.rpartition("-")[2]) for uid in task.uids])
        wrong += not torch.equal(got["reward"], got["number"].float())
        wrong += not bool((got["weights"] == got["weights"][:, :1]).all())  # of one version
        ages = [task.version - version for version in versions]
        self.seen += [(task.step, *sample) for sample in zip(numbers, ages, strict=True)]
        with torch.no_grad():
            self.module.weight += 1
        return {"wrong": float(wrong), "age": float(max(ages))}

    def save(self, folder: str) -> None:
        import torch

        torch.save({"weights": self.module.weight, "seen": self.seen}, f"{folder}/{self.rank}.pt")

    def restore(self, folder: str) -> None:
        import torch

        found = torch.load(f"{folder}/{self.rank}.pt")
        self.seen = found["seen"]
        with torch.no_grad():
            self.module.weight.copy_(found["weights"])

    def has(self) -> tuple[int, list[tuple[int, int, int]]]:
        return int(self.module.weight[0, 0]), self.seen


class Load:
    def __init__(self, nodes: int, seed: int) -> None:
        import ray

        import mooncake_ray
        from mooncake_ray.loops import AsyncLoop, LoopSettings, LoopSnapshots

        mooncake_ray.install(capacity_bytes=256 << 20, prefault_bytes=16 << 20, pull_timeout_s=10.0)
        ray.init(log_to_driver=False)
        self._ray, self._rng, self._nodes = ray, random.Random(seed), nodes
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        consumption = self._rng.choice(["exactly-once", "at-least-once"])
        self.counts[consumption] = 1
        self._group = mooncake_ray.WeightSyncGroup("chaos", liveness_s=6.0)
        self._buffer = mooncake_ray.RolloutBuffer.create(
            "chaos",
            group_size=_GROUP,
            max_staleness=_BOUND,
            capacity_groups=_STEP * (_BOUND + 1),
            stale="return",
            consumption=consumption,
            replay_bytes=0,
            lease_s=30.0,
        )
        self._rollouts = [self._actor(Rollout, n).remote(self._group, f"e{n}") for n in range(_WORKERS)]
        self._reward = self._actor(Reward, 0).remote()
        self._learners = [self._actor(Learner, n).remote(self._group, n) for n in range(_RANKS)]
        ray.get([a.__ray_ready__.remote() for a in (*self._rollouts, self._reward, *self._learners)], timeout=_READY_S)
        shared = Path("build")  # each node has a folder for temporary files to itself
        shared.mkdir(exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="loops-", dir=shared.absolute())
        settings = LoopSettings(
            groups_per_step=_STEP,
            groups_per_call=2,
            calls_per_worker=2,
            update_timeout_s=60.0,
            generate_timeout_s=60.0,
            sync_timeout_s=60.0,
            snapshot_timeout_s=120.0,
            snapshot_every=_SNAPSHOT_EVERY,
            retries=_RETRIES,
        )
        self._loop = AsyncLoop(
            self._buffer,
            self._group,
            self._rollouts,
            self._learners,
            int,
            settings,
            rewards=[self._reward],
            on_step=self._stepped,
            snapshots=LoopSnapshots(self._folder.name, fsync=False),
        )
        self._running = threading.Thread(target=self._run)
        self._running.start()

    def _actor(self, cls: type, number: int) -> Any:
        node = {f"node{1 + number % (self._nodes - 1)}": 0.01}
        return self._ray.remote(cls).options(num_cpus=0, resources=node, max_restarts=-1, max_concurrency=4 if cls is Rollout else 1)

    def _run(self) -> None:
        try:
            report = self._loop.run(1_000_000)
            self.counts["recoveries"] = self._loop.falls
            self.counts["failures"] = report.failures
        except Exception as e:
            self.violations.append(f"the loop ended: {type(e).__name__}: {str(e)[-1500:]}")

    def _stepped(self, step: Any) -> None:
        self.counts["steps"] += 1
        self.counts["oldest"] = max(self.counts["oldest"], int(step.metrics["age"]), max(step.staleness))
        if step.metrics["wrong"]:
            self.violations.append(f"step {step.step}: samples are not what was made")

    def kill(self) -> None:
        """One process, at once."""
        what = self._rng.choice(["rollout", "rollout", "learner", "buffer", "reward"])
        if what == "buffer":
            self._ray.kill(self._buffer._actor, no_restart=False)
        else:
            actor = {"rollout": self._rollouts, "learner": self._learners, "reward": [self._reward]}[what]
            self._ray.kill(self._rng.choice(actor), no_restart=False)
        self.counts[f"{what}s_killed"] += 1

    def step(self) -> None:
        """Waits a while, and kills somebody."""
        if not select.select([sys.stdin], [], [], self._rng.expovariate(1 / _EVERY_S))[0]:
            self.kill()

    def end(self) -> None:
        """All is mended: it does a few steps more, and is looked at."""
        done = self.counts["steps"]
        end = time.monotonic() + 240
        while self.counts["steps"] < done + 3 and time.monotonic() < end and self._running.is_alive():
            time.sleep(0.5)
        if self._running.is_alive() and self.counts["steps"] < done + 3:
            self.violations.append("after all was mended, it did no step in 240 s")
        self._loop.stop()
        self._running.join(200)
        if self._running.is_alive():
            self.violations.append("it does not stop")
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.violations:
            self._loop.close()
            self._look()
        self._group.shutdown()
        self._folder.cleanup()

    def _look(self) -> None:
        ranks = self._ray.get([learner.has.remote() for learner in self._learners], timeout=_READY_S)
        steps, samples = self._loop.step, [sample for _, seen in ranks for sample in seen]
        demands = {
            f"learners have done {[n for n, _ in ranks]} steps, and the loop {steps}": {n for n, _ in ranks} == {steps},
            "a step is missing": sorted({step for step, _, _ in samples}) == list(range(steps)),
            "a step had too few samples": len(samples) == steps * _STEP * _GROUP,
        }
        times = Counter(number for _, number, _ in samples)
        twice = [number for number, n in times.items() if n != _GROUP]
        demands[f"groups {twice[:5]} were learned from twice, or in part"] = not twice
        oldest = max((age for _, _, age in samples), default=0)
        demands[f"a sample was {oldest} versions old, and {_BOUND} are allowed"] = oldest <= _BOUND
        found = self._buffer.stats()
        there = found["groups_trained"] + found["groups_queued"] + found["groups_waiting"] + found["groups_taken"] + found["groups_making"]
        demands[f"{self._loop.groups} groups were begun, and {there} are known: {found}"] = there == self._loop.groups
        self.violations += [what for what, holds in demands.items() if not holds]
        self.counts.update({"groups": self._loop.groups, "stale": found["groups_stale"], "lost_and_made_again": found["groups_lost"]})


def main() -> None:
    load = Load(int(sys.argv[1]), int(sys.argv[2]))
    say(load)
    told = time.monotonic()
    while not select.select([sys.stdin], [], [], 0)[0] and not load.violations:
        load.step()
        if time.monotonic() - told > _TOLD_S:
            told = time.monotonic()
            say(load)
    load.end()
    say(load, over=True)


if __name__ == "__main__":
    main()
