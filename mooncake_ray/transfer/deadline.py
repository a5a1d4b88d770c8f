"""How long an operation of several steps may take."""

from __future__ import annotations

import time

from mooncake_ray.errors import GetTimeoutError

__all__ = ["Deadline"]


class Deadline:
    """A moment that a whole operation must be over at."""

    __slots__ = ("at", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.at = timeout_s, time.monotonic() + timeout_s

    def left(self, what: str) -> float:
        """Seconds. Raises GetTimeoutError if there are none."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise GetTimeoutError(f"{what}: not done within {self.timeout_s:g} s")
        return left

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.at
