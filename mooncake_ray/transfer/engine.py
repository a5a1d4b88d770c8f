"""One node's engine: the peer server, the transports, the puller and the door, around one session with the node's broker."""

from __future__ import annotations

import json
import logging
import struct
import threading
from typing import Any

from mooncake_ray._native import peer as native
from mooncake_ray._native import pool
from mooncake_ray.config import Config
from mooncake_ray.counters import snapshot
from mooncake_ray.errors import BrokerDiedError, MooncakeRayError, RegistrationError, TransportUnavailableError
from mooncake_ray.transfer.claims import SUBJECT, Claims
from mooncake_ray.transfer.directory import Directory, Endpoint
from mooncake_ray.transfer.door import door_name
from mooncake_ray.transfer.doorkeeper import Doorkeeper
from mooncake_ray.transfer.peers import DESCRIBE, Peers
from mooncake_ray.transfer.pulls import Puller
from mooncake_ray.transport import Memory, Transport, get_transport
from mooncake_ray.transport.shm import Shm

__all__ = ["COUNTED", "Engine"]

logger = logging.getLogger("mooncake_ray")

_OFFERED = ("tcp", "verbs")  # with `auto`, where they can be used; others only if they are asked for by name
COUNTED = ("replicas", "remote_bytes_read", "remote_retries", "relayed", "relays_lost")
"""What an engine counts: objects brought here, bytes read, attempts after an error, objects read from another reader, … and such that failed."""
_POLL_S = 1.0
_ID_BYTES = 16
_TAKEN = b"\1"


