"""`python -m bench.spill_server KIND CAPACITY DIRECTORY`: puts and gets more than the store's memory holds. See `spill`."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import payloads, serving

__all__ = ["SUBJECTS"]

SUBJECTS = {"local": ("store",), "plain": ("ray", "ray-numpy"), "pool": ("pool",)}
"""Which subjects each kind of process holds."""

_GIVEN_BACK_S = 60.0


class _Server:
    def __init__(self, kind: str, capacity_bytes: int, spill_dir: str) -> None:
        self._kind, self._directory = kind, Path(spill_dir, kind)
        self._directory.mkdir()
        if kind == "local":
            from mooncake_ray import Config
            from mooncake_ray.store import Store

            config = Config.from_env(capacity_bytes=capacity_bytes, spill_dir=str(self._directory), put_timeout_s=60.0)
            self._store = Store(f"bench-{os.getpid()}", config)
            return
        serving.start_ray(capacity_bytes if kind == "pool" else 0, capacity_bytes, str(self._directory))

    def _calls(self) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        if self._kind == "local":
            return self._store.put, self._store.get
        import ray

        return ray.put, ray.get

    def run(self, subject: str, objects: int, size: int) -> dict[str, float]:
        """Puts that many objects of `size` bytes, then gets and reads each. Returns the seconds of either."""
        put, get = self._calls()
        value = payloads.rollout(size, 0)
        if subject == "ray-numpy":
            value = payloads.as_numpy(value)
        sum_of_one, rows = payloads.total(value), len(value["rewards"])
        rewards = [value["rewards"] + n for n in range(objects)]
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        handles = [put({**value, "rewards": rewards[n]}) for n in range(objects)]
        stored = time.perf_counter()
        sums = [payloads.total(get(handle)) for handle in handles]
        end = time.perf_counter()
        gc.enable()
        wanted = [sum_of_one + rows * n for n in range(objects)]
        assert sums == wanted, f"{subject}: what came back sums up to {sums}, not {wanted}"
        self._drop(handles)
        return {"put": stored - start, "get": end - stored}

    def _drop(self, handles: list[Any]) -> None:
        """Returns when the store has its memory, and its part of the disk, back."""
        if self._kind == "local":
            self._store.free(handles)
        handles.clear()
        gc.collect()
        deadline = time.monotonic() + _GIVEN_BACK_S
        while left := self._left():
            assert time.monotonic() < deadline, f"{self._kind}: still there after {_GIVEN_BACK_S} s: {left}"
            time.sleep(0.01)

    def _left(self) -> object:
        if self._kind == "plain":
            return [str(file) for file in self._directory.rglob("*") if file.is_file()]
        if self._kind == "local":
            stats = self._store.stats()
        else:
            from mooncake_ray import pool_stats
            from mooncake_ray import stats as counts

            assert not counts()["fallbacks"], f"the pool did not take an object: {counts()}"
            stats = pool_stats()
        return {name: stats[name] for name in ("used_bytes", "disk_bytes") if stats[name]}

    def close(self) -> None:
        if self._kind == "local":
            self._store.close()
            return
        import ray

        ray.shutdown()


if __name__ == "__main__":
    serving.serve(lambda: _Server(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
