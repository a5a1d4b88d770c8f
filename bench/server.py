"""`python -m bench.server KIND`: holds some subjects and does what it is told, a line of JSON in and one out.

Ray with, without and with other settings of the same name cannot share a process; memcpy and the store get one of their own.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["ENVIRONMENTS", "SUBJECTS"]

SUBJECTS = {
    "local": ("memcpy", "store"),
    "plain": ("ray", "ray-numpy"),
    "zero-copy": ("ray-zero-copy",),
    "pool": ("pool",),
}
"""Which subjects each kind of process holds."""

_RAY = {
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Memory that is let go is free at once, not within a second: every put of every subject meets memory that was used before.
    "RAY_free_objects_batch_size": "1",
}
ENVIRONMENTS = {"local": {}, "plain": _RAY, "zero-copy": {**_RAY, "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}, "pool": _RAY}
"""What each kind of process needs in its environment."""

_POOL_BYTES = 4 << 30
_RAY_STORE_BYTES = 3 << 30
_RAY_STORE_BESIDE_POOL_BYTES = 512 << 20


class _Actors:
    """A local Ray with a producer and a consumer."""

    def __init__(self, pool: bool) -> None:
        if pool:
            import mooncake_ray

            mooncake_ray.install(capacity_bytes=_POOL_BYTES)
        import ray

        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_RAY_STORE_BESIDE_POOL_BYTES if pool else _RAY_STORE_BYTES,
        )
        from bench.actors import Consumer, Producer

        producer: Any = ray.remote(Producer)
        consumer: Any = ray.remote(Consumer)
        self.producer, self.consumer = (cls.options(num_cpus=0).remote() for cls in (producer, consumer))
        self.expected = 0.0
        self._get = ray.get
        self._get([self.producer.load.remote(None), self.consumer.probe.remote({})])

    def load(self, name: str | None) -> None:
        """Has the producer build a payload; None has it let go of the last one."""
        self.expected = self._get(self.producer.load.remote(name))


class _Server:
    """Holds the subjects of one kind and what they need."""

    def __init__(self, kind: str) -> None:
        from bench import subjects

        self.actors = None if kind == "local" else _Actors(pool=kind == "pool")
        made: dict[str, Callable[[], subjects.Subject]] = {
            "memcpy": subjects.Memcpy,
            "store": lambda: subjects.StoreOnly(_POOL_BYTES),
            "ray": lambda: subjects.Ray(self.actors),
            "ray-numpy": lambda: subjects.Ray(self.actors, arrays=True),
            "ray-zero-copy": lambda: subjects.Ray(self.actors),
            "pool": lambda: subjects.Pool(self.actors),
        }
        self.held = {name: made[name]() for name in SUBJECTS[kind]}
        self.loaded: tuple[str, bool] | None = None

    def answer(self, do: str, **request: Any) -> Any:
        actions: dict[str, Callable[..., Any]] = {"load": self.load, "time": self.time}
        return actions[do](**request)

    def load(self, subjects: list[str], payload: str, op: str) -> None:
        """Builds the payload where the operation needs it, and checks that the subjects give back what they are given."""
        from bench import payloads

        with_actors = op == "actor" and self.actors is not None
        if self.loaded == (payload, with_actors):
            return
        gc.unfreeze()
        for subject in self.held.values():
            subject.load(None)
        if self.actors:
            self.actors.load(payload if with_actors else None)
        if not with_actors:
            value = payloads.build(payload)
            for subject in self.held.values():
                subject.load(value)
        for name in subjects:
            if with_actors:
                self.held[name].actor()
            else:
                self.held[name].check()
        self.loaded = payload, with_actors
        gc.collect()
        gc.freeze()  # so that the collection before each timing is a short one

    def time(self, subjects: list[str], op: str, times: int) -> list[dict[str, float]]:
        from bench.subjects import timed

        return timed(getattr(self.held[subjects[0]], op), times)

    def close(self) -> None:
        for subject in self.held.values():
            subject.close()
        if self.actors:
            import ray

            ray.shutdown()


def main(kind: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    server = _Server(kind)
    say({"ready": True})
    try:
        for line in sys.stdin:
            try:
                say({"result": server.answer(**json.loads(line))})
            except Exception:
                say({"error": traceback.format_exc()})
    finally:
        server.close()


if __name__ == "__main__":
    main(sys.argv[1])
