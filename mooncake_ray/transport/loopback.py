"""Peers in the same process: the plainest transport, which the others are measured against. Nothing but tests has a use for it."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mooncake_ray.errors import PeerLostError, RegistrationError, TransportError, TransportUnavailableError
from mooncake_ray.transport.base import Connection, Memory, Peer, checked_ranges
from mooncake_ray.transport.registry import register_transport

if TYPE_CHECKING:
    from mooncake_ray.config import Config

__all__ = ["Loopback"]

_served: dict[str, Loopback] = {}  # by token


@register_transport
class Loopback:
    """See `Transport`. A read is one copy a range."""

    name: ClassVar[str] = "loopback"

    def __init__(self, config: Config, host: str) -> None:
        self.memory: dict[int, Memory] = {}
        self.lock = threading.Lock()  # held while bytes are read, and to let go of the memory
        self._token = secrets.token_hex(16)
        _served[self._token] = self

    @classmethod
    def unavailable(cls, config: Config) -> str:
        return ""

    def register(self, memory: Memory) -> None:
        with self.lock:
            if self._token not in _served:
                raise RegistrationError("this transport is closed", "register", errno.EBADF)
            if self.memory.setdefault(memory.region, memory) is not memory:
                raise RegistrationError(f"region {memory.region} is registered already", "register", errno.EEXIST)

    def describe(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "token": self._token}

    def accept(self, session: int, blob: bytes) -> bytes:
        raise TransportError("loopback has nothing to exchange", "exchange", errno.EOPNOTSUPP)

    def ended(self, session: int) -> None:
        pass

    def connect(self, peer: Peer, timeout_s: float) -> Connection:
        if peer.description.get("pid") != os.getpid():
            raise TransportUnavailableError(f"{peer} is another process than this one ({os.getpid()})", "connect", errno.EHOSTUNREACH)
        there = _served.get(str(peer.description.get("token")))
        if there is None:
            raise PeerLostError(f"{peer} is closed", "connect", errno.ECONNREFUSED, str(peer))
        if self._token not in _served:
            raise TransportError("this transport is closed", "connect", errno.EBADF)
        return _Connection(self, there, peer)

    @property
    def is_open(self) -> bool:
        return self._token in _served

    def close(self) -> None:
        with self.lock:
            _served.pop(self._token, None)
            self.memory.clear()


class _Connection:
    def __init__(self, here: Loopback, there: Loopback, peer: Peer) -> None:
        self._here, self._there, self._peer = here, there, peer
        self.closed = False

    def read(self, ranges: np.ndarray, timeout_s: float) -> None:
        with self._there.lock:
            if self.closed or not self._here.is_open:
                raise TransportError("this connection is closed", "read", errno.EBADF, str(self._peer))
            if not self._there.is_open:
                self.closed = True
                raise PeerLostError(f"{self._peer} is closed", "read", errno.ECONNRESET, str(self._peer))
            memory = self._there.memory
            for region, offset, local, nbytes in checked_ranges(ranges, {i: m.nbytes for i, m in memory.items()}).tolist():
                ctypes.memmove(local, memory[region].address + offset, nbytes)

    def close(self) -> None:
        with self._there.lock:
            self.closed = True
