"""What is timed, each behind the same few operations. Runs in the processes that `python -m bench.server` makes."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import payloads

__all__ = ["CHUNKS", "SMALL_OPS", "Memcpy", "Pool", "Ray", "Roundtrips", "StoreOnly", "Subject", "timed", "until_empty"]

CHUNKS = 16
SMALL_OPS = 100  # in one round, as one is too short to time
GETS = 3  # timed a round
_SETTLE_S = 0.005  # Ray's store has its memory back within milliseconds, and nothing tells when
_GIVEN_BACK_S = 20.0


class Subject:
    """Times operations on one payload. Subclasses say how to put, get and let go."""

    value: Any = None

    def load(self, value: Any) -> None:
        """Takes the payload of the operations to come; None lets go of the last one."""
        self.value = value

    def put(self, value: Any) -> Any:
        raise NotImplementedError

    def get(self, handle: Any) -> Any:
        raise NotImplementedError

    def drop(self, handles: list[Any]) -> None:
        """Empties the list, and returns when the store has the memory back."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises AssertionError unless what comes back is what went in."""
        handles = [self.put(self.value)]
        assert payloads.same(self.get(handles[0]), self.value), f"{type(self).__name__}: what came back is not what went in"
        self.drop(handles)

    def roundtrip(self) -> dict[str, float]:
        handles, put, get = self._putget()
        # A get of its own is timed apart from the put before it, which has just filled the caches with other bytes.
        again = [self._timed_get(handles[0]) for _ in range(GETS)]
        self.drop(handles)
        return {"put": put, "get": statistics.median(again), "putget": put + get}

    def _putget(self) -> tuple[list[Any], float, float]:
        """One put and one get of it: the handle, and the times of both."""
        value = self.value
        start = time.perf_counter()
        handles = [self.put(value)]
        stored = time.perf_counter()
        got = self.get(handles[0])
        self.look(got)
        end = time.perf_counter()
        del got
        return handles, stored - start, end - stored

    def look(self, got: Any) -> None:
        """What belongs to a get besides."""

    def _timed_get(self, handle: Any) -> float:
        start = time.perf_counter()
        got = self.get(handle)
        end = time.perf_counter()
        del got
        return end - start

    def small(self) -> dict[str, float]:
        """Times of one put and one get out of many."""
        put, get, value = self.put, self.get, self.value
        start = time.perf_counter()
        handles = [put(value) for _ in range(SMALL_OPS)]
        stored = time.perf_counter()
        for handle in handles:
            get(handle)
        end = time.perf_counter()
        del handle
        self.drop(handles)
        return {"put": (stored - start) / SMALL_OPS, "get": (end - stored) / SMALL_OPS}

    def actor(self) -> dict[str, float]:
        raise NotImplementedError

    def chunk(self) -> dict[str, float]:
        value = self.value
        start = time.perf_counter()
        handles = [self.put(piece) for piece in payloads.chunks_of(value, CHUNKS)]
        end = time.perf_counter()
        self.drop(handles)
        return {"chunk": end - start}

    def passing(self) -> dict[str, float]:
        """A fresh object is got and, unchanged, put again."""
        handles = [self.put(self.value)]
        start = time.perf_counter()
        got = self.get(handles[0])
        handles.append(self.put(got))
        end = time.perf_counter()
        del got
        self.drop(handles)
        return {"pass": end - start}

    def close(self) -> None:
        pass


class Roundtrips(Subject):
    """Puts and gets batches, whose size leaves nothing of one in the caches for the next: a round is one put and one get."""

    def look(self, got: Any) -> None:
        payloads.touch(got)

    def roundtrip(self) -> dict[str, float]:
        handles, put, get = self._putget()
        self.drop(handles)
        return {"put": put, "get": get, "putget": put + get}

    def stored(self) -> int:
        """Bytes that the store needs for the batch."""
        raise NotImplementedError


def timed(op: Callable[[], dict[str, float]], times: int) -> list[dict[str, float]]:
    """Runs an operation some times in a row, with the garbage collector held back."""
    gc.collect()
    gc.disable()
    try:
        return [op() for _ in range(times)]
    finally:
        gc.enable()


