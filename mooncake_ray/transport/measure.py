"""Two processes that measure what lies between them: one serves bytes, the other reads them by every transport that both have.

Each has a pool of its own for the time being. What is read is looked at, so a figure is never that of bytes which did not come.
"""

from __future__ import annotations

import errno
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mooncake_ray._native import pool
from mooncake_ray.config import Config
from mooncake_ray.errors import MooncakeRayError, TransportError
from mooncake_ray.store import node
from mooncake_ray.transport.base import Connection, Memory, Peer, Transport
from mooncake_ray.transport.registry import choose, get_transport
from mooncake_ray.transport.tcp import STREAMS

__all__ = ["SIZES", "TRANSPORTS", "Measured", "Server", "measure"]

SIZES = tuple(1 << n for n in (12, 16, 20, 24, 26, 28, 30))  # 4 KiB … 1 GiB
TRANSPORTS = ("verbs", "tcp", "shm")  # unless others are asked for
_RUNS, _LEAST_RUNS, _SIZE_S = 1000, 5, 1.5  # of each size: so many, or for so long
_READ_S = 60.0
_ANSWER_S = 20.0  # for anything else that the peer is asked for: it may be a busy machine
_PAUSE_S = 0.2
_PERIOD = 1_048_573  # a prime


@dataclass(frozen=True)
class Measured:
    """One transport at one size, or why there is none."""

    transport: str
    nbytes: int = 0
    runs: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    bytes_per_s: float = 0.0
    """By the median."""
    streams: int = 0
    nics: list[str] = field(default_factory=list)
    error: str = ""


def _pattern(nbytes: int) -> np.ndarray:
    tile = np.random.default_rng(1).integers(0, 256, _PERIOD, np.uint8)
    return np.resize(tile, nbytes)


class _End:
    """A pool with one object of that size, and the transports that can be used here."""

    def __init__(self, config: Config, host: str, names: Sequence[str], nbytes: int, streams: int) -> None:
        self.undo = ExitStack()
        self.config = replace(config, capacity_bytes=nbytes + (16 << 20), prefault_bytes=0, spill_dir="off", linger_s=0.5)
        self.broker = node.broker_name(f"measure-{secrets.token_hex(8)}")
        self.transports: dict[str, Transport] = {}
        self.why_not: dict[str, str] = {}
        try:
            self.client = node.connect(self.broker, self.config)
            self.undo.callback(self.client.close)
            self.id = self.client.new_id()
            self.lease = self.client.create(self.id, nbytes, 10)
            for name in names:
                self._add(name, host, streams)
        except BaseException:
            self.undo.close()
            raise

    def _add(self, name: str, host: str, streams: int) -> None:
        own: dict[str, Any] = {"shm": {"broker": self.broker, "pool_id": self.client.pool_id}, "tcp": {"streams": streams}}.get(name, {})
        try:
            cls = get_transport(name)
            if why := cls.unavailable(self.config):
                self.why_not[name] = why
                return
            transport = cls(self.config, host, **own)
            self.undo.callback(transport.close)
            for index, address, _, size, fd in self.client.arenas():
                transport.register(Memory(index, address, size, fd))
        except MooncakeRayError as e:
            self.why_not[name] = str(e)
            return
        self.transports[name] = transport

    def describe(self) -> dict[str, Any]:
        return {n: t.describe() for n, t in self.transports.items()} | {n: {"unavailable": why} for n, why in self.why_not.items()}

    def close(self) -> None:
        self.lease = None
        self.undo.close()


class Server:
    """The end that is read. Listens at `host`:`port` until it is closed, for those who have the secret."""

    def __init__(self, config: Config, host: str, port: int, secret: bytes, names: Sequence[str], nbytes: int, nics: list[str]) -> None:
        from mooncake_ray._native import peer

        self._end = end = _End(config, host, names, nbytes, STREAMS)
        try:
            view = np.frombuffer(end.lease, np.uint8)
            view[:] = _pattern(nbytes)
            del view
            end.lease.seal(pool.KIND_TOKEN, end.id)
            self._server = peer.Server(end.client, host, port, secret)
            end.undo.callback(self._server.close)
            self.port = self._server.port
            facts = {"object": end.id.hex(), "nbytes": nbytes, "nics": nics, "transports": end.describe()}
            self._server.describe(json.dumps(facts).encode())
        except BaseException:
            end.close()
            raise

    def serve(self, seconds: float | None = None) -> None:
        """Answers peers; for ever, or so long."""
        end = None if seconds is None else time.monotonic() + seconds
        while end is None or time.monotonic() < end:
            if (request := self._server.next_request(_PAUSE_S)) is None:
                continue
            session, name, blob = request
            if not name:
                for transport in self._end.transports.values():
                    transport.ended(session)
                continue
            try:
                answer = self._end.transports[name].accept(session, blob)
            except (KeyError, MooncakeRayError, ValueError):
                answer = b""  # which no transport takes for an answer
            self._server.answer(session, answer)

    def close(self) -> None:
        self._end.close()


