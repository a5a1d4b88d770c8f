"""`Turnstile`: so many at a time, so many who wait, and the others are told to come again."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from mooncake_ray.serve.problems import Problem

__all__ = ["Turnstile"]


class Turnstile:
    """First come, first served. Thread-safe."""

    def __init__(self, limit: int, waiting: int, wait_s: float) -> None:
        """
        Args:
            limit: Of those who are through.
            waiting: Of those who wait.
            wait_s: How long each waits at most.
        """
        self.limit, self.most_waiting, self._wait_s = limit, waiting, wait_s
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()
        self.inside = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @contextmanager
    def through(self) -> Iterator[None]:
        """Raises Problem, 503 with Retry-After: too many wait already, or it took too long."""
        with self._changed:
            self._enter()
        try:
            yield
        finally:
            with self._changed:
                self.inside -= 1
                self._changed.notify_all()

    def _enter(self) -> None:
        if self.inside < self.limit and not self._queue:
            self.inside += 1
            return
        if len(self._queue) >= self.most_waiting:
            raise self._busy(f"{self.inside} transfers are under way and {len(self._queue)} wait, of {self.most_waiting} that may")
        me, end = object(), time.monotonic() + self._wait_s
        self._queue.append(me)
        try:
            while self.inside >= self.limit or self._queue[0] is not me:
                if (left := end - time.monotonic()) <= 0:
                    raise self._busy(f"none of {self.inside} transfers has ended within {self._wait_s:g} s")
                self._changed.wait(left)
            self.inside += 1
        finally:
            self._queue.remove(me)
            self._changed.notify_all()

    def _busy(self, why: str) -> Problem:
        return Problem(503, "busy", why, {"Retry-After": "1"})
