"""`python -m bench.server KIND`: holds some subjects and does what it is told, a line of JSON in and one out.

Ray with, without and with other settings of the same name cannot share a process; memcpy and the store get one of their own.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
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


def subjects(kind: str) -> dict[str, Any]:
    """Starts what the subjects of this kind need."""
    from bench import subjects as s

    if kind == "local":
        return {"memcpy": s.Memcpy(), "store": s.StoreOnly(_POOL_BYTES)}
    actors = _Actors(pool=kind == "pool")
    if kind == "plain":
        return {"ray": s.Ray(actors), "ray-numpy": s.Ray(actors, arrays=True)}
    return {"pool": s.Pool(actors)} if kind == "pool" else {"ray-zero-copy": s.Ray(actors)}


class _Actors:
    """A local Ray with a producer and a consumer."""

    def __init__(self, pool: bool) -> None:
        import torch  # noqa: F401 - before Ray, so that what a worker imports is warm in the page cache

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

        self.producer: Any = ray.remote(Producer).options(num_cpus=0).remote()
        self.consumer: Any = ray.remote(Consumer).options(num_cpus=0).remote()
        ray.get([self.producer.load.remote("64KiB"), self.consumer.probe.remote(None)])


class Server:
    """Answers requests. An exception is an answer too."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def answer(self, request: dict[str, Any]) -> Any:
        from bench.subjects import timed

        do, names = request["do"], request["subjects"]
        if do == "load":
            for name in names:
                self.held[name].load(request["payload"], request["op"])
            for name in names:
                self.held[name].check(request["op"])
            gc.collect()
            gc.freeze()  # so that the collection before each timing is a short one
        elif do == "time":
            return timed(getattr(self.held[names[0]], request["op"]), request["times"])
        elif do == "unload":
            gc.unfreeze()
            for name in names:
                self.held[name].unload()
            gc.collect()
        else:
            raise ValueError(f"cannot {do}")
        return None


def main(kind: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    server = Server(subjects(kind))
    say({"ready": True})
    try:
        for line in sys.stdin:
            try:
                say({"result": server.answer(json.loads(line))})
            except Exception:
                say({"error": traceback.format_exc()})
    finally:
        for subject in server.held.values():
            subject.close()
        if kind != "local":
            import ray

            ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
