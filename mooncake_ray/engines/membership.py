"""`Membership`: an engine's process in a `WeightSyncGroup`, for as long as group and cluster are there. The engine serves on without them."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import ray

from mooncake_ray.engines.joining import Joining
from mooncake_ray.weights.meta import ParamMeta

if TYPE_CHECKING:
    from mooncake_ray.engines.base import EngineAdapter
    from mooncake_ray.sync.engine import Engine

__all__ = ["Membership"]

logger = logging.getLogger("mooncake_ray")

_LOOK_S = 1.0
_GONE_S = 10.0
"""For how long nobody answers where the cluster was. Ray ends a process whose cluster is gone for 60 s, and leaving takes its time, too."""


class Membership:
    """One at a time. Thread-safe. A process that stays connected to Ray ends with the cluster: so it leaves that, too, if it was connected for
    this."""

    def __init__(self, on_leave: Callable[[], None]) -> None:
        """`on_leave`: called when it leaves, by whichever thread notices; also where it was in no group."""
        self._on_leave = on_leave
        self._lock = threading.RLock()
        self._connected = False
        self.member: Engine | None = None

    def join(self, joining: Joining, rank: int, world: int, adapter: Callable[[Sequence[ParamMeta]], EngineAdapter]) -> Engine:
        """Leaves where it was, and joins; see `Joining.join`. If that fails it is in no group."""
        with self._lock:
            self.leave()
            self._connected = not ray.is_initialized()
            try:
                self.member = joining.join(rank, world, adapter)
            except BaseException:
                self.leave()
                raise
            threading.Thread(target=self._watch, args=(self.member,), name="mooncake_ray.watch", daemon=True).start()
            return self.member

    def leave(self) -> None:
        """Idempotent."""
        with self._lock:
            member, self.member = self.member, None
            if member is not None:
                member.close()
            self._on_leave()
            if self._connected:
                self._connected = False
                ray.shutdown()

    def _watch(self, member: Engine) -> None:
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        heard = time.monotonic()
        while self.member is member:
            if _listens(host, int(port)):
                heard = time.monotonic()
            gone = time.monotonic() - heard > _GONE_S
            if member.closed or gone:
                logger.warning("mooncake_ray: %s leaves: its %s", member.member, "cluster is gone" if gone else "group has ended")
                with self._lock:
                    if self.member is member:
                        self.leave()
                return
            time.sleep(_LOOK_S)


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), _LOOK_S):
        return True
    return False
