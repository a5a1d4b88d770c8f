"""The job with `mooncake_ray`'s loops."""

from __future__ import annotations

import time
import uuid
from typing import Any

import torch

from bench.async_rl.content import Device, Source
from bench.async_rl.job import Job

__all__ = ["PoolJob"]

_MICRO_BATCH = 16  # samples that a learner rank copies at once


def _model(job: Job) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(job.weights, dtype=torch.bfloat16), requires_grad=False)
    return module


class Rollout:
    def __init__(self, job: Job, group: Any, rank: int) -> None:
        from mooncake_ray.engines.torch_module import TorchModuleEngine

        torch.set_num_threads(1)
        self.job, self.source = job, Source(job, rank)
        self.engine = TorchModuleEngine(_model(job))
        self.member = group.engine(self.engine, f"rollout-{rank}")

    def generate(self, task: Any) -> Any:
        from mooncake_ray.loops import Rolled

        (uid,) = task.uids
        lengths = self.job.lengths(int(uid.rpartition("-")[2]))
        with self.engine.serving() as version:
            pass
        time.sleep(self.job.generate_time(lengths))
        return Rolled(self.source.columns(lengths), [uid] * len(lengths), version, tokens=lengths)


class Learner:
    def __init__(self, job: Job, group: Any, rank: int) -> None:
        from mooncake_ray.weights.source import ModuleSource

        torch.set_num_threads(1)
        self.job, self.device, self.module = job, Device(), _model(job)
        self.member = group.trainer(ModuleSource(self.module), rank, job.ranks)

    def update(self, batch: Any, task: Any) -> dict[str, float]:
        begin = time.perf_counter()
        tokens = sum(self.device.load(batch[first : first + _MICRO_BATCH].get()) for first in range(0, len(batch), _MICRO_BATCH))
        data_s = time.perf_counter() - begin
        busy = self.job.learn_time(tokens)
        time.sleep(busy)
        self.module.weight += 1
        return {"busy_s": busy, "data_s": data_s}


class PoolJob:
    def __init__(self, job: Job, kind: type) -> None:
        import ray

        import mooncake_ray
        from mooncake_ray.loops import AsyncLoop, LoopSettings

        name = f"bench-{uuid.uuid4().hex[:8]}"
        bound = job.bound if kind is AsyncLoop else 0
        self._group = mooncake_ray.WeightSyncGroup(name)
        self._buffer = mooncake_ray.RolloutBuffer.create(
            name, group_size=job.group_size, max_staleness=bound, capacity_groups=job.groups * (bound + 1)
        )
        rollouts = [ray.remote(num_cpus=0, max_concurrency=job.calls)(Rollout).remote(job, self._group, n) for n in range(job.workers)]
        learners = [ray.remote(num_cpus=0)(Learner).remote(job, self._group, n) for n in range(job.ranks)]
        settings = LoopSettings(groups_per_step=job.groups, calls_per_worker=job.calls)
        ray.get([actor.__ray_ready__.remote() for actor in (*rollouts, *learners)])
        self._loop = kind(self._buffer, self._group, rollouts, learners, int, settings)

    def run(self, steps: int) -> dict[str, float]:
        """Returns seconds, samples, and seconds that learners were busy."""
        begin = time.perf_counter()
        report = self._loop.run(steps)
        assert len(report.steps) == steps, "the loop has ended"
        return {
            "seconds": time.perf_counter() - begin,
            "samples": report.samples,
            "busy_s": sum(step.metrics["busy_s"] for step in report.steps),
            "data_s": sum(step.metrics["data_s"] for step in report.steps),
            "stale": sum(report.staleness.values()) - report.staleness.get(0, 0),
        }

    def close(self) -> None:
        self._loop.close()
        self._group.shutdown()
        self._buffer.shutdown()
