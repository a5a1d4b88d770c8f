"""`Taken`: rows that a process has from a catalog, and the thread that says so while it has them."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import ray

from mooncake_ray.data.catalog import Lease
from mooncake_ray.errors import MooncakeRayError, StoreError
from mooncake_ray.objects.batch_ref import BatchRef

if TYPE_CHECKING:
    from mooncake_ray.objects.catalog import Catalog

__all__ = ["Taken", "keep"]

logger = logging.getLogger("mooncake_ray")

_RENEWALS = 4  # in the time that a lease has
_IDLE_S = 5.0  # then the thread ends


class Taken:
    """Rows from a catalog. `with` it: acknowledged at the end, released if the block raises.

    It may be sent to another process: the lease is renewed wherever it is.
    """

    def __init__(self, catalog: Catalog, lease: Lease, ref: BatchRef | None) -> None:
        self.catalog, self.ref, self._lease = catalog, ref, lease
        self.over = not lease.id
        """Acknowledged or released by this process."""
        self.lost = False
        """The lease has ended otherwise, and others may have the rows."""
        self._renew_at = time.monotonic() + catalog.lease_s / _RENEWALS

    ref: BatchRef | None
    """The rows in the order of `keys`. None if there are none."""

    @property
    def lease(self) -> int:
        """0 if there are no rows."""
        return self._lease.id

    @property
    def keys(self) -> list[str]:
        return [row.key for row in self._lease.rows]

    @property
    def partitions(self) -> list[str]:
        """Of each row."""
        return [row.partition for row in self._lease.rows]

    @property
    def tags(self) -> list[dict[str, Any]]:
        """Of each row, as they were when it was taken."""
        return [dict(row.tags) for row in self._lease.rows]

    def __len__(self) -> int:
        """Rows. 0: no more come."""
        return len(self._lease.rows)

    def __repr__(self) -> str:
        return f"Taken({len(self)} rows, lease={self.lease}, ref={self.ref})"

    def __reduce__(self) -> Any:
        return _received, (self.catalog, self._lease, self.ref, self.over)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.over:
            return
        if kind is None:
            self.catalog.ack(self)
            return
        try:
            self.catalog.release(self)
        except StoreError as e:  # what the block raised is what counts
            logger.warning("mooncake_ray: %r could not be released: %s", self, e)


def _received(catalog: Catalog, lease: Lease, ref: BatchRef | None, over: bool) -> Taken:
    taken = Taken(catalog, lease, ref)
    taken.over = over
    taken._renew_at = 0.0  # it was on its way for a while
    keep(taken)
    return taken


_changed = threading.Condition()
_kept: weakref.WeakSet[Taken] = weakref.WeakSet()
_thread: threading.Thread | None = None


def keep(taken: Taken) -> None:
    """Has its lease renewed while this process refers to it."""
    global _thread
    if taken.over:
        return
    with _changed:
        _kept.add(taken)
        _changed.notify()
        if _thread is None:
            _thread = threading.Thread(target=_run, name="mooncake_ray.leases", daemon=True)
            _thread.start()


def _run() -> None:
    global _thread
    while True:
        _renew()  # has no reference to what is taken when it is back
        with _changed:
            pause = _pause()
            if (pause is None and not _changed.wait(_IDLE_S) and _pause() is None) or not ray.is_initialized():
                _thread = None
                return
            if pause is not None and pause > 0:
                _changed.wait(pause)


def _held() -> list[Taken]:
    return [taken for taken in _kept if not (taken.over or taken.lost)]


def _pause() -> float | None:
    """Until the next renewal; None if there is nothing to renew."""
    times = [taken._renew_at for taken in _held()]
    return min(times) - time.monotonic() if times else None


def _renew() -> None:
    with _changed:
        due = [taken for taken in _held() if taken._renew_at <= time.monotonic()]
    for catalog in {taken.catalog._actor._actor_id: taken.catalog for taken in due}.values():
        mine = [taken for taken in due if taken.catalog._actor._actor_id == catalog._actor._actor_id]
        for taken in mine:
            taken._renew_at = time.monotonic() + catalog.lease_s / _RENEWALS
        try:
            lost = set(catalog._call("renew", [taken.lease for taken in mine]))
        except (MooncakeRayError, ray.exceptions.RayError, RuntimeError) as e:
            logger.warning("mooncake_ray: leases of %r could not be renewed: %s", catalog, e)
            continue
        for taken in mine:
            if taken.lease in lost and not taken.over:
                logger.warning("mooncake_ray: %r is lost", taken)
                taken.lost = True
