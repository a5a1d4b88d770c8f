"""`python -m bench.driver_server KIND BYTES`: a driver with producers and consumers of batches of at most BYTES. See `driver`."""

from __future__ import annotations

import gc
import importlib
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import serving
from bench.actors import BatchConsumer, BatchProducer
from bench.subjects import until_empty

__all__ = ["SUBJECTS"]

SUBJECTS = {"plain": ("verl",), "pool": ("pool",)}
"""Which subject each kind of process holds."""

_SETTLE_S = 0.1  # Ray's store has its memory back by then, and nothing tells when
_BESIDE_BYTES = 512 << 20
_STATUS, _RESET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class _Server:
    def __init__(self, kind: str, largest_bytes: int) -> None:
        self._pool = kind == "pool"
        # Of plain Ray's store: the producers' batches, the consumers', and the same again, as either may live on for a moment.
        capacity = 4 * largest_bytes + _BESIDE_BYTES
        serving.start_ray(capacity if self._pool else 0, capacity)

    def load(self, subjects: list[str], workload: str, workers: int) -> None:
        """Starts the workers, and moves the batch once."""
        import ray

        producer, consumer = (ray.remote(cls).options(num_cpus=0) for cls in (BatchProducer, BatchConsumer))
        self._workers = workers
        self._producers = [producer.remote() for _ in range(workers)]
        self._consumers = [consumer.remote() for _ in range(workers)]
        # One after the other: each makes the whole batch for a moment.
        made = [ray.get(p.load.remote(workload, number, workers)) for number, p in enumerate(self._producers)]
        marks = np.concatenate(made)
        self._order = np.arange(len(marks)).reshape(-1, workers).T.reshape(-1)  # each consumer gets rows of every producer
        self._wanted = marks[self._order].tolist()
        importlib.import_module("verl")
        gc.collect()
        self._idle_bytes = _memory("VmRSS")  # before any batch has come here; later, freed memory may still be there
        self.run(subjects[0])

    def run(self, subject: str) -> dict[str, float]:
        """Moves the batch once. Returns seconds, the bytes that the driver got and passed on, and by how many its memory had grown."""
        import ray

        gc.collect()
        _RESET_PEAK.write_text("5")
        start = time.perf_counter()
        got, passed, answers = self._by_refs() if self._pool else self._by_value()
        marks = ray.get(answers)
        seconds = time.perf_counter() - start
        growth = _memory("VmHWM") - self._idle_bytes
        nbytes = sum(map(_pickled_bytes, [*got, *passed]))
        flat = [mark for part in marks for mark in part]
        assert flat == self._wanted, f"{subject}: the consumers did not get the rows they were to get"
        del got, passed, answers
        self._settle()
        return {"seconds": seconds, "bytes": nbytes, "growth": growth}

    def _by_refs(self) -> tuple[list[Any], list[Any], list[Any]]:
        import ray

        import mooncake_ray

        got = ray.get([p.put.remote() for p in self._producers])
        pieces = mooncake_ray.concat_batches(got)[self._order].chunk(self._workers)
        return got, pieces, [c.get.remote(piece) for c, piece in zip(self._consumers, pieces, strict=True)]

    def _by_value(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Ray's refs of what is got and passed on instead of the batches, which would be pickled again to see how long they are."""
        import ray
        import torch
        from verl import DataProto

        made = [p.batch.remote() for p in self._producers]
        whole = DataProto.concat(ray.get(made))
        whole.reorder(torch.from_numpy(self._order))
        passed = [ray.put(piece) for piece in whole.chunk(self._workers)]  # which Ray does with large arguments anyway
        return made, passed, [c.take.remote(ref) for c, ref in zip(self._consumers, passed, strict=True)]

    def _settle(self) -> None:
        """Waits until the store has its memory back."""
        gc.collect()
        if not self._pool:
            time.sleep(_SETTLE_S)
            return
        from mooncake_ray import pool_stats

        until_empty(pool_stats)

    def close(self) -> None:
        import ray

        ray.shutdown()


def _pickled_bytes(value: Any) -> int:
    """What an object takes in Ray's store, as Ray pickles it. Pickled outside of Ray, the refs in it would never be let go."""
    import ray
    from ray.experimental import get_object_locations

    ref = value if isinstance(value, ray.ObjectRef) else ray.put(value)
    return get_object_locations([ref])[ref]["object_size"]


def _memory(name: str) -> int:
    """A line of this process' status, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found, f"no {name} in {_STATUS}"
    return int(found[1]) << 10


if __name__ == "__main__":
    serving.serve(lambda: _Server(sys.argv[1], int(sys.argv[2])))
