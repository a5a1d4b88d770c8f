"""The other nodes' engines, as one engine is connected to them."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_ray._native import peer as native
from mooncake_ray.config import Config
from mooncake_ray.counters import count
from mooncake_ray.errors import (
    MooncakeRayError,
    ObjectLostError,
    ObjectNotFoundError,
    StoreError,
    TransportError,
)
from mooncake_ray.transfer.deadline import Deadline, Pauses
from mooncake_ray.transfer.directory import Directory, Endpoint
from mooncake_ray.transport import Connection, Peer, Transport, choose
from mooncake_ray.transport.base import LENGTH, REGION

__all__ = ["DESCRIBE", "MOST_PINNED", "Node", "Peers", "Pinned"]

logger = logging.getLogger("mooncake_ray")

DESCRIBE = "describe"
"""Name of the exchange by which an engine is asked what its transports say of themselves, once they know all memory that there is."""
MOST_PINNED = 4096
"""Objects that one request pins."""
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
        self._connecting = threading.Lock()
        self._closed = threading.Event()
        self._tried = threading.Condition(self._lock)
        self._hearing = False
        self._deaf: MooncakeRayError | None = None  # why not
        self._watcher: threading.Thread | None = None
        self.transport = ""
        """Name of the transport that reads from it, once one does."""

    def _dial(self, timeout_s: float, *, events: bool = False) -> Any:
        p, e = self._peers, self.endpoint
        return native.Link.connect(
            e.host, e.port, p.secret, self._session, events=events, me=p.me, source_address=p.host, timeout_s=timeout_s
        )

    def watch(self) -> None:
        """From now on that engine says which of the objects that this node got from it are gone, and whether it is still there is known.
        Does not wait. Idempotent."""
        with self._lock:
            if self._watcher is None and not self._closed.is_set():
                self._watcher = threading.Thread(target=self._hear, name="mooncake_ray.gone", daemon=True)
                self._watcher.start()

    def _hear(self) -> None:
        pauses = Pauses()
        while not self._closed.is_set():
            try:
                link = self._dial(_CONNECT_S, events=True)
            except MooncakeRayError as e:
                self._heard(e)
                if not self._peers.directory.serves(self.endpoint):
                    self._peers.lose(self)
                    return
                self._closed.wait(pauses.next())
                continue
            pauses.reset()
            try:
                self._heard(None)
                self._peers.on_back(self)
                while not self._closed.is_set():
                    if (id := link.next_event(_POLL_S)) is not None:
                        self._peers.on_gone(id)
            except MooncakeRayError as e:
                logger.info("mooncake_ray: %s says no more: %s", self.endpoint, e)
                self._heard(e)
            finally:
                link.close()

    def _heard(self, error: MooncakeRayError | None) -> None:
        with self._tried:
            self._hearing, self._deaf = error is None, error
            self._tried.notify_all()

    def listen(self, timeout_s: float) -> None:
        """Returns when it is heard (see `watch`).

        Raises:
            TransportError: it cannot be, or not in time.
            StoreError: this engine is closed.
        """
        if self._hearing:
            return
        if self._closed.is_set():
            raise StoreError("this engine is closed")
        self.watch()
        with self._tried:
            self._tried.wait_for(lambda: self._hearing or self._deaf is not None, min(timeout_s, _CONNECT_S))
            if self._hearing:
                return
            if self._deaf is not None:
                raise copy.copy(self._deaf)
            raise TransportError(f"{self.endpoint} cannot be heard", "listen", errno.ETIMEDOUT, peer=str(self.endpoint))

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
                keep = not link.closed and not self._closed.is_set()
                if keep:
                    self._idle.append(link)
            if not keep:
                link.close()

    @contextlib.contextmanager
    def pinned(self, ids: Sequence[bytes], deadline: Deadline, *, bad_source: str = "", keep: bool = False) -> Iterator[list[Pinned]]:
        """Pins objects there. Left without an error, the pins were held all the time: what was read meanwhile is what the objects are.

        Args:
            ids: At most `MOST_PINNED`.
            keep: This node has the object afterwards: it can serve it to others, and is told when it is gone (see `listen`).

        Raises:
            ObjectNotFoundError, ObjectLostError: one is not there.
            GetTimeoutError: one was not sealed before the deadline.
            TransportError: what was read may be anything.
        """
        found: dict[int, Pinned] = {}
        try:
            self._pin(ids, found, deadline, bad_source, keep)
            yield [found[i] for i in range(len(ids))]
        except BaseException:
            with contextlib.suppress(TransportError):
                self._unpin(found.values(), Deadline(_CONNECT_S))
            raise
        self._unpin(found.values(), deadline, kept=keep)

    def _pin(self, ids: Sequence[bytes], found: dict[int, Pinned], deadline: Deadline, bad_source: str, keep: bool) -> None:
        """Adds all to `found`, by their places in `ids`; after an error, those that are pinned."""
        left = list(range(len(ids)))
        while left:
            what = f"object {ids[left[0]].hex()} at {self.endpoint}"
            with self.link(deadline.left(what)) as link:
                said = link.pin([ids[i] for i in left], deadline.left(what), bad_source=bad_source, keep=keep)
            found.update({i: Pinned(ids[i], *one) for i, (status, *one) in zip(left, said, strict=True) if status in ("ok", "inline")})
            for i, (status, *_) in zip(left, said, strict=True):
                if status == "missing":
                    raise ObjectNotFoundError(f"object {ids[i].hex()} at {self.endpoint}: it was freed, or is not there")
                if status == "lost":
                    raise ObjectLostError(f"object {ids[i].hex()} at {self.endpoint}: it is lost")
            if left := [i for i in left if i not in found]:
                time.sleep(min(_NOT_YET_S, deadline.left(what)))

    def _unpin(self, found: Iterable[Pinned], deadline: Deadline, kept: bool = False) -> None:
        """Raises TransportError: one was not pinned all the time."""
        ids = [there.id for there in found if there.inline is None]
        if ids:
            what = f"object {ids[0].hex()} at {self.endpoint}"
            with self.link(deadline.left(what)) as link:
                if not link.unpin(ids, deadline.left(what), kept=kept):
                    raise TransportError(f"{what} was not pinned all the time it was read", "unpin", peer=str(self.endpoint))

    def follows(self, deadline: Deadline) -> bool:
        """Whether `read` waits for what is still being received there, and says how far it is."""
        return self._connected(deadline.left(f"read from {self.endpoint}")).follows

    def read(self, ranges: np.ndarray, deadline: Deadline, reached: Callable[[int], None] | None = None) -> None:
        """Reads pinned bytes into registered memory: uint64 (n, 4), as `Connection.read` takes them.

        `reached`: told meanwhile how many bytes are there, where it `follows`; not of the end. What it raises ends the read.
        """
        what = f"read from {self.endpoint}"
        count("remote_bytes_read", int(ranges[:, LENGTH].sum()))
        elsewhere = ranges[:, REGION] >= _ARENAS
        if elsewhere.any():
            with self.link(deadline.left(what)) as link:
                link.read(np.ascontiguousarray(ranges[elsewhere]), deadline.left(what))
            ranges = np.ascontiguousarray(ranges[~elsewhere])
        if len(ranges):
            told = {"reached": reached} if reached is not None else {}
            self._connected(deadline.left(what)).read(ranges, deadline.left(what), **told)

    def _connected(self, timeout_s: float) -> Connection:
        if (there := self._connection) is not None and not there.closed:
            return there
        if not self._connecting.acquire(timeout=timeout_s):
            raise TransportError(f"{self.endpoint}: no connection yet", "connect", errno.ETIMEDOUT, peer=str(self.endpoint))
        try:
            if (there := self._connection) is not None and not there.closed:
                return there  # that another thread has made meanwhile
            return self._connect(timeout_s)
        finally:
            self._connecting.release()

    def _connect(self, timeout_s: float) -> Connection:
        with self.link(timeout_s) as link:
            there: Mapping[str, Any] = json.loads(link.describe(timeout_s) or b"{}")
        name = choose(self._peers.config.transport, self._peers.config, there, self._peers.why_not)
        peer = Peer(
            self.endpoint.host,
            self.endpoint.port,
            there[name],
            exchange=lambda blob: self._exchange(name, blob, timeout_s),
            link=lambda: self._dial(_CONNECT_S),
            redescribe=lambda: json.loads(self._exchange(DESCRIBE, b"", _CONNECT_S)).get(name, {}),
        )
        if (transport := self._peers.transports.get(name)) is None:
            raise TransportError(f"{name} was given up on this node a moment ago", "connect", errno.ECANCELED)
        fresh = transport.connect(peer, timeout_s)
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
        self._closed.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()


class Peers:
    """All of them, by endpoint. Thread-safe."""

    def __init__(
        self,
        *,
        host: str,
        me: str,
        secret: bytes,
        config: Config,
        transports: Mapping[str, Transport],
        why_not: Mapping[str, str],
        directory: Directory,
    ) -> None:
        """
        Args:
            me: The endpoint of this engine's own server, which peers tell each other.
            transports, why_not: What may be used, and why other transports may not; both may change meanwhile.
        """
        self.on_gone: Callable[[bytes], None] = lambda id: None
        """Told of objects that ceased to exist at a peer."""
        self.on_back: Callable[[Node], None] = lambda node: None
        """Told of a peer that is heard from now on, and may not have been when something ceased to exist."""
        self.on_lost: Callable[[Endpoint], None] = lambda endpoint: None
        """Told of a peer that is no more."""
        self.host, self.me, self.secret, self.config, self.directory = host, me, secret, config, directory
        self.transports, self.why_not = transports, why_not
        self._lock = threading.Lock()
        self._nodes: dict[Endpoint, Node] = {}
        self._closed = False

    def of(self, endpoint: Endpoint) -> Node:
        with self._lock:
            node = self._nodes.get(endpoint)
            if node is None:
                node = Node(endpoint, self)
                if self._closed:  # for whoever is still at work
                    node.close()
                else:
                    self._nodes[endpoint] = node
            return node

    def lose(self, node: Node) -> None:
        """It is no more."""
        with self._lock:
            if self._nodes.get(node.endpoint) is node:
                del self._nodes[node.endpoint]
        node.close()
        self.on_lost(node.endpoint)

    def report(self) -> dict[str, str]:
        """The transport in use, by endpoint."""
        with self._lock:
            return {str(endpoint): node.transport for endpoint, node in self._nodes.items()}

    def close(self) -> None:
        with self._lock:
            self._closed = True
            nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            node.close()
