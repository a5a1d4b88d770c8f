"""Brings objects of other pools into this node's, each once at a time, however many processes want it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from mooncake_ray._native import pool
from mooncake_ray.counters import count
from mooncake_ray.errors import (
    GetTimeoutError,
    MooncakeRayError,
    ObjectExistsError,
    ObjectLostError,
    ObjectNotFoundError,
    PeerRefusedError,
    TransportError,
    TransportUnavailableError,
)
from mooncake_ray.transfer.deadline import Deadline, Pauses
from mooncake_ray.transfer.directory import Directory, Endpoint
from mooncake_ray.transfer.door import Part
from mooncake_ray.transfer.peers import MOST_PINNED, Node, Peers, Pinned

__all__ = ["Puller"]

_RELAY_FROM = 1 << 20  # bytes: smaller objects are read from their home by everybody; as its tracker has it
_CHUNK = 16 << 20  # bytes read at a time of an object that others read from here meanwhile, where the transport does not follow
_FIRST_CHUNK = 1 << 20
_NAMED = 4096  # replicas named in one message
_NAMING_S = 5.0
_READERS = 32  # pools that are read from at the same time, over all gathers
_NOTE = "from another node"
T = TypeVar("T")


class _Flight:
    """One object on its way."""

    def __init__(self) -> None:
        self.landed = threading.Event()
        self.error: MooncakeRayError | None = None
        self.gone = False  # freed at its home meanwhile


@dataclass(frozen=True)
class _Replica:
    """An object that is here and elsewhere."""

    pool_id: bytes
    source: Endpoint
    """Which tells when it is gone there."""
    is_home: bool
    """Or it came from another replica, as its pool is lost."""


@dataclass
class _Coming:
    """A large object that is being read, and others read from here meanwhile, if it is `relayed`."""

    nbytes: int
    lease: pool.Lease
    relayed: bool
    at: int = 0
    """Up to there the bytes are right."""


class Puller:
    """Thread-safe."""

    def __init__(self, client: pool.Client, server: Any, peers: Peers, directory: Directory, has_arena: Callable[[int], None]) -> None:
        """`has_arena`: called with the number of an arena before the transports read into it."""
        self._client, self._server, self._peers, self._directory, self._has_arena = client, server, peers, directory, has_arena
        self._lock = threading.Lock()
        self._flights: dict[bytes, _Flight] = {}
        self._replicas: dict[bytes, _Replica] = {}
        self._readers = concurrent.futures.ThreadPoolExecutor(_READERS, "mooncake_ray.gather")

    # ---- whole objects

    def pull(self, pool_id: bytes, id: bytes, timeout_s: float) -> pool.Pin:
        """Has the object in this node's pool, and pinned, before the deadline.

        Raises:
            ObjectNotFoundError: its home has no such object.
            ObjectLostError: its home is dead, and no other node has it.
            GetTimeoutError: the deadline passed; says what went wrong last.
            StoreFullError: there was no room for it here.
            TransportUnavailableError, PeerRefusedError: trying again would not help.
        """
        deadline = Deadline(timeout_s)
        what = f"pull of object {id.hex()}"
        while True:
            with contextlib.suppress(ObjectNotFoundError, ObjectLostError):
                return self._client.get(id, deadline.left(what))
            with self._lock:
                flight = self._flights.get(id)
                mine = flight is None
                if flight is None:
                    flight = self._flights[id] = _Flight()
            if mine:
                return self._fly(flight, pool_id, id, deadline)
            if not flight.landed.wait(deadline.left(what)):
                raise GetTimeoutError(f"{what}: not done within {timeout_s:g} s")
            if flight.error is not None and not isinstance(flight.error, GetTimeoutError):  # whose deadline may have been shorter
                raise flight.error

    def _fly(self, flight: _Flight, pool_id: bytes, id: bytes, deadline: Deadline) -> pool.Pin:
        try:
            pin = self._bring(pool_id, id, deadline)
            if flight.gone:
                self._client.unclaim(pool.KIND_REPLICA, id)
            return pin
        except MooncakeRayError as e:
            flight.error = e
            raise
        finally:
            with self._lock:
                del self._flights[id]
            flight.landed.set()

    def gone(self, id: bytes) -> None:
        """The object is of no more use to anybody at its home."""
        with self._lock:
            self._replicas.pop(id, None)
            if (flight := self._flights.get(id)) is not None:
                flight.gone = True
        self._client.unclaim(pool.KIND_REPLICA, id)

    def replicas(self) -> int:
        """Of objects in pools that are not lost."""
        with self._lock:
            return sum(replica.is_home for replica in self._replicas.values())

    def dropped(self, id: bytes) -> None:
        """The object ceased to exist in this pool, if it was a replica."""
        with self._lock:
            self._replicas.pop(id, None)

    def back(self, node: Node) -> None:
        """That node may not have been heard when something was gone: has it say so now."""
        with self._lock:
            ids = [id for id, replica in self._replicas.items() if replica.source == node.endpoint]
        for at in range(0, len(ids), _NAMED):
            with contextlib.suppress(MooncakeRayError), node.link(_NAMING_S) as link:
                link.unpin(ids[at : at + _NAMED], _NAMING_S, kept=True)

    def lost(self, endpoint: Endpoint) -> None:
        """Another engine may serve that pool now. If not, what came from there may be all that is left of it, and stays until the room is
        needed."""
        with self._lock:
            pools = {replica.pool_id for replica in self._replicas.values() if replica.source == endpoint}
            now = {pool_id: self._directory.resolve(pool_id) for pool_id in pools}
            for id, replica in list(self._replicas.items()):
                if replica.source != endpoint:
                    continue
                if replica.is_home and (source := now[replica.pool_id]) is not None:
                    self._replicas[id] = replace(replica, source=source)
                else:
                    del self._replicas[id]
        for source in filter(None, set(now.values())):
            self._peers.of(source).watch()
            self.back(self._peers.of(source))  # if it cannot be told now: it is when it is heard

    def _bring(self, pool_id: bytes, id: bytes, deadline: Deadline) -> pool.Pin:
        """Copies the object from its home, or if that is dead, from whoever has it."""
        what = f"object {id.hex()} of pool {pool_id.hex()[:8]}"

        def attempt(node: Node, is_home: bool = True) -> pool.Pin:
            try:
                return self._copy(node, _Replica(pool_id, node.endpoint, is_home), id, deadline)
            except ObjectExistsError:
                with contextlib.suppress(ObjectNotFoundError, ObjectLostError):  # it was here before anybody asked
                    return self._client.get(id, deadline.left(what))
                raise

        try:
            return self._at_home(pool_id, what, deadline, attempt)
        except ObjectLostError:
            for endpoint in self._directory.others():
                with contextlib.suppress(ObjectExistsError, ObjectNotFoundError, ObjectLostError, TransportError):
                    return attempt(self._peers.of(endpoint), False)
            raise

    def _at_home(self, pool_id: bytes, what: str, deadline: Deadline, attempt: Callable[[Node], T]) -> T:
        """Tries with whoever serves the pool, until it works or cannot work any more."""
        pauses, last = Pauses(), "nobody serves that pool"
        while True:
            if (home := self._directory.resolve(pool_id)) is not None:
                node = self._peers.of(home)
                try:
                    return attempt(node)
                except (TransportUnavailableError, PeerRefusedError):
                    raise
                except TransportError as e:
                    if e.errno == errno.EINVAL:
                        raise  # it would be as wrong next time
                    last = str(e)
                    node.forget_connection()
                    self._directory.forget(pool_id)
                    count("remote_retries")
                except ObjectExistsError as e:  # a lease of an engine that was here before, or a removed object that is being read
                    last = str(e)
            if self._directory.is_lost(pool_id):
                raise ObjectLostError(f"{what} is lost with its node: {last}")
            if deadline.over:
                raise GetTimeoutError(f"{what}: not here within {deadline.timeout_s:g} s: {last}")
            time.sleep(min(pauses.next(), max(0.0, deadline.at - time.monotonic())))

    def _copy(self, home: Node, replica: _Replica, id: bytes, deadline: Deadline) -> pool.Pin:
        """Makes a replica of what that node has."""
        what = f"object {id.hex()}"
        with contextlib.ExitStack() as undo:
            home.listen(deadline.left(what))
            with home.pinned([id], deadline, keep=True) as [there]:
                lease = self._lease(id, there.nbytes, deadline.left(what))
                undo.callback(lease.abort)
                if there.inline is not None:
                    memoryview(lease)[:] = there.inline
                else:
                    self._receive(home, there, lease, deadline, undo)
            lease.seal(pool.KIND_REPLICA, id)
            return self._kept(replica, id, deadline.left(what))

    def _kept(self, replica: _Replica, id: bytes, timeout_s: float) -> pool.Pin:
        """Notes a new replica, and pins it."""
        with self._lock:
            self._replicas[id] = replica
        pin = self._client.get(id, timeout_s)
        self._client.watch([id])
        count("replicas")
        return pin

    def _lease(self, id: bytes, nbytes: int, timeout_s: float) -> pool.Lease:
        lease = self._client.create(id, nbytes, timeout_s, _NOTE)
        self._has_arena(lease.arena)
        return lease

    def _receive(self, home: Node, there: Pinned, lease: pool.Lease, deadline: Deadline, undo: contextlib.ExitStack) -> None:
        relayed = there.nbytes >= _RELAY_FROM
        if relayed:
            self._server.offer(there.id, lease)
            undo.callback(self._server.retract, there.id)
        coming, source = _Coming(there.nbytes, lease, relayed), there.source
        while coming.at < coming.nbytes:
            if not source:
                self._read_on(home, there, coming, deadline)
                continue
            node = self._peers.of(Endpoint.parse(source))
            try:
                with node.pinned([there.id], deadline) as [other]:
                    while coming.at < coming.nbytes:
                        self._read_on(node, other, coming, deadline)
                count("relayed")
            except (TransportError, ObjectNotFoundError, ObjectLostError):  # go on from here with another one
                node.forget_connection()
                count("relays_lost")
                with home.pinned([there.id], deadline, bad_source=source) as [again]:
                    source = again.source

    def _read_on(self, node: Node, there: Pinned, coming: _Coming, deadline: Deadline) -> None:
        """Reads the rest of what is there, or some of it."""
        what = f"object {there.id.hex()} at {node.endpoint}"
        at, available = coming.at, there.available
        follows = node.follows(deadline)
        if follows:
            available = there.nbytes
        elif available < there.nbytes:
            with node.link(deadline.left(what)) as link:
                available = link.wait(there.id, at, deadline.left(what))
        if coming.relayed and not follows:
            available = min(available, at + (_CHUNK if at else _FIRST_CHUNK))
        rest = np.array([[there.region, there.offset + at, coming.lease.address + at, available - at]], np.uint64)
        if not coming.relayed:
            node.read(rest, deadline)
            coming.at = available
            return

        def confirm(until: int) -> None:
            with node.link(deadline.left(what)) as link:  # it still has the object, so these bytes were the object's
                link.wait(there.id, until - 1, deadline.left(what))
            coming.at = until
            self._server.progress(there.id, until)

        node.read(rest, deadline, (lambda nbytes: confirm(at + nbytes)) if follows else None)
        confirm(available)

    # ---- parts of objects

    def gather(self, parts: Sequence[Part], nbytes: int, timeout_s: float) -> pool.Pin:
        """Has bytes of several objects, of this pool or others, in a new object of `nbytes` bytes, pinned; zeros where no run goes. The caller
        ends the claim of kind `KIND_SELF` on it. Reads from different pools at the same time.

        Raises:
            As `pull`; TransportError: a run reaches beyond its object (`errno` EINVAL); ValueError: beyond the new one.
        """
        deadline = Deadline(timeout_s)
        for part in parts:
            if not _within(part.runs[:, 1], part.runs[:, 2], nbytes):
                raise ValueError(f"a run of object {part.id.hex()} reaches beyond the {nbytes} bytes there are for it")
        own = self._client.new_id()
        lease = self._lease(own, max(nbytes, 1), deadline.left("room for parts of objects"))
        if sum(int(part.runs[:, 2].sum()) for part in parts) < nbytes:
            np.frombuffer(lease, np.uint8)[:] = 0
        pools: dict[bytes, list[Part]] = {}
        for part in parts:
            pools.setdefault(part.pool_id, []).append(part)
        first, *others = pools.values() or [[]]
        reads = [self._readers.submit(self._fetch_all, of, lease.address, deadline) for of in others]
        try:
            self._fetch_all(first, lease.address, deadline)
        finally:
            concurrent.futures.wait(reads)  # nobody may write there once the lease is given back
        for read in reads:
            read.result()
        lease.seal(pool.KIND_SELF, own)
        return self._client.get(own, deadline.left("parts of objects"))

    def _fetch_all(self, parts: Sequence[Part], to: int, deadline: Deadline) -> None:
        """Of one pool, into registered memory at address `to`."""
        if parts and parts[0].pool_id != self._client.pool_id:
            for at in range(0, len(parts), MOST_PINNED):
                some = parts[at : at + MOST_PINNED]
                what = f"bytes of {len(some)} objects of pool {some[0].pool_id.hex()[:8]}"
                self._at_home(some[0].pool_id, what, deadline, functools.partial(self._fetch, some, to, deadline))
            return
        for part in parts:
            pin = self._client.get(part.id, deadline.left(f"object {part.id.hex()}"))
            _check_run_inside(part, pin.nbytes)
            pool.copy(_moves(part, pin.address, to))

    def _fetch(self, parts: Sequence[Part], to: int, deadline: Deadline, node: Node) -> None:
        """Reads parts of objects of that node by one request."""
        with node.pinned([part.id for part in parts], deadline) as objects:
            ranges = []
            for part, there in zip(parts, objects, strict=True):
                _check_run_inside(part, there.nbytes)
                if there.inline is not None:
                    source = np.frombuffer(there.inline, np.uint8)
                    pool.copy(_moves(part, source.ctypes.data, to))
                    continue
                own = np.empty((len(part.runs), 4), np.uint64)
                own[:, 0], own[:, 3] = there.region, part.runs[:, 2]
                own[:, 1] = part.runs[:, 0] + np.uint64(there.offset)
                own[:, 2] = part.runs[:, 1] + np.uint64(to)
                ranges.append(own)
            if ranges:
                node.read(np.concatenate(ranges), deadline)

    def close(self) -> None:
        """Once nobody gathers any more."""
        self._readers.shutdown(wait=False, cancel_futures=True)


def _within(starts: np.ndarray, lengths: np.ndarray, nbytes: int) -> bool:
    return bool((lengths <= nbytes).all() and (starts <= np.uint64(nbytes) - lengths).all())


def _moves(part: Part, source: int, to: int) -> np.ndarray:
    """As `pool.copy` takes them, from an object that is at address `source`."""
    return np.stack((part.runs[:, 1] + np.uint64(to), part.runs[:, 0] + np.uint64(source), part.runs[:, 2]), axis=1)


def _check_run_inside(part: Part, nbytes: int) -> None:
    if not _within(part.runs[:, 0], part.runs[:, 2], nbytes):
        raise TransportError(f"a run reaches beyond object {part.id.hex()}, which has {nbytes} bytes", "read", errno.EINVAL)
