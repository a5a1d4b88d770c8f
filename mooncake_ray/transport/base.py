"""What a transport is: something that reads bytes of a peer's registered memory into this process's registered memory.

One `Transport` serves one process: it is told of that process's memory, says what a peer must know to read it, and connects to peers. A
`Connection` reads. Nobody writes into a peer. Which objects the bytes belong to, and that they stay what they are meanwhile, is the business
of whoever pins them.

Memory comes later, too: a pool grows by arenas. For connections that are there already, it takes
- of the reader: `register` before the first read into it;
- of the peer: `register` before anybody is told of bytes in it, or else when it is asked for its description again: look for memory that
  came, register it, and only then answer with what `describe` says now;
- of whoever connects the two: a `Peer.redescribe` that asks so. Loopback, shm and tcp do without (the memory comes from the peer's broker or
  server), verbs and mooncake call it once in a read that names a region they have not heard of, and refuse the range (EINVAL) if the
  peer does not know it either.
"""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from mooncake_ray.errors import PeerLostError, RegistrationError, TransportError

if TYPE_CHECKING:
    from mooncake_ray.config import Config

__all__ = [
    "LENGTH",
    "LOCAL",
    "OFFSET",
    "REGION",
    "BaseTransport",
    "Connection",
    "Memory",
    "Peer",
    "Regions",
    "Transport",
    "check_table",
    "checked_ranges",
    "pieces",
    "timed_out",
]

REGION, OFFSET, LOCAL, LENGTH = range(4)
"""Columns of a table of ranges."""


@dataclass(frozen=True)
class Memory:
    """A whole arena of this process, which peers may read. Stays mapped until the transport is closed."""

    region: int
    """Its number, by which peers name it."""
    address: int
    """Where it is mapped for reading and writing."""
    nbytes: int
    fd: int = -1
    """The memory's file, if it has one; only borrowed."""
    device: int = -1
    """The CUDA device whose memory it is, by number; -1: this machine's. Only verbs takes a device's."""

    def __post_init__(self) -> None:
        if self.region < 0 or self.address <= 0 or self.nbytes <= 0:
            raise ValueError(f"not a piece of memory: region {self.region}, {self.nbytes} bytes at {self.address:#x}")


def _no_exchange(blob: bytes) -> bytes:
    raise TransportError("this peer cannot be asked", "exchange", errno.EOPNOTSUPP)


