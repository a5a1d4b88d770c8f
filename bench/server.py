"""`python -m bench.server KIND`: holds some subjects and does what it is told, a line of JSON in and one out.

memcpy and the store get a process of their own.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from bench import serving

__all__ = ["SUBJECTS"]

SUBJECTS = {
    "local": ("memcpy", "store"),
    "plain": ("ray", "ray-numpy"),
    "zero-copy": ("ray-zero-copy",),
    "pool": ("pool",),
}
"""Which subjects each kind of process holds."""

_POOL_BYTES = 4 << 30
_RAY_STORE_BYTES = 3 << 30


class _Actors:
    """A local Ray with a producer and a consumer."""

    def __init__(self, pool: bool) -> None:
        serving.start_ray(_POOL_BYTES if pool else 0, _RAY_STORE_BYTES)
        import ray

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

    def time(self, subject: str, op: str, times: int) -> list[dict[str, float]]:
        """Does an operation some times in a row."""
        from bench.subjects import timed

        return timed(getattr(self.held[subject], op), times)

    def close(self) -> None:
        for subject in self.held.values():
            subject.close()
        if self.actors:
            import ray

            ray.shutdown()


if __name__ == "__main__":
    serving.serve(lambda: _Server(sys.argv[1]))
