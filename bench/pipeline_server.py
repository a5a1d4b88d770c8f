"""`python -m bench.pipeline_server KIND`: a Ray with eight rollouts and a trainer. See `actor_pipeline`."""

from __future__ import annotations

import sys
import time
from typing import Any

from bench import payloads, serving
from bench.actors import Rollout, Trainer

__all__ = ["SUBJECTS"]

SUBJECTS = {"plain": ("ray",), "zero-copy": ("ray-zero-copy",), "pool": ("pool",)}
"""Which subject each kind of process holds."""

_CAPACITY_BYTES = 2 << 30  # of the pool, or of Ray's store: nothing need be spilled
_GIVEN_BACK_S = 60.0


class _Server:
    def __init__(self, kind: str) -> None:
        self._pool = kind == "pool"
        serving.start_ray(_CAPACITY_BYTES if self._pool else 0, _CAPACITY_BYTES)
        self._rollouts: list[Any] = []

    def load(self, subjects: list[str], rollouts: int, size: int) -> None:
        """Starts the actors, and has each do its work once."""
        import ray

        self._size, self._sum = size, payloads.total(payloads.rollout(size, 0))
        self._trainer = ray.remote(Trainer).options(num_cpus=0).remote()
        self._rollouts = [ray.remote(Rollout).options(num_cpus=0).remote(size) for _ in range(rollouts)]
        self.run(subjects[0], rollouts)

    def run(self, subject: str, batches: int) -> float:
        """Moves that many batches, each to be read by the trainer. Returns seconds."""
        import ray

        start = time.perf_counter()
        sums = [self._trainer.train.remote(self._rollouts[n % len(self._rollouts)].generate.remote(n)) for n in range(batches)]
        got = ray.get(sums)
        seconds = time.perf_counter() - start
        rewards = payloads.nbytes({"rewards": payloads.rewards(self._size, 0)}) // 4
        wanted = [self._sum + rewards * n for n in range(batches)]
        assert got == wanted, f"{subject}: the trainer read {got}, not {wanted}"
        self._settle()
        return seconds

    def _settle(self) -> None:
        if not self._pool:
            time.sleep(0.1)  # Ray's store has its memory back by then, and nothing tells when
            return
        from mooncake_ray import pool_stats, stats

        deadline = time.monotonic() + _GIVEN_BACK_S
        while pool_stats()["used_bytes"]:
            assert time.monotonic() < deadline, f"the pool has not had its memory back within {_GIVEN_BACK_S} s: {pool_stats()}"
            time.sleep(0.001)
        assert not stats()["fallbacks"], f"the pool did not take a batch: {stats()}"

    def close(self) -> None:
        import ray

        ray.shutdown()


if __name__ == "__main__":
    serving.serve(lambda: _Server(sys.argv[1]))
