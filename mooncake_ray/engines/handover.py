"""`Handover`: work that must be done by an engine's own thread, between two steps, and is known to another thread of its process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from mooncake_ray.errors import SyncTimeoutError, WeightSyncError

__all__ = ["Handover"]


class Handover:
    """Holds one piece of work at a time. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._work: tuple[Callable[[], Any], Future[Any]] | None = None

    def give(self, work: Callable[[], Any], timeout_s: float) -> Any:
        """Waits until the engine's thread has done it. Returns what it returned.

        Raises:
            SyncTimeoutError: nobody has begun it within `timeout_s` seconds, and nobody will; or it was begun, and has not ended by then.
            WeightSyncError: there is other work already.
            What the work raised.
        """
        done = self.leave(work)
        try:
            return done.result(timeout_s)
        except FutureTimeoutError:
            if done.done():  # the work itself raised it, or it has ended just now
                return done.result()
            raise SyncTimeoutError(f"the engine {self._withdraw(done)} new weights within {timeout_s:g} s") from None

    def leave(self, work: Callable[[], Any]) -> Future[Any]:
        """As `give`, and does not wait."""
        done: Future[Any] = Future()
        with self._changed:
            if self._work is not None:
                raise WeightSyncError("the engine has not taken the new weights before these")
            self._work = work, done
            self._changed.notify_all()
        return done

    def take(self, timeout_s: float) -> Any:
        """In the engine's thread: does the work, as soon as there is some. Returns what it returned.

        Raises:
            SyncTimeoutError: there is none within `timeout_s` seconds.
            What the work raised, which whoever gave it gets as well.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._work is not None, timeout_s):
                raise SyncTimeoutError(f"there are no new weights to take over within {timeout_s:g} s")
            work, done = self._work  # type: ignore[misc]
            self._work = None
            done.set_running_or_notify_cancel()
        try:
            out = work()
        except BaseException as e:
            done.set_exception(e)
            raise
        done.set_result(out)
        return out

    def withdraw(self) -> None:
        """Nobody need do it any more. Nothing happens if somebody does already."""
        with self._changed:
            if self._work is not None:
                self._work[1].cancel()
                self._work = None

    def _withdraw(self, done: Future[Any]) -> str:
        with self._changed:
            if self._work is not None and self._work[1] is done:
                self._work = None
                done.cancel()
                return "has not begun to take"
        return "has not taken"