def measure(
    config: Config,
    host: str,
    port: int,
    secret: bytes,
    names: Sequence[str],
    most: int,
    streams: int,
    nics: Callable[[], tuple[str, list[str]]],
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Measured]:
    """Reads from a `Server` by each of the transports, in all SIZES up to `most` bytes.

    Args:
        nics: Tells the address of this end, and the names of its network devices, on the way to that host.
        say: Told what is going on.

    Raises:
        PeerLostError, PeerRefusedError: nobody is there, or has another secret.
    """
    from mooncake_ray._native import peer

    session = secrets.token_bytes(16)
    with ExitStack() as undo:

        def dial() -> Any:
            return peer.Link.connect(host, port, secret, session, timeout_s=_ANSWER_S)

        link = undo.enter_context(closing(dial()))
        facts = _facts(link.describe(_ANSWER_S))
        nbytes = min(most, int(facts["nbytes"]))
        ours, devices = nics()
        end = _End(config, ours, names, nbytes, streams)
        undo.callback(end.close)
        id = bytes.fromhex(facts["object"])
        ((status, region, offset, size, *_),) = link.pin([id], _ANSWER_S, inline=False)
        if status != "ok" or size < nbytes:
            raise TransportError(f"{host}:{port} does not have the {nbytes} bytes it offers ({status}, {size})", "pin", errno.ENODATA)
        undo.callback(_unpin, link, id)
        for name in names:
            say(f"{name}: connecting")
            try:
                choose(name, end.config, facts["transports"], end.why_not)
                there = facts["transports"][name]
                at = Peer(host, port, there, exchange=lambda blob, n=name: link.exchange(n, blob, _ANSWER_S), link=dial)
                with closing(end.transports[name].connect(at, _ANSWER_S)) as connection:
                    described = end.transports[name].describe()
                    used = _rails(described) or devices if name != "shm" else []
                    fixed = {"transport": name, "streams": streams if name == "tcp" else 1, "nics": used}
                    yield from _sizes(connection, (region, offset, end.lease.address), nbytes, fixed, say)
            except MooncakeRayError as e:
                yield Measured(name, error=str(e))


def _sizes(
    connection: Connection, where: tuple[int, int, int], nbytes: int, fixed: dict[str, Any], say: Callable[[str], None]
) -> Iterator[Measured]:
    region, offset, local = where
    for size in [s for s in SIZES if s < nbytes] + [nbytes]:
        say(f"{fixed['transport']}: {size} bytes")
        ranges = np.array([[region, offset, local, size]], np.uint64)
        _blank(local, size)
        connection.read(ranges, _READ_S)
        _check(local, size)
        times: list[float] = []
        start = time.perf_counter()
        while len(times) < _LEAST_RUNS or (len(times) < _RUNS and time.perf_counter() - start < _SIZE_S):
            before = time.perf_counter()
            connection.read(ranges, _READ_S)
            times.append(time.perf_counter() - before)
        p50, p99 = (float(x) for x in np.percentile(times, [50, 99]))
        yield Measured(nbytes=size, runs=len(times), p50_s=p50, p99_s=p99, bytes_per_s=size / p50, **fixed)


def _memory(address: int, nbytes: int) -> np.ndarray:
    import ctypes

    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def _blank(address: int, nbytes: int) -> None:
    _memory(address, nbytes)[:] = 0


def _check(address: int, nbytes: int) -> None:
    if not np.array_equal(_memory(address, nbytes), _pattern(nbytes)):
        raise TransportError(f"{nbytes} bytes were read, and are not what the peer has", "read", errno.EIO)


def _facts(text: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(text)
        if isinstance(facts["transports"], dict) and isinstance(facts["object"], str) and int(facts["nbytes"]) > 0:
            return facts
    except (ValueError, KeyError, TypeError):
        pass
    raise TransportError("what answers there is no `mooncake-ray bench-link --listen`", "describe", errno.EPROTO)


def _rails(description: dict[str, Any]) -> list[str]:
    rails = description.get("rails")
    return [str(r.get("device", r.get("name", r))) if isinstance(r, dict) else str(r) for r in rails] if isinstance(rails, list) else []


def _unpin(link: Any, id: bytes) -> None:
    if not link.closed:
        link.unpin([id], _ANSWER_S)
