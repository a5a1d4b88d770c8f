"""`Kept`: something lent to this process, and the thread that says that it has it still."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Protocol

import ray

from mooncake_ray.errors import MooncakeRayError

__all__ = ["Kept", "Lender", "keep"]

logger = logging.getLogger("mooncake_ray")

_RENEWALS = 4  # in the time that a lease has
_IDLE_S = 5.0  # then the thread ends


class Lender(Protocol):
    """Who lends."""

    lease_s: float

    @property
    def identity(self) -> str:
        """Of several handles of one, the same."""
        ...

    def renew(self, leases: Sequence[Any]) -> Collection[Any]:
        """Returns those that have ended."""
        ...


class Kept(ABC):
    """What is lent is renewed while this process refers to it, once it was given to `keep`."""

    def __init__(self, lender: Lender, *, over: bool = False) -> None:
        self.lender = lender
        self.over = over
        """Given back by this process, or it was never lent."""
        self.lost = False
        """The lease has ended otherwise, and others may have it."""
        self.renew_at = time.monotonic() + lender.lease_s / _RENEWALS

    @property
    @abstractmethod
    def lease(self) -> Hashable:
        """By which its lender knows it."""


_changed = threading.Condition()
_kept: weakref.WeakSet[Kept] = weakref.WeakSet()
_thread: threading.Thread | None = None


def keep(lent: Kept) -> None:
    """Has it renewed."""
    global _thread
    if lent.over:
        return
    with _changed:
        _kept.add(lent)
        _changed.notify()
        if _thread is None:
            _thread = threading.Thread(target=_run, name="mooncake_ray.leases", daemon=True)
            _thread.start()


def _run() -> None:
    global _thread
    while True:
        _renew()  # has no reference to what is lent when it is back
        with _changed:
            pause = _pause()
            if (pause is None and not _changed.wait(_IDLE_S) and _pause() is None) or not ray.is_initialized():
                _thread = None
                return
            if pause is not None and pause > 0:
                _changed.wait(pause)


def _held() -> list[Kept]:
    return [lent for lent in _kept if not (lent.over or lent.lost)]


def _pause() -> float | None:
    """Until the next renewal; None if there is nothing to renew."""
    times = [lent.renew_at for lent in _held()]
    return min(times) - time.monotonic() if times else None


def _renew() -> None:
    with _changed:
        due = [lent for lent in _held() if lent.renew_at <= time.monotonic()]
    for lender in {lent.lender.identity: lent.lender for lent in due}.values():
        mine = [lent for lent in due if lent.lender.identity == lender.identity]
        for lent in mine:
            lent.renew_at = time.monotonic() + lender.lease_s / _RENEWALS
        try:
            ended = set(lender.renew([lent.lease for lent in mine]))
        except (MooncakeRayError, ray.exceptions.RayError, RuntimeError) as e:
            logger.warning("mooncake_ray: leases of %r could not be renewed: %s", lender, e)
            continue
        for lent in mine:
            if lent.lease in ended and not lent.over:
                logger.warning("mooncake_ray: %r is lost", lent)
                lent.lost = True
