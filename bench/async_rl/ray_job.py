"""The same job on Ray's store, in the form of Miles: one actor has a list of all samples, with what they hold; it cuts a step's samples into
shards for the ranks, and puts them; weights are put once, and all engines get them."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import torch

from bench.async_rl.content import Device, Source
from bench.async_rl.job import Job

__all__ = ["ListBuffer", "RayJob"]


class ListBuffer:
    """Bounded, and drops what is too old when it is taken."""

    def __init__(self, capacity: int, bound: int) -> None:
        self._groups: list[tuple[int, list[Any]]] = []
        self._capacity, self._bound = capacity, bound
        self._changed = asyncio.Condition()

    async def put(self, version: int, samples: list[Any]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._groups) < self._capacity)
            self._groups.append((version, samples))
            self._changed.notify_all()

    async def take(self, count: int, version: int, ranks: int) -> list[Any]:
        import ray

        def enough() -> bool:
            self._groups = [group for group in self._groups if version - group[0] <= self._bound]
            return len(self._groups) >= count

        async with self._changed:
            while not enough():
                self._changed.notify_all()  # there may be room now
                await self._changed.wait()
            taken, self._groups = self._groups[:count], self._groups[count:]
            self._changed.notify_all()
        samples = [sample for _, group in taken for sample in group]
        return [ray.put(samples[rank::ranks]) for rank in range(ranks)]


class Rollout:
    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.source = job, rank, Source(job, rank)
        self.weights = torch.zeros(job.weights, dtype=torch.bfloat16)
        self.version, self.number = 0, rank
        self.lock = threading.Lock()

    def load(self, weights: torch.Tensor, version: int) -> None:
        with self.lock:
            self.weights.copy_(weights)
            self.version = version

    def produce(self, buffer: Any) -> None:
        """For ever."""
        import ray

        while True:
            with self.lock:
                number, version = self.number, self.version
                self.number += self.job.workers
            lengths = self.job.lengths(number)
            time.sleep(self.job.generate_time(lengths))
            ray.get(buffer.put.remote(version, self.source.samples(lengths)))


class Learner:
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        self.job, self.device = job, Device()
        self.weights = torch.zeros(job.weights, dtype=torch.bfloat16)

    def update(self, samples: list[Any]) -> tuple[float, int]:
        tokens = self.device.load_samples(samples)
        busy = self.job.learn_time(tokens)
        time.sleep(busy)
        self.weights += 1
        return busy, len(samples)

    def get_weights(self) -> torch.Tensor:
        return self.weights


class RayJob:
    def __init__(self, job: Job) -> None:
        import ray

        self._job, self._version, self._loading = job, 0, []
        self._buffer = ray.remote(num_cpus=0, max_concurrency=1000)(ListBuffer).remote(job.groups * (job.bound + 1), job.bound)
        self._rollouts = [ray.remote(num_cpus=0, max_concurrency=job.calls + 1)(Rollout).remote(job, n) for n in range(job.workers)]
        self._learners = [ray.remote(num_cpus=0)(Learner).remote(job) for _ in range(job.ranks)]
        ray.get([actor.__ray_ready__.remote() for actor in (*self._rollouts, *self._learners)])
        self._making = [rollout.produce.remote(self._buffer) for rollout in self._rollouts for _ in range(job.calls)]

    def run(self, steps: int) -> dict[str, float]:
        import ray

        begin, samples, busy = time.perf_counter(), 0, 0.0
        for _ in range(steps):
            if not self._loading or len(ray.wait(self._loading, num_returns=len(self._loading), timeout=0)[0]) == len(self._loading):
                ref = self._learners[0].get_weights.remote()
                ray.wait([ref])  # before it is trained further
                self._loading = [rollout.load.remote(ref, self._version) for rollout in self._rollouts]
            shards = ray.get(self._buffer.take.remote(self._job.groups, self._version, self._job.ranks))
            said = ray.get([learner.update.remote(shard) for learner, shard in zip(self._learners, shards, strict=True)])
            busy += sum(seconds for seconds, _ in said) / len(said)
            samples += sum(count for _, count in said)
            self._version += 1
        return {"seconds": time.perf_counter() - begin, "samples": samples, "busy_s": busy}

    def close(self) -> None:
        import ray

        for actor in (*self._rollouts, *self._learners, self._buffer):
            ray.kill(actor)