class Memcpy(Subject):
    """A copy of the same bytes into memory that is there already, by one thread. Every operation is that copy."""

    _sources: list[np.ndarray] = []  # noqa: RUF012 - replaced, never changed
    _targets: list[np.ndarray] = []  # noqa: RUF012

    def load(self, value: Any) -> None:
        self._targets = []  # before the next are made
        self._sources = [a.reshape(-1).view(np.uint8) for a in payloads.arrays_of(value) if not a.dtype.hasobject]
        self._targets = [np.ones_like(a) for a in self._sources]

    def check(self) -> None:
        self._copy()
        assert all(map(np.array_equal, self._sources, self._targets)), "memcpy: what came back is not what went in"

    def _copy(self) -> float:
        start = time.perf_counter()
        for target, source in zip(self._targets, self._sources, strict=True):
            np.copyto(target, source)
        return time.perf_counter() - start

    def roundtrip(self) -> dict[str, float]:
        return dict.fromkeys(("put", "get", "putget"), self._copy())

    def actor(self) -> dict[str, float]:
        return {"actor": self._copy()}

    def chunk(self) -> dict[str, float]:
        return {"chunk": self._copy()}

    def passing(self) -> dict[str, float]:
        return {"pass": self._copy()}


class StoreOnly(Subject):
    """The package's store, without Ray."""

    def __init__(self, capacity_bytes: int) -> None:
        import os

        from mooncake_ray import Config
        from mooncake_ray.store import Store

        self._store = Store(f"bench-{os.getpid()}", Config.from_env(capacity_bytes=capacity_bytes))

    def put(self, value: Any) -> Any:
        return self._store.put(value)

    def get(self, handle: Any) -> Any:
        return self._store.get(handle)

    def drop(self, handles: list[Any]) -> None:
        self._store.free(handles)
        handles.clear()
        until_empty(self._store.stats)

    def close(self) -> None:
        self._store.close()


class Ray(Subject):
    """Plain Ray: its own store, with the tensors as they are or (`arrays`) as NumPy arrays."""

    def __init__(self, actors: Any, arrays: bool = False) -> None:
        import ray

        self.put, self.get = ray.put, ray.get  # type: ignore[assignment,method-assign]
        self._actors, self._arrays = actors, arrays

    def load(self, value: Any) -> None:
        self.value = payloads.as_numpy(value) if self._arrays and value is not None else value

    def drop(self, handles: list[Any]) -> None:
        handles.clear()
        time.sleep(_SETTLE_S)

    def actor(self) -> dict[str, float]:
        start = time.perf_counter()
        handles = [self._actors.producer.batch.remote(self._arrays)]
        answer = self.get(self._actors.consumer.probe.remote(handles[0]))
        end = time.perf_counter()
        assert answer == self._actors.expected, f"{type(self).__name__}: the consumer got {answer}, not {self._actors.expected}"
        self.drop(handles)
        return {"actor": end - start}


class Pool(Ray):
    """The same Ray calls, with the package installed."""

    def drop(self, handles: list[Any]) -> None:
        import mooncake_ray

        handles.clear()
        until_empty(mooncake_ray.pool_stats)
        time.sleep(_SETTLE_S)

    def check(self) -> None:
        super().check()
        import mooncake_ray

        assert not mooncake_ray.stats()["fallbacks"], f"the pool did not take the payload: {mooncake_ray.stats()}"

    def passing(self) -> dict[str, float]:
        from mooncake_ray import stats

        handles = [self.put(self.value)]
        before = stats()["bytes_copied"]
        start = time.perf_counter()
        got = self.get(handles[0])
        handles.append(self.put(got))
        end = time.perf_counter()
        del got
        copied = stats()["bytes_copied"] - before
        self.drop(handles)
        return {"pass": end - start, "bytes_copied": copied}


def until_empty(stats: Callable[[], dict[str, Any]]) -> None:
    """Returns when the pool has all of its memory back."""
    deadline = time.monotonic() + _GIVEN_BACK_S
    while stats()["used_bytes"]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the pool has not had its memory back within {_GIVEN_BACK_S} s: {stats()}")
        time.sleep(0.001)
