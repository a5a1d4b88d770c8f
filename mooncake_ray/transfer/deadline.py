"""How long an operation of several steps may take, and how soon what failed is tried again."""

from __future__ import annotations

import time

from mooncake_ray.errors import GetTimeoutError

__all__ = ["Deadline", "Pauses"]

_FIRST_S = 0.05
_LONGEST_S = 1.0


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


class Pauses:
    """Between tries: each is twice as long as the one before, up to a second."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self.reset()

    def next(self) -> float:
        """Seconds."""
        now, self._next = self._next, min(2 * self._next, _LONGEST_S)
        return now

    def reset(self) -> None:
        """After a success."""
        self._next = _FIRST_S
