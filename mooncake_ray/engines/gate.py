"""`Gate`: requests compute step by step, and a pause comes between the steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mooncake_ray.engines.base import PauseMode
from mooncake_ray.errors import ConfigError, EnginePausedError, SyncTimeoutError

__all__ = ["Gate"]

_MODES = ("abort", "wait", "keep")


class Gate:
    """Thread-safe. A request is many steps; weights do not change during a step."""

    def __init__(self, patience_s: float = 300.0) -> None:
        """`patience_s`: how long a request that is frozen, or waits to begin, waits for the end of a pause."""
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._mode: PauseMode | None = None
        self._pauses = 0
        self._aborted = 0  # the number of the last pause that ended requests
        self._requests = 0
        self._steps = 0

    @property
    def is_paused(self) -> bool:
        return self._mode is not None

    @contextmanager
    def request(self) -> Iterator[int]:
        """What `step` wants to know of the request.

        Raises:
            EnginePausedError: the engine is paused, and new requests are refused.
            SyncTimeoutError: the pause does not end.
        """
        with self._changed:
            self._until(lambda: self._mode != "keep", self._patience_s, lambda: "the engine stays paused")
            if self._mode is not None:
                raise EnginePausedError(f"the engine is paused for new weights (mode {self._mode}); send the request again")
            self._requests += 1
            begun = self._pauses
        try:
            yield begun
        finally:
            with self._changed:
                self._requests -= 1
                self._changed.notify_all()

    @contextmanager
    def step(self, begun: int) -> Iterator[None]:
        """One step of a request that had begun in pause number `begun`.

        Raises:
            EnginePausedError: a pause has ended the request.
            SyncTimeoutError: the pause does not end.
        """
        with self._changed:
            self._until(lambda: self._mode != "keep" or self._aborted > begun, self._patience_s, lambda: "the engine stays paused")
            if self._aborted > begun:
                raise EnginePausedError("the request was ended by a pause for new weights; send it again")
            self._steps += 1
        try:
            yield
        finally:
            with self._changed:
                self._steps -= 1
                self._changed.notify_all()

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Returns when no step is done, and none will be before `resume`.

        Raises:
            ConfigError: there is no such mode.
            SyncTimeoutError: requests go on. Then it is as if there had been no pause, but what was to end has ended.
        """
        if mode not in _MODES:
            raise ConfigError(f"a pause is one of {', '.join(_MODES)}, not {mode!r}")
        with self._changed:
            before = self._mode
            if before is None:
                self._pauses += 1
            self._mode = mode
            if mode == "abort":
                self._aborted = self._pauses
            self._changed.notify_all()
            try:
                self._until(lambda: self._is_still(mode), timeout_s, self._who)
            except SyncTimeoutError:
                self._mode = before
                self._changed.notify_all()
                raise

    def resume(self) -> None:
        with self._changed:
            self._mode = None
            self._changed.notify_all()

    def _is_still(self, mode: PauseMode) -> bool:
        return not self._steps and (mode == "keep" or not self._requests)

    def _who(self) -> str:
        return f"{self._requests} requests are running, {self._steps} of them computing"

    def _until(self, condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
        end = time.monotonic() + seconds
        while not condition():
            left = end - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                if condition():
                    return
                raise SyncTimeoutError(f"{what()} after {seconds:g} s")
