"""What every process that holds subjects does: it starts Ray as asked, and answers lines of JSON.

Ray with, without and with other settings of the same name cannot share a process, so there is one for each kind.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["ENVIRONMENTS", "join_ray", "serve", "start_ray"]

_RAY = {
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Memory that is let go is free at once, not within a second: every put of every subject meets memory that was used before.
    "RAY_free_objects_batch_size": "1",
}
ENVIRONMENTS = {
    "local": {},
    "plain": _RAY,
    "zero-copy": {**_RAY, "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"},
    "pool": _RAY,
    "mooncake": {},
    "mooncake-home": {},
    "transferqueue": _RAY,
}
"""What each kind of process needs in its environment."""

_STORE_BESIDE_POOL_BYTES = 512 << 20


def start_ray(pool_bytes: int, store_bytes: int, spill_dir: str | None = None, cpus: int = 2) -> None:
    """A local Ray, with a pool unless `pool_bytes` is 0; then Ray's own store gets no more than descriptors.

    Args:
        pool_bytes: Capacity of the pool.
        store_bytes: Capacity of Ray's object store where there is no pool.
        spill_dir: Where either spills to; None for its default.
        cpus: What Ray is to count, for actors that ask for some.
    """
    if pool_bytes:
        import mooncake_ray

        mooncake_ray.install(capacity_bytes=pool_bytes, **({"spill_dir": spill_dir} if spill_dir else {}))
    import ray

    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=min(store_bytes, _STORE_BESIDE_POOL_BYTES) if pool_bytes else store_bytes,
        object_spilling_directory=spill_dir,
    )


def join_ray(pool_bytes: int) -> None:
    """Joins the cluster of several nodes that this process is in (see `bench.cluster`); with a pool on each, unless `pool_bytes` is 0."""
    if pool_bytes:
        import mooncake_ray

        # The smallest payload would go Ray's own way, and be compared with itself.
        mooncake_ray.install(capacity_bytes=pool_bytes, prefault_bytes=pool_bytes, spill_dir="off", min_bytes=32 << 10)
    import ray

    ray.init(log_to_driver=False)


def serve(make: Callable[[], Any]) -> None:
    """Makes the server, then answers each line of JSON from stdin: calls the method that it names as `do`, and says what that returned."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    server = make()
    say({"ready": True})
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                say({"result": getattr(server, request.pop("do"))(**request)})
            except Exception:
                say({"error": traceback.format_exc()})
    finally:
        server.close()