class Engine:
    """Lives as long as its broker. Thread-safe."""

    def __init__(self, client: pool.Client, broker: str, directory: Directory, secret: bytes, host: str, config: Config) -> None:
        """Serves the client's pool, which that broker has, at `host`, any port, and this node's processes at its door.

        Raises:
            OSError: EADDRINUSE: another engine has the door.
        """
        self.client, self.config, self.host = client, config, host
        self.over = threading.Event()
        """Set when the broker is gone: there must be another engine."""
        self._closing = False
        self._registered: set[int] = set()
        self._registering = threading.Lock()
        self.why_not: dict[str, str] = {}
        """Transports that this node does without although they are asked for, or seemed usable, and why."""
        self.transports = _transports(config, host, broker, client.pool_id, self.why_not)
        self.server = native.Server(client, host, 0, secret)
        self.endpoint = Endpoint(host, self.server.port)
        try:
            self.register()
            self.peers = Peers(
                host=host,
                me=str(self.endpoint),
                secret=secret,
                config=config,
                transports=self.transports,
                why_not=self.why_not,
                directory=directory,
            )
            self.puller = Puller(client, self.server, self.peers, directory, self._has_arena)
            self.claims = Claims(client, self.peers)
            self.peers.on_gone, self.peers.on_back, self.peers.on_lost = self.puller.gone, self.puller.back, self._lost
            self._door = Doorkeeper(door_name(broker), self.puller.pull, self.puller.gather, self._discard, self.report)
        except BaseException:
            self._close_transports()
            raise
        client.listen(last=True)
        self._threads = [
            threading.Thread(target=target, name=f"mooncake_ray.{name}", daemon=True)
            for name, target in (("events", self._events), ("requests", self._requests))
        ]
        for thread in self._threads:
            thread.start()

    def register(self) -> bytes:
        """Has every transport know every arena, and peers what the transports say of themselves, which it returns."""
        with self._registering:
            for index, address, _, nbytes, fd in self.client.arenas():
                if index in self._registered:
                    continue
                for name, transport in list(self.transports.items()):
                    try:
                        transport.register(Memory(index, address, nbytes, fd))
                    except RegistrationError as e:
                        _do_without(name, str(e), self.why_not)
                        del self.transports[name]  # what peers read by it already ends with an error, and is read by another one
                        transport.close()
                self._registered.add(index)
            missing = {name: {"unavailable": why} for name, why in self.why_not.items()}
            description = json.dumps(missing | {name: t.describe() for name, t in self.transports.items()}).encode()
            self.server.describe(description)
            return description

    def report(self) -> dict[str, Any]:
        """What an operator wants to know; JSON can hold it.

        `endpoint`, `transports` that are offered, those that this node does `without` (and why), `peers` (the transport that reads from each;
        "" before the first read). Of the server, now:
        `connections`, `sessions`, `pins`, `offers` (what is being received, and served meanwhile), `replicas_elsewhere`. Of objects here:
        `replicas_here`, from pools that still are; `claims_elsewhere`, those whose owners are on other nodes. Of the server since its start:
        `bytes_sent` (by it: what is read by RDMA it cannot count), `requests`, `refused` connections. Of the puller, since the process
        started: the numbers in `COUNTED`.
        """
        served = self.server.stats()
        served["replicas_elsewhere"] = served.pop("replicas")
        return {
            "endpoint": str(self.endpoint),
            "transports": sorted(self.transports),
            "without": dict(self.why_not),
            "peers": self.peers.report(),
            "replicas_here": self.puller.replicas(),
            "claims_elsewhere": self.claims.count(),
            **served,
            **dict.fromkeys(COUNTED, 0),
            **snapshot(),
        }

    def close(self) -> None:
        """Stops serving. What it brought here is dropped once nobody reads it. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._door.close()
        self.puller.close()
        self.claims.close()
        self.peers.close()
        self._close_transports()
        self.client.close()
        for thread in self._threads:
            thread.join(5)

    def _close_transports(self) -> None:
        self.server.close()
        for transport in self.transports.values():
            transport.close()

    def _has_arena(self, index: int) -> None:
        """A pool grows by whole arenas, rarely."""
        if index not in self._registered:
            self.register()

    def _discard(self, id: bytes) -> None:
        self.client.unclaim(pool.KIND_SELF, id)

    def _lost(self, endpoint: Endpoint) -> None:
        self.puller.lost(endpoint)
        self.claims.lost(endpoint)

    def _events(self) -> None:
        while not self._closing:
            try:
                event = self.client.next_event(_POLL_S)
            except BrokerDiedError:
                self.over.set()
                return
            if event is None:
                continue
            kind, key = event
            if kind == pool.KIND_GONE:
                self.server.gone(key[:_ID_BYTES])
                self.puller.dropped(key[:_ID_BYTES])
            elif answer := kind & pool.ANSWERS:
                self.claims.answered(answer, kind - answer, key)
            else:
                self.claims.asked(kind, key)

    def _requests(self) -> None:
        while not self._closing:
            request = self.server.next_request(_POLL_S)
            if request is None:
                continue
            session, name, blob = request
            if not name:
                for transport in list(self.transports.values()):
                    transport.ended(session)
                continue
            try:
                if name == SUBJECT:
                    self.claims.receive(blob)
                    self.server.answer(session, _TAKEN)
                    continue
                if name == DESCRIBE:
                    self.server.answer(session, self.register())
                    continue
                if name not in self.transports:
                    raise TransportUnavailableError(f"this node does not offer {name!r}; it offers {sorted(self.transports)}")
                answer = self.transports[name].accept(session, blob)
            except (MooncakeRayError, ValueError, struct.error) as e:
                logger.warning("mooncake_ray: a peer's request for %s was refused: %s", name, e)
                answer = b""
            self.server.answer(session, answer)


def _do_without(name: str, why: str, why_not: dict[str, str]) -> None:
    why_not[name] = why
    logger.warning("mooncake_ray: this node does without %s: %s", name, why)


def _transports(config: Config, host: str, broker: str, pool_id: bytes, why_not: dict[str, str]) -> dict[str, Transport]:
    """Those that this node offers, ready to be told of memory. What was asked for by name and cannot be used is told to whoever reads."""
    wanted = _OFFERED if config.transport == "auto" else ("tcp", config.transport)
    out: dict[str, Transport] = {}
    for name in dict.fromkeys(wanted):
        try:
            cls = get_transport(name)
            why = cls.unavailable(config)
            if not why:
                out[name] = cls(config, host, broker=broker, pool_id=pool_id) if cls is Shm else cls(config, host)
            elif name == config.transport:
                _do_without(name, why, why_not)
            else:
                logger.info("mooncake_ray: no %s on this node: %s", name, why)
        except MooncakeRayError as e:  # this build lacks it; or a device has no memory or queues for this process
            _do_without(name, str(e), why_not)
    return out
