"""What runs inside Ray's workers, and how the Ray of a long run is started."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stress import content

__all__ = ["Player", "echo", "start_ray"]

_ROOT = Path(__file__).resolve().parents[1]
_START_TRIES = 3


def start_ray(spill_dir: str, **settings: Any) -> None:
    """A local Ray with a pool of these settings, whose workers find this package."""
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of calls whose answers nobody waits for
    import ray

    import mooncake_ray

    mooncake_ray.install(spill_dir=spill_dir, **settings)
    for left in reversed(range(_START_TRIES)):  # it gives up within 30 s, which on a busy machine is short
        try:
            ray.init(
                address="local",
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=256 << 20,
                runtime_env={"env_vars": {"PYTHONPATH": str(_ROOT)}},
            )
            return
        except Exception:
            ray.shutdown()
            if not left:
                raise


class Player:
    """An actor that makes, puts, reads, holds and passes on values. Raises CorruptError for one that is not what its seed says."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._held: list[tuple[Any, int]] = []

    def make(self, seed: int) -> Any:
        return content.value(seed)

    def stream(self, seeds: list[int]) -> Iterator[Any]:
        for seed in seeds:
            yield content.value(seed)

    def put(self, seed: int) -> list[Any]:
        """A ref that this actor owns."""
        import ray

        return [ray.put(content.value(seed))]

    def take(self, value: Any, seed: int) -> Any:
        """Checks and passes on; holds some."""
        content.check(value, seed)
        self._hold(value, seed)
        return value

    def read(self, refs: list[Any], seeds: list[int]) -> int:
        """Refs inside a list: this actor gets them itself, and keeps the refs for a while."""
        import ray

        for value, seed in zip(ray.get(refs), seeds, strict=True):
            content.check(value, seed)
        self._hold(refs, 0)
        return len(refs)

    def _hold(self, what: Any, seed: int) -> None:
        self._held.append((what, seed))
        while len(self._held) > 4:
            old, seed = self._held.pop(self._rng.randrange(len(self._held)))
            if seed:
                content.check(old, seed)

    def die(self) -> None:
        os._exit(1)


def echo(value: Any, seed: int) -> Any:
    """A plain task."""
    content.check(value, seed)
    return value
