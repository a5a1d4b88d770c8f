"""The other nodes' engines, as one engine is connected to them."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_ray._native import peer as native
from mooncake_ray.config import Config
from mooncake_ray.counters import count
from mooncake_ray.errors import (
    ObjectLostError,
    ObjectNotFoundError,
    TransportError,
)
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.transfer.directory import Endpoint
from mooncake_ray.transport import Connection, Peer, Transport, choose

__all__ = ["Node", "Peers", "Pinned"]

logger = logging.getLogger("mooncake_ray")

_NOT_YET_S = 0.002  # between two questions for an object that is being sealed
_CONNECT_S = 5.0
_POLL_S = 1.0
_ARENAS = 1 << 32  # regions from here on are in no arena: only the peer's own streams read them


@dataclass(frozen=True)
class Pinned:
    """An object that a peer keeps as it is for us."""

    id: bytes
    region: int
    offset: int
    nbytes: int
    available: int
    """Bytes from its start that are there; the peer may still be receiving the rest."""
    inline: bytes | None
    """The bytes themselves, of a small object."""
    source: str
    """Who else to read it from; "" for this peer."""


class Node:
    """One other engine. Thread-safe: each thread that asks has a link for itself meanwhile."""

    def __init__(self, endpoint: Endpoint, peers: Peers) -> None:
        self.endpoint, self._peers = endpoint, peers
        self._session = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._connection: Connection | None = None
        self._closed = False
        self._listening = False
        self.transport = ""
        """Name of the transport that reads from it, once one does."""

    def _dial(self, timeout_s: float, *, events: bool = False) -> Any:
        p, e = self._peers, self.endpoint
        return native.Link.connect(
            e.host, e.port, p.secret, self._session, events=events, me=p.me, source_address=p.host, timeout_s=timeout_s
        )

    def listen(self) -> None:
        """From now on that engine says which of the objects that this node got from it are gone. Does nothing if it does already."""
        with self._lock:
            if self._listening or self._closed:
                return
            self._listening = True
        try:
            link = self._dial(_CONNECT_S, events=True)
        except BaseException:
            self._listening = False
            raise
        threading.Thread(target=self._hear, args=(link,), name="mooncake_ray.gone", daemon=True).start()

    def _hear(self, link: Any) -> None:
        try:
            while not self._closed:
                if (id := link.next_event(_POLL_S)) is not None:
                    self._peers.gone(id)
        except TransportError as e:
            logger.info("mooncake_ray: %s says no more: %s", self.endpoint, e)
        finally:
            self._listening = False
            link.close()

    @contextlib.contextmanager
    def link(self, timeout_s: float) -> Iterator[Any]:
        """A link of this thread alone."""
        with self._lock:
            link = self._idle.pop() if self._idle else None
        if link is None:
            link = self._dial(min(timeout_s, _CONNECT_S))
        try:
            yield link
        finally:
            with self._lock:
                keep = not link.closed and not self._closed
                if keep:
                    self._idle.append(link)
            if not keep:
                link.close()

    @contextlib.contextmanager
    def pinned(self, id: bytes, deadline: Deadline, *, bad_source: str = "", keep: bool = False) -> Iterator[Pinned]:
        """Pins an object there. Left without an error, the pin was held all the time: what was read meanwhile is what the object is.

        Args:
            keep: This node has the object afterwards: it can serve it to others, and is told when it is gone (see `listen`).

        Raises:
            ObjectNotFoundError, ObjectLostError: it is not there.
            GetTimeoutError: it was not sealed before the deadline.
            TransportError: what was read may be anything.
        """
        what = f"object {id.hex()} at {self.endpoint}"
        while True:
            with self.link(deadline.left(what)) as link:
                ((status, region, offset, nbytes, available, inline, source),) = link.pin([id], deadline.left(what), bad_source=bad_source)
            if status != "not-yet":
                break
            time.sleep(min(_NOT_YET_S, deadline.left(what)))
        if status == "missing":
            raise ObjectNotFoundError(f"{what}: it was freed, or is not there")
        if status == "lost":
            raise ObjectLostError(f"{what}: it is lost")
        found = Pinned(id, region, offset, nbytes, available, inline, source)
        if inline is not None:
            yield found
            if keep:
                with self.link(deadline.left(what)) as link:
                    link.unpin([id], deadline.left(what), kept=True)
            return
        try:
            yield found
        except BaseException:
            with contextlib.suppress(TransportError), self.link(_CONNECT_S) as link:
                link.unpin([id], _CONNECT_S)
            raise
        with self.link(deadline.left(what)) as link:
            if not link.unpin([id], deadline.left(what), kept=keep):
                raise TransportError(f"{what} was not pinned all the time it was read", "unpin", peer=str(self.endpoint))

    def read(self, ranges: np.ndarray, deadline: Deadline) -> None:
        """Reads pinned bytes into registered memory: uint64 (n, 4), as `Connection.read` takes them."""
        what = f"read from {self.endpoint}"
        elsewhere = ranges[:, 0] >= _ARENAS
        if elsewhere.any():
            with self.link(deadline.left(what)) as link:
                link.read(np.ascontiguousarray(ranges[elsewhere]), deadline.left(what))
            ranges = np.ascontiguousarray(ranges[~elsewhere])
        if len(ranges):
            self._connected(deadline.left(what)).read(ranges, deadline.left(what))
        count("remote_bytes_read", int(ranges[:, 3].sum()))

    def _connected(self, timeout_s: float) -> Connection:
        with self._lock:
            if self._connection is not None and not getattr(self._connection, "closed", False):
                return self._connection
        with self.link(timeout_s) as link:
            there: Mapping[str, Any] = json.loads(link.describe(timeout_s) or b"{}")
        name = choose(self._peers.config.transport, self._peers.config, there)
        peer = Peer(
            self.endpoint.host,
            self.endpoint.port,
            there[name],
            exchange=lambda blob: self._exchange(name, blob, timeout_s),
            link=lambda: self._dial(_CONNECT_S),
        )
        fresh = self._peers.transports[name].connect(peer, timeout_s)
        logger.info("mooncake_ray: reads from %s by %s", self.endpoint, name)
        with self._lock:
            old, self._connection, self.transport = self._connection, fresh, name
        if old is not None:
            old.close()
        return fresh

    def _exchange(self, name: str, blob: bytes, timeout_s: float) -> bytes:
        with self.link(timeout_s) as link:
            return link.exchange(name, blob, timeout_s)

    def forget_connection(self) -> None:
        """After an error: the next read connects anew."""
        with self._lock:
            old, self._connection = self._connection, None
        if old is not None:
            old.close()

    def close(self) -> None:
        self.forget_connection()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()


class Peers:
    """All of them, by endpoint. Thread-safe."""

    def __init__(
        self, *, host: str, me: str, secret: bytes, config: Config, transports: Mapping[str, Transport], gone: Callable[[bytes], None]
    ) -> None:
        """
        Args:
            me: The endpoint of this engine's own server, which peers tell each other.
            gone: Told of objects that ceased to exist at a peer.
        """
        self.gone = gone
        self.host, self.me, self.secret, self.config, self.transports = host, me, secret, config, transports
        self._lock = threading.Lock()
        self._nodes: dict[Endpoint, Node] = {}

    def of(self, endpoint: Endpoint) -> Node:
        with self._lock:
            node = self._nodes.get(endpoint)
            if node is None:
                node = self._nodes[endpoint] = Node(endpoint, self)
            return node

    def drop(self, endpoint: Endpoint) -> None:
        """Nobody answers there any more."""
        with self._lock:
            node = self._nodes.pop(endpoint, None)
        if node is not None:
            node.close()

    def report(self) -> dict[str, str]:
        """The transport in use, by endpoint."""
        with self._lock:
            return {str(endpoint): node.transport for endpoint, node in self._nodes.items()}

    def close(self) -> None:
        with self._lock:
            nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            node.close()
