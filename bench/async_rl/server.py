"""`python -m bench.async_rl.server KIND JOB`: a driver of the job's loops. See `bench.async_loop`."""

from __future__ import annotations

import sys
import time

import numpy as np

from bench import serving
from bench.async_rl.job import JOBS, Job
from bench.async_rl.pool_job import PoolJob
from bench.async_rl.ray_job import ListBuffer, RayJob

__all__ = ["SUBJECTS"]

SUBJECTS = {"plain": ("ray-async",), "pool": ("sync", "async")}
"""Which subjects each kind of process holds."""

_BESIDE_BYTES = 1 << 30
_GROUP, _PUT, _PUTS = 16, 2048, 4  # samples of a group and of a put, puts of a step


class _Server:
    def __init__(self, kind: str, job: Job) -> None:
        self._job, self._loops = job, {}
        # What waits, what is learned from, and what is being made; of two loops.
        capacity = 2 * (job.bound + 3) * job.step_bytes + _BESIDE_BYTES
        serving.start_ray(capacity if kind == "pool" else 0, capacity)

    def load(self, subjects: list[str]) -> None:
        for subject in subjects:
            if subject == "ray-async":
                self._loops[subject] = RayJob(self._job)
            else:
                from mooncake_ray.loops import AsyncLoop, SyncLoop

                self._loops[subject] = PoolJob(self._job, SyncLoop if subject == "sync" else AsyncLoop)

    def run(self, subject: str, steps: int) -> dict[str, float]:
        """First as many steps as can be waiting already."""
        loop = self._loops[subject]
        loop.run(self._job.bound + 1)
        return loop.run(steps)

    def overhead(self, subject: str, times: int) -> float:
        """Seconds that a buffer takes for 1,000 samples: to make room for them, to put, take and commit them. Of tiny samples, stored before."""
        return self._ray_overhead(times) if subject == "ray-async" else self._pool_overhead(times)

    def _pool_overhead(self, times: int) -> float:
        import mooncake_ray

        total = _PUT * _PUTS
        buffer = mooncake_ray.RolloutBuffer.create("overhead", group_size=_GROUP, max_staleness=1, capacity_groups=total // _GROUP)
        stored = mooncake_ray.put_batch({"tokens": np.zeros((_PUT, 64), np.int32)})
        found = []
        for step in range(-2, times):
            uids = [[f"{step}-{n}-{g}" for g in range(_PUT // _GROUP)] for n in range(_PUTS)]
            begin = time.perf_counter()
            for groups in uids:
                ticket = buffer.reserve(groups, timeout_s=60)
                ticket.put(stored, uids=[uid for uid in groups for _ in range(_GROUP)], version=0)
            share = buffer.take(step + 2, 0, total // _GROUP, timeout_s=60)
            buffer.commit(share)
            if step >= 0:
                found.append(time.perf_counter() - begin)
        buffer.shutdown()
        return float(np.median(found)) / total * 1000

    def _ray_overhead(self, times: int) -> float:
        import ray

        total = _PUT * _PUTS
        buffer = ray.remote(num_cpus=0, max_concurrency=1000)(ListBuffer).remote(total, 1)
        samples = [{"tokens": [0] * 64} for _ in range(_GROUP)]
        found = []
        for step in range(-2, times):
            begin = time.perf_counter()
            ray.get([buffer.put.remote(0, samples) for _ in range(total // _GROUP)])
            ray.get(ray.get(buffer.take.remote(total // _GROUP, 0, 1)))
            if step >= 0:
                found.append(time.perf_counter() - begin)
        ray.kill(buffer)
        return float(np.median(found)) / total * 1000

    def close(self) -> None:
        import ray

        for loop in self._loops.values():
            loop.close()
        ray.shutdown()


if __name__ == "__main__":
    serving.serve(lambda: _Server(sys.argv[1], JOBS[sys.argv[2]]))
