"""Objects of other nodes' pools, as this process gets them: through its node's engine."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from mooncake_ray._native import pool
from mooncake_ray.counters import timed
from mooncake_ray.errors import GetTimeoutError, ObjectLostError, ObjectNotFoundError
from mooncake_ray.objects.asking import ask_engine
from mooncake_ray.store.packing import Region
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.transfer.door import Door, Part

if TYPE_CHECKING:
    from mooncake_ray.objects.session import Session

__all__ = ["Elsewhere"]


class Elsewhere(Region):
    """An object of another node's pool. Comes into this node's when it is first needed, once for all processes of the node."""

    __slots__ = ("_pool_id", "_session")

    def __init__(self, session: Session, pool_id: bytes, id: bytes) -> None:
        super().__init__(session.client, id)
        self._session, self._pool_id = session, pool_id

    @property
    def is_here(self) -> bool:
        """Also if somebody else on this node has brought it here."""
        if self._shared is None and self._private is None:
            with contextlib.suppress(ObjectNotFoundError, ObjectLostError, GetTimeoutError):
                self._private = self.client.get(self.id, 0.0, True)
        return self._shared is not None or self._private is not None

    def prefetch(self, deadline: Deadline) -> None:
        """Asks this node's engine for it, and does not wait. Raises GetTimeoutError: there is no engine to ask."""

        def ask(door: Door, left: float) -> AbstractContextManager[bytes]:
            door.prefetch(self._pool_id, self.id, left)
            return contextlib.nullcontext(self.id)

        ask_engine(self._session, self._what, ask, lambda _: None, deadline)

    def _pin(self, writable: bool) -> pool.Pin:
        deadline = Deadline(self._session.config.pull_timeout_s)
        with timed("remote"):
            with contextlib.suppress(ObjectNotFoundError, ObjectLostError):  # not in this pool
                return self.client.get(self.id, deadline.timeout_s, writable)

            def take(door: Door, left: float) -> AbstractContextManager[bytes]:
                return door.pulled(self._pool_id, self.id, left)

            return ask_engine(self._session, self._what, take, lambda id: self.client.get(id, deadline.timeout_s, writable), deadline)

    def read(self, runs: np.ndarray) -> np.ndarray:
        deadline = Deadline(self._session.config.pull_timeout_s)
        total = int(runs[:, 1].sum())
        part = Part.packed(self._pool_id, self.id, runs)

        def take(door: Door, left: float) -> AbstractContextManager[bytes]:
            return door.gathered([part], total, left)

        with timed("remote"):
            pin = ask_engine(self._session, self._what, take, lambda id: self.client.get(id, deadline.timeout_s, True), deadline)
        return np.frombuffer(pin, np.uint8, total)

    @property
    def _what(self) -> str:
        return f"object {self.id.hex()} of pool {self._pool_id.hex()[:8]}, on another node"