def _no_link() -> Any:
    raise TransportError("this peer has no links", "link", errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Peer:
    """Another process, as one transport needs to know it."""

    host: str
    port: int
    description: Mapping[str, Any]
    """What that process's transport of the same name says of itself (`Transport.describe`)."""
    exchange: Callable[[bytes], bytes] = _no_exchange
    """Asks that process's transport (`Transport.accept`). Raises TransportError."""
    link: Callable[[], Any] = _no_link
    """Opens one more authenticated stream to that process (`_native.peer.Link`), which the caller closes. Raises TransportError."""
    redescribe: Callable[[], Mapping[str, Any]] | None = None
    """Asks the peer anew for `description`, as it is now: how a connection learns of memory that was registered after it was made. Called
    by threads that read, one at a time for a connection; has a deadline of its own. Raises TransportError, which ends that read and leaves
    the connection as it is. None: memory that came later cannot be read (EINVAL)."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@runtime_checkable
class Connection(Protocol):
    """A way to read one peer's memory. Threads may share it; how many reads are under way at once is up to it."""

    closed: bool
    """True once it has failed or was closed: whoever wants to read on connects anew."""
    follows: bool
    """Whether `read` waits for bytes that the peer is still receiving, and has an argument `reached`, which is told meanwhile how far it is (see
    `_native.peer.read_striped`)."""

    def read(self, ranges: np.ndarray, timeout_s: float) -> None:
        """Reads all ranges, in any order, before the deadline.

        Args:
            ranges: C-contiguous uint64 array (n, 4): region and offset at the peer, local address, nbytes. Local addresses lie in memory
                that was registered here, and do not overlap. A range of 0 bytes is nothing to read.
            timeout_s: Seconds.

        Raises:
            TransportError: a range is not inside the peer's memory (`errno` EINVAL), the deadline passed (ETIMEDOUT), or something else failed.
            PeerLostError: the peer is gone, or the connection is.

        After an error any of the ranges' local bytes may have been written, and none outside them. After an error other than EINVAL, and
        other than one of `Peer.redescribe`, the connection is closed.
        """
        ...

    def close(self) -> None:
        """Ends reads that are under way with an error, and waits for them. Idempotent."""
        ...


@runtime_checkable
class Transport(Protocol):
    """One way to move bytes, for one process. Thread-safe."""

    name: ClassVar[str]

    def __init__(self, config: Config, host: str) -> None:
        """`host`: this node's address, for a transport that listens. Raises TransportUnavailableError."""
        ...

    @classmethod
    def unavailable(cls, config: Config) -> str:
        """Why this process cannot use it; "" if it can. Cheap, and without a lasting effect."""
        ...

    def register(self, memory: Memory) -> None:
        """Lets peers read that memory, and reads go into it. Once a region. Raises RegistrationError."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a peer needs to connect, and to read what is registered by now: goes through JSON. Grows as memory is registered, and what
        was said before stays true."""
        ...

    def accept(self, session: int, blob: bytes) -> bytes:
        """Answers a peer's `exchange`. Raises TransportError for what it does not understand."""
        ...

    def ended(self, session: int) -> None:
        """That session of a peer is over: what it was given is taken back."""
        ...

    def connect(self, peer: Peer, timeout_s: float) -> Connection:
        """Raises TransportError, PeerLostError, or TransportUnavailableError if this peer cannot be reached by this transport at all."""
        ...

    def close(self) -> None:
        """Closes its connections, and lets go of all memory. Idempotent."""
        ...


class BaseTransport:
    """What transports have in common: regions that are registered once, peers that have nothing to exchange, and connections that end with
    the transport. See `Transport`; what is left to others begins with an underscore."""

    name: ClassVar[str]
    takes_devices: ClassVar[bool] = False
    """Whether memory of CUDA devices can be registered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = True
        self._memory: dict[int, Memory] = {}
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()

    def _register(self, memory: Memory) -> None:
        """Has the device know it. Under the lock. Raises RegistrationError."""

    def _connect(self, peer: Peer, timeout_s: float) -> Connection:
        raise NotImplementedError

    def _forget(self) -> None:
        """Lets go of all memory. Under the lock, once every connection is closed."""

    def register(self, memory: Memory) -> None:
        with self._lock:
            self._check_registration(memory)
            self._register(memory)
            self._memory[memory.region] = memory

    def accept(self, session: int, blob: bytes) -> bytes:
        raise TransportError(f"{self.name} has nothing to exchange", "exchange", errno.EOPNOTSUPP)

    def ended(self, session: int) -> None:
        pass

    def connect(self, peer: Peer, timeout_s: float) -> Connection:
        self._check_open()
        connection = self._connect(peer, timeout_s)
        with self._lock:
            self._connections.add(connection)
            if self._is_open:
                return connection
        connection.close()
        raise self._closed("connect")

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            connections, self._connections = list(self._connections), weakref.WeakSet()
        for connection in connections:
            connection.close()
        with self._lock:
            self._forget()
            self._memory.clear()

    def _check_registration(self, memory: Memory) -> None:
        if not self._is_open:
            raise self._closed("register", RegistrationError)
        if memory.region in self._memory:
            raise RegistrationError(f"region {memory.region} is registered already", "register", errno.EEXIST)
        if memory.device >= 0 and not self.takes_devices:
            text = f"{self.name} cannot read memory of a device ({memory.nbytes} bytes of CUDA device {memory.device})"
            raise RegistrationError(text, "register", errno.EOPNOTSUPP)

    def _check_open(self, op: str = "connect") -> None:
        if not self._is_open:
            raise self._closed(op)

    @staticmethod
    def _closed(op: str, error: type[TransportError] = TransportError) -> TransportError:
        return error("this transport is closed", op, errno.EBADF)


def timed_out(op: str, timeout_s: float, peer: str = "") -> TransportError:
    """What to raise at a deadline."""
    return TransportError(f"{op}{f' of {peer}' if peer else ''}: not done within {timeout_s:g} s", op, errno.ETIMEDOUT, peer)


def check_table(ranges: np.ndarray) -> None:
    """Raises TypeError or ValueError for what is not a table of ranges."""
    if not isinstance(ranges, np.ndarray) or ranges.dtype != np.uint64:
        raise TypeError(f"ranges must be a uint64 array, got {getattr(ranges, 'dtype', type(ranges).__name__)}")
    if ranges.ndim != 2 or ranges.shape[1] != 4 or not ranges.flags.c_contiguous:
        raise ValueError(f"ranges must be a C-contiguous array (n, 4), got shape {ranges.shape}")


def checked_ranges(ranges: np.ndarray, sizes: Mapping[int, int]) -> np.ndarray:
    """The ranges that have bytes, once each lies inside its region.

    Args:
        ranges: As `Connection.read` gets them.
        sizes: Bytes of each region of the peer.

    Raises:
        TypeError, ValueError: not a table of ranges.
        TransportError: EINVAL; names the first range that is wrong.
    """
    check_table(ranges)
    known, where = np.unique(ranges[:, REGION], return_inverse=True)
    size = np.array([sizes.get(int(region), 0) for region in known], np.uint64)[where]
    wrong = (ranges[:, LENGTH] > size) | (ranges[:, OFFSET] > size - np.minimum(ranges[:, LENGTH], size))
    wrong |= ~np.array([int(region) in sizes for region in known], bool)[where]
    if wrong.any():
        at = int(np.argmax(wrong))
        region, offset, _, nbytes = map(int, ranges[at])
        have = f"which has {sizes[region]} bytes" if region in sizes else f"which there is not (regions {_numbers(sizes)})"
        raise TransportError(f"range {at} of {len(ranges)}: {nbytes} bytes at {offset} of region {region}, {have}", "read", errno.EINVAL)
    nothing = ranges[:, LENGTH] == 0
    return ranges[~nothing] if nothing.any() else ranges


def _numbers(sizes: Mapping[int, int]) -> str:
    return ", ".join(map(str, sorted(sizes))) or "none"


class Regions:
    """What a connection knows of its peer's regions: asks anew for what it does not know. Thread-safe."""

    def __init__(self, peer: Peer, parse: Callable[[Mapping[str, Any]], dict[int, Any]]) -> None:
        self._peer, self._parse = peer, parse
        self._lock = threading.Lock()
        self._known = self._parsed(peer.description)

    def of(self, ranges: np.ndarray) -> dict[int, Any]:
        """All known regions, those of the ranges among them if the peer has them."""
        known = self._known
        if self._peer.redescribe is None or known.keys() >= set(np.unique(ranges[:, REGION]).tolist()):
            return known
        with self._lock:
            self._known = self._parsed(self._peer.redescribe())
            return self._known

    def _parsed(self, description: Mapping[str, Any]) -> dict[int, Any]:
        try:
            return self._parse(description)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            text = f"{self._peer} describes itself in a way that is not understood: {e!r}"
            raise PeerLostError(text, "describe", errno.EPROTO, str(self._peer)) from e


def pieces(ranges: np.ndarray, most: int) -> np.ndarray:
    """The same bytes in ranges of at most `most` bytes, in order."""
    if most <= 0:
        raise ValueError(f"a piece has at least one byte, got {most}")
    most_ = np.uint64(most)
    counts = ((ranges[:, LENGTH] + (most_ - np.uint64(1))) // most_).astype(np.int64)
    if (counts == 1).all():
        return ranges
    out = np.repeat(ranges, counts, axis=0)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    skipped = (np.arange(len(out)) - first).astype(np.uint64) * most_
    out[:, OFFSET] += skipped
    out[:, LOCAL] += skipped
    out[:, LENGTH] = np.minimum(out[:, LENGTH] - skipped, most_)
    return out
