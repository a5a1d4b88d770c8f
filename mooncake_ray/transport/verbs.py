"""RDMA: the device fetches a peer's bytes into this process's memory, and neither kernel nor peer takes part.

Both ends register whole arenas. A connection is a number of queue pairs, on every rail (a port of a device) that fits one of the peer's; the
bytes of a read are cut into chunks, and each goes to the queue pair with the least to do. What the two ends must know of each other's queue
pairs goes by the peer's `exchange`, as JSON; the keys of its memory are in its description. Peers may read, and nothing else.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mooncake_ray.errors import PeerLostError, RegistrationError, TransportError, TransportUnavailableError
from mooncake_ray.store import gpudirect
from mooncake_ray.transport import rails as _rails
from mooncake_ray.transport.base import BaseTransport, Connection, Memory, Peer, Regions, check_table, checked_ranges, timed_out
from mooncake_ray.transport.registry import register_transport

try:
    from mooncake_ray._native import verbs as _native
except ImportError:  # built where the headers of libibverbs were missing
    _native = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from mooncake_ray.config import Config

__all__ = ["Verbs"]

_VERSION = 2
_QUEUES = 2  # queue pairs a pair of rails: two let a device work on two at once
_TIMEOUT = 16  # 4.096 us * 2**16 = 0.27 s without an answer; so often more:
_RETRIES = 6
_MOST_CONNECTIONS = 64  # of one session of a peer
_MOST_QUEUES = 256  # of one connection


def _usable(config: Config) -> tuple[list[_rails.Port], str]:
    """The ports that are used, or why there is none."""
    if _native is None:
        return [], "this build has no RDMA: the headers of libibverbs were missing"
    try:
        names = _native.device_names()
    except TransportUnavailableError as e:
        return [], str(e)
    there = _rails.list_ports()
    if not there:
        return [], "no RDMA device"
    known = [p for p in there if p.device in names]
    if not known:
        return [], f"libibverbs has no driver for {', '.join(sorted({p.device for p in there}))}"
    only = [n for n in config.rdma_devices.replace(" ", "").split(",") if n]
    if chosen := _rails.choose_ports(known, only):
        return chosen, ""
    of = f" of {', '.join(only)}" if only else ""
    return [], f"no RDMA port{of} is up and has an address (there are {', '.join(map(str, there))})"


@register_transport
class Verbs(BaseTransport):
    """See `Transport`. Reads of one connection take turns; several connections to a peer do not.

    Nothing of it may be used in a forked child.
    """

    name: ClassVar[str] = "verbs"
    takes_devices: ClassVar[bool] = True

    def __init__(
        self,
        config: Config,
        host: str = "",
        *,
        queues: int = _QUEUES,
        largest_registration: int = 0,
        timeout: int = _TIMEOUT,
        retries: int = _RETRIES,
    ) -> None:
        """Opens the devices.

        Args:
            host: Not used: a peer reaches the ports at their own addresses.
            queues: Queue pairs for each pair of rails of two peers.
            largest_registration: Bytes that are registered as one at most; 0: what the devices can.
            timeout: An answer may take 4.096 us * 2**timeout before it is asked for again,
            retries: so many times (7: for ever, with some devices).
        """
        super().__init__()
        ports, why = _usable(config)
        if why:
            raise TransportUnavailableError(why, "open", errno.ENODEV)
        if not 1 <= queues <= 16:
            raise ValueError(f"queues must be 1 to 16, got {queues}")
        if not 0 < timeout < 32 or not 0 <= retries < 8:
            raise ValueError(f"timeout must be 1 to 31 and retries 0 to 7, got {timeout} and {retries}")
        gids = {p: gid for p in ports if (gid := _rails.choose_gid(p))}
        self._rails: Any = _native.Rails([(p.device, p.number, gid.index) for p, gid in gids.items()])
        self._ports = self._rails.ports()
        for port, gid in zip(self._ports, gids.values(), strict=True):
            port["network_bits"] = _rails.network_bits(gid)
        limits = [p["max_registration"] for p in self._ports] + [largest_registration]
        self._largest = min(limit for limit in limits if limit)
        self._queues = queues
        self._manner = (timeout, retries, int(config.rdma_traffic_class), 0)
        self._at = [p.node for p in gids]  # the NUMA node of each rail
        self._nodes = _rails.list_nodes()
        self._home = _rails.home_node(self._nodes, os.sched_getaffinity(0))
        self._regions: dict[int, list[Any]] = {}  # what peers are told of each
        self._sessions: dict[
            int, dict[tuple[str, int], Any]
        ] = {}  # responders by session, and by who asked and the number of the connection
        self._token, self._made = secrets.token_hex(8), 0  # who asks, and how many connections so far

    @classmethod
    def unavailable(cls, config: Config) -> str:
        return _usable(config)[1]

    def register(self, memory: Memory) -> None:
        """Pins all of it, in as many pieces as the devices ask for; or none of it, if one is refused.

        With every device; but the bytes go over those that are nearest to the NUMA node that it prefers: its own, or else this process's.
        """
        with self._lock:
            self._check_registration(memory)
            native = self._rails
            self._memory[memory.region] = memory
        node = _native.memory_node(memory.address)
        near = _rails.near_rails(self._at, node if node >= 0 else self._home, self._nodes)
        on_device = memory.device >= 0
        register = functools.partial(gpudirect.register, native, memory.device) if on_device else native.register
        made: list[list[Any]] = []
        try:  # without the lock: it takes seconds for memory of many gigabytes
            for address, nbytes in _rails.split(memory.address, memory.nbytes, self._largest):
                made.append([address, nbytes, register(address, nbytes, near)])
        except BaseException as e:
            for address, *_ in made:
                native.unregister(address)
            with self._lock:
                self._memory.pop(memory.region, None)
            if isinstance(e, RegistrationError):
                raise RegistrationError(f"region {memory.region}, of all {memory.nbytes} bytes: {e}", e.op, e.errno) from None
            raise
        with self._lock:
            if self._is_open:
                self._regions[memory.region] = [memory.address, memory.nbytes, made, near]

    def describe(self) -> dict[str, Any]:
        """`rails`: places and abilities; `regions`: number, address, nbytes, pieces (address, nbytes, and keys, one a rail), near rails."""
        with self._lock:
            self._check_open("describe")
            regions = [[number, *region] for number, region in self._regions.items()]
        return {"version": _VERSION, "rails": self._ports, "regions": regions}

    def accept(self, session: int, blob: bytes) -> bytes:
        """Makes queue pairs for a peer's. Takes, as JSON, `by`: who asks; `connect`: the number of the connection; `alive`: those before it
        that are still in use, the others are given up; `rails`; and `queues`: their rail, mine, and their end, for each."""
        try:
            asked = json.loads(blob)
            name, alive, ports = (str(asked["by"]), int(asked["connect"])), set(map(int, asked["alive"])), asked["rails"]
            queues = [(ports[theirs], int(mine), (int(number), int(first))) for theirs, mine, number, first in asked["queues"]]
            if not 0 < len(queues) <= _MOST_QUEUES:
                raise ValueError(f"{len(queues)} queue pairs, of at most {_MOST_QUEUES}")
            native, mine = self._take_place(session, name, alive)
            try:
                responder = _native.Responder(native, [rail for _, rail, _ in queues])
                for i, (port, _, end) in enumerate(queues):
                    responder.connect(i, port, end, self._manner)
            except BaseException:
                with self._lock:
                    mine.pop(name, None)
                raise
            with self._lock:
                mine[name] = responder  # of a session that has ended meanwhile, nobody knows `mine` any more
            return json.dumps({"ends": responder.ends()}).encode()
        except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as e:
            raise TransportError(f"a request for queue pairs that is not understood: {e!r}", "exchange", errno.EPROTO) from e

    def _take_place(self, session: int, name: tuple[str, int], alive: set[int]) -> tuple[Any, dict[tuple[str, int], Any]]:
        """Makes room for one more connection of a session: the open rails, and where to note the connection."""
        with self._lock:
            self._check_open("exchange")
            mine = self._sessions.setdefault(session, {})
            for by, number in list(mine):
                # A later one than this may be on its way: what this one does not know of is not therefore closed.
                if by == name[0] and number < name[1] and number not in alive:
                    del mine[by, number]
            if len(mine) >= _MOST_CONNECTIONS:
                raise TransportError(f"a session has at most {_MOST_CONNECTIONS} connections", "exchange", errno.EMFILE)
            mine[name] = None
            return self._rails, mine

    def ended(self, session: int) -> None:
        with self._lock:
            self._sessions.pop(session, None)

    def _connect(self, peer: Peer, timeout_s: float) -> Connection:
        """One exchange, which has a deadline of its own."""
        end = time.monotonic() + timeout_s
        with self._lock:
            self._check_open()
            native = self._rails
        connection = _Connection(peer, native, self._ports, self._queues, self._manner)
        with self._lock:
            self._check_open()
            self._made += 1
            connection.number = self._made
            alive = [c.number for c in self._connections if not c.closed]
            self._connections.add(connection)
        try:
            connection.open(self._token, alive)
            if time.monotonic() > end:
                raise timed_out("connecting", timeout_s, str(peer))
        except BaseException:
            connection.close()
            raise
        return connection

    def _forget(self) -> None:
        self._rails = None
        self._regions.clear()
        self._sessions.clear()


class _Connection:
    follows = False

    def __init__(self, peer: Peer, native: Any, ports: Sequence[Mapping[str, Any]], queues: int, manner: tuple[int, ...]) -> None:
        self.number = 0
        self._peer, self._ports = peer, ports
        try:
            if peer.description["version"] != _VERSION:
                raise ValueError(f"version {peer.description['version']}, not {_VERSION}")
            self._theirs = list(peer.description["rails"])
            pairs = _rails.pair_rails(ports, self._theirs)
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise PeerLostError(
                f"{peer} describes itself in a way that is not understood: {e!r}", "describe", errno.EPROTO, str(peer)
            ) from e
        if not pairs:
            here, there = ([_rails.address_text(p["gid"]) for p in side] for side in (ports, self._theirs))
            raise TransportUnavailableError(f"no RDMA port here ({here}) reaches one of {peer} ({there})", "connect", errno.ENETUNREACH)
        self._pairs = pairs * queues
        self._regions = Regions(peer, self._parse)
        self._given: Mapping[int, Any] | None = None
        self._lock = threading.Lock()
        self._reader: Any = _native.Reader(native, [mine for mine, _ in self._pairs], manner)

    def open(self, by: str, alive: list[int]) -> None:
        """Has the peer make its ends, and leads the two to each other."""
        reader = self._reader
        if reader is None:
            raise TransportError("this connection is closed", "connect", errno.EBADF, str(self._peer))
        queues = [[*pair, *end] for pair, end in zip(self._pairs, reader.ends(), strict=True)]
        blob = json.dumps({"by": by, "connect": self.number, "alive": alive, "rails": self._ports, "queues": queues}).encode()
        answer = self._peer.exchange(blob)
        if not answer:
            raise TransportError(f"{self._peer} refused a connection; its log says why", "exchange", errno.ECONNREFUSED, str(self._peer))
        try:
            ends = [tuple(end) for end in json.loads(answer)["ends"]]
            for i, ((_, theirs), end) in enumerate(zip(self._pairs, ends, strict=True)):
                reader.connect(i, self._theirs[theirs], end, theirs)
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise PeerLostError(
                f"{self._peer} answers in a way that is not understood: {e!r}", "exchange", errno.EPROTO, str(self._peer)
            ) from e
        except TransportError as e:
            raise self._named(e) from None
        self._give(self._regions.of(np.empty((0, 4), np.uint64)))

    @property
    def closed(self) -> bool:
        reader = self._reader
        return reader is None or bool(reader.why_closed)

    def read(self, ranges: np.ndarray, timeout_s: float) -> None:
        check_table(ranges)
        reader = self._reader
        if reader is None:
            raise TransportError("this connection is closed", "read", errno.EBADF, str(self._peer))
        known = self._regions.of(ranges)
        ranges = checked_ranges(ranges, {number: region[1] for number, region in known.items()})
        self._give(known)
        try:
            reader.read(ranges, timeout_s)
        except TransportError as e:
            if e.errno == errno.ETIMEDOUT and e.op == "read":
                raise timed_out("a read", timeout_s, str(self._peer)) from None
            raise self._named(e) from None

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def bytes_by_rail(self) -> dict[str, int]:
        """How many bytes came over each pair of rails, `mine>theirs`."""
        total: dict[str, int] = {}
        reader = self._reader
        for (mine, theirs), nbytes in zip(self._pairs, reader.bytes_read() if reader is not None else [], strict=False):
            name = f"{self._ports[mine]['name']}>{self._theirs[theirs]['name']}"
            total[name] = total.get(name, 0) + nbytes
        return total

    def _give(self, known: Mapping[int, Any]) -> None:
        with self._lock:
            reader = self._reader
            if reader is None or (self._given is not None and known.keys() <= self._given.keys()):
                return  # regions only ever come; another thread may know of more by now
            try:
                reader.set_regions(known, len(self._theirs))
            except (TypeError, ValueError, OverflowError) as e:
                text = f"{self._peer} describes its memory in a way that is not understood: {e!r}"
                raise PeerLostError(text, "describe", errno.EPROTO, str(self._peer)) from e
            self._given = known

    @staticmethod
    def _parse(description: Mapping[str, Any]) -> dict[int, Any]:
        return {int(number): (int(address), int(nbytes), *more) for number, address, nbytes, *more in description["regions"]}

    def _named(self, e: TransportError) -> TransportError:
        return type(e)(f"{self._peer}: {e}", e.op, e.errno, str(self._peer))
