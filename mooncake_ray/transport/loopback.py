"""Peers in the same process: the plainest transport, which the others are measured against. Nothing but tests has a use for it."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mooncake_ray.errors import PeerLostError, TransportError, TransportUnavailableError
from mooncake_ray.transport.base import BaseTransport, Connection, Peer, checked_ranges
from mooncake_ray.transport.registry import register_transport

if TYPE_CHECKING:
    from mooncake_ray.config import Config

__all__ = ["Loopback"]

_served: dict[str, Loopback] = {}  # by token


@register_transport
class Loopback(BaseTransport):
    """See `Transport`. A read is one copy a range; the peer's lock is held meanwhile."""

    name: ClassVar[str] = "loopback"

    def __init__(self, config: Config, host: str) -> None:
        super().__init__()
        self._token = secrets.token_hex(16)
        _served[self._token] = self

    @classmethod
    def unavailable(cls, config: Config) -> str:
        return ""

    def describe(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "token": self._token}

    def _connect(self, peer: Peer, timeout_s: float) -> Connection:
        if peer.description.get("pid") != os.getpid():
            raise TransportUnavailableError(f"{peer} is another process than this one ({os.getpid()})", "connect", errno.EHOSTUNREACH)
        there = _served.get(str(peer.description.get("token")))
        if there is None:
            raise PeerLostError(f"{peer} is closed", "connect", errno.ECONNREFUSED, str(peer))
        return _Connection(there, peer)

    def read(self, ranges: np.ndarray, connection: _Connection) -> None:
        with self._lock:
            if connection.closed:
                raise TransportError("this connection is closed", "read", errno.EBADF, connection.peer)
            if not self._is_open:
                connection.closed = True
                raise PeerLostError(f"{connection.peer} is closed", "read", errno.ECONNRESET, connection.peer)
            for region, offset, local, nbytes in checked_ranges(ranges, {i: m.nbytes for i, m in self._memory.items()}).tolist():
                ctypes.memmove(local, self._memory[region].address + offset, nbytes)

    def end(self, connection: _Connection) -> None:
        with self._lock:
            connection.closed = True

    def _forget(self) -> None:
        _served.pop(self._token, None)


class _Connection:
    follows = False

    def __init__(self, there: Loopback, peer: Peer) -> None:
        self._there, self.peer = there, str(peer)
        self.closed = False

    def read(self, ranges: np.ndarray, timeout_s: float) -> None:
        self._there.read(ranges, self)

    def close(self) -> None:
        self._there.end(self)
