"""Peers through Mooncake's own transfer engine (`mooncake.engine`, the package `mooncake-transfer-engine` or its `-non-cuda` variant).

Only used when it is chosen by name, for what its engine does: it listens on every interface whatever address it is given, and serves whoever
connects, without asking for a secret. Use it only where the network is closed to others.

What it lacks is made up for here:
- A call ends when the engine ends it. It runs in a thread, and the deadline does not depend on it.
- A call that failed, or was not waited for, may still be writing. So the engine reads into a buffer of its own, which is given up then, and
  the bytes are copied from there: memory of the pool is never written by what nobody waits for.
- It says -1 and no more. Ranges are checked before, and a peer that does not answer any more is told from one that does.
- With more than some 2,000 small reads at once it fails: a batch has fewer.
- Asked for RDMA where there is no device, it takes TCP and does not say so. Here that is an error.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mooncake_ray._native import pool
from mooncake_ray.errors import PeerLostError, RegistrationError, TransportError, TransportUnavailableError
from mooncake_ray.transport.base import (
    LENGTH,
    OFFSET,
    REGION,
    BaseTransport,
    Connection,
    Memory,
    Peer,
    Regions,
    checked_ranges,
    pieces,
    timed_out,
)
from mooncake_ray.transport.registry import register_transport

if TYPE_CHECKING:
    from mooncake_ray.config import Config

__all__ = ["Mooncake"]

_BUFFER = 16 << 20  # bytes of a connection's own buffer, and of a batch
_BATCH = 512  # reads
_GIVEN_UP = 8  # buffers, and then no more connections are made
_ASK_S = 1.0  # to find out whether a peer that failed is there
_DEVICES = Path("/sys/class/infiniband")
_kept: list[Any] = []  # engines that may still write into given-up buffers: never destroyed


@register_transport
class Mooncake(BaseTransport):
    """See `Transport`."""

    name: ClassVar[str] = "mooncake"

    def __init__(self, config: Config, host: str) -> None:
        if why := self.unavailable(config):
            raise TransportUnavailableError(f"mooncake: {why}", "open")
        super().__init__()
        self._protocol = config.mooncake_protocol
        with _quietly():
            from mooncake.engine import TransferEngine

            self._engine = TransferEngine()
            if status := self._engine.initialize(host, "P2PHANDSHAKE", self._protocol, ""):
                raise TransportUnavailableError(
                    f"mooncake: TransferEngine.initialize({host!r}, {self._protocol!r}) returned {status}", "open"
                )
        self._target = f"{host}:{self._engine.get_rpc_port()}"
        self._buffers: dict[int, mmap.mmap] = {}  # by address: mapped for as long as the engine knows them
        self._given_up: list[mmap.mmap] = []

    @classmethod
    def unavailable(cls, config: Config) -> str:
        try:
            with _quietly():
                import mooncake.engine  # noqa: F401
        except ImportError as e:
            return f"the package mooncake-transfer-engine cannot be imported: {e}"
        if config.mooncake_protocol == "rdma" and not (_DEVICES.is_dir() and any(_DEVICES.iterdir())):
            return f"no RDMA device ({_DEVICES} has none), and mooncake_protocol is rdma"
        return ""

    def _register(self, memory: Memory) -> None:
        if status := self._engine.register_memory(memory.address, memory.nbytes):
            text = f"Mooncake refuses to register {memory.nbytes} bytes at {memory.address:#x}: it returned {status}"
            raise RegistrationError(text, "register_memory")

    def describe(self) -> dict[str, Any]:
        with self._lock:
            regions = {str(i): [m.address, m.nbytes] for i, m in self._memory.items()}
        return {"target": self._target, "protocol": self._protocol, "regions": regions}

    def _connect(self, peer: Peer, timeout_s: float) -> Connection:
        regions = Regions(peer, lambda d: {int(i): (int(address), int(nbytes)) for i, (address, nbytes) in d["regions"].items()})
        protocol, target = peer.description.get("protocol"), peer.description.get("target")
        if protocol != self._protocol:
            raise TransportUnavailableError(
                f"mooncake: protocol {self._protocol!r} here, {protocol!r} at {peer}", "connect", peer=str(peer)
            )
        if not _answers(str(target), min(timeout_s, _ASK_S)):
            raise PeerLostError(f"the engine of {peer} does not answer at {target}", "connect", errno.ECONNREFUSED, str(peer))
        if (given_up := len(self._given_up)) >= _GIVEN_UP:
            text = f"mooncake: {given_up} reads of this process failed and may not have ended; the limit is {_GIVEN_UP}"
            raise TransportUnavailableError(text, "connect", errno.EBUSY, str(peer))
        return _Connection(self, peer, str(target), regions)

    def batch(self, target: str, to: list[int], at: list[int], nbytes: list[int]) -> int:
        return self._engine.batch_transfer_sync_read(target, to, at, nbytes)

    def buffer(self) -> int:
        """The address of a new registered buffer."""
        memory = mmap.mmap(-1, _BUFFER)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        if status := self._engine.register_memory(address, _BUFFER):
            text = f"Mooncake refuses to register a buffer of {_BUFFER} bytes: it returned {status}"
            raise RegistrationError(text, "register_memory")
        self._buffers[address] = memory
        return address

    def give_back(self, address: int) -> None:
        self._engine.unregister_memory(address)
        self._buffers.pop(address).close()

    def give_up(self, address: int) -> None:
        self._given_up.append(self._buffers.pop(address))

    def _forget(self) -> None:
        for address in [m.address for m in self._memory.values()] + list(self._buffers):
            self._engine.unregister_memory(address)
        self._buffers.clear()
        if self._given_up:
            _kept.append((self._engine, self._given_up))


class _Connection:
    """One read at a time."""

    follows = False

    def __init__(self, transport: Mooncake, peer: Peer, target: str, regions: Regions) -> None:
        self._transport, self._peer, self._target, self._regions = transport, str(peer), target, regions
        self._turn = threading.Lock()
        self._results: queue.SimpleQueue[int | str] = queue.SimpleQueue()  # what the engine returned; why it raised; "" for close()
        self._address = transport.buffer()
        self.closed = self._ended = False

    def read(self, ranges: np.ndarray, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        ranges = checked_ranges(ranges, {}) if not isinstance(ranges, np.ndarray) or ranges.ndim != 2 else ranges
        if not self._turn.acquire(timeout=max(0.0, timeout_s)):
            raise timed_out("read", timeout_s, self._peer)
        try:
            self._still_open()
            known = self._regions.of(ranges) if ranges.dtype == np.uint64 and ranges.shape[1] == 4 else {}
            small = pieces(checked_ranges(ranges, {i: nbytes for i, (_, nbytes) in known.items()}), _BUFFER)
            for batch in _batches(small):
                self._read_batch(batch, known, deadline, timeout_s)
        finally:
            self._turn.release()

    def _read_batch(self, batch: np.ndarray, known: dict[int, tuple[int, int]], deadline: float, timeout_s: float) -> None:
        nbytes = batch[:, LENGTH]
        bases = np.array([known[i][0] for i in batch[:, REGION].tolist()], np.uint64)
        to = (np.cumsum(nbytes) - nbytes + np.uint64(self._address)).astype(np.uint64)
        call = (self._target, to.tolist(), (bases + batch[:, OFFSET]).tolist(), nbytes.tolist())
        threading.Thread(target=self._call, args=call, name="mooncake_ray-mooncake", daemon=True).start()
        try:
            result = self._results.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            self._give_up()
            raise timed_out("read", timeout_s, self._peer) from None
        if result == 0:
            pool.copy(np.ascontiguousarray(np.stack([batch[:, 2], to, nbytes], axis=1)))
            return
        self._give_up()
        if result == "":
            raise TransportError("this connection was closed meanwhile", "read", errno.EBADF, self._peer)
        if not _answers(self._target, min(_ASK_S, max(0.1, deadline - time.monotonic()))):
            raise PeerLostError(f"the engine of {self._peer} is gone (Mooncake: {result})", "read", errno.ECONNRESET, self._peer)
        raise TransportError(f"Mooncake read nothing from {self._peer}, and gives no reason but {result}", "read", errno.EIO, self._peer)

    def _call(self, *call: Any) -> None:
        try:
            self._results.put(self._transport.batch(*call))
        except Exception as e:  # whatever it is, it is for the reader to know
            self._results.put(repr(e))

    def _give_up(self) -> None:
        self.closed = self._ended = True
        self._transport.give_up(self._address)

    def _still_open(self) -> None:
        if self.closed:
            raise TransportError("this connection is closed", "read", errno.EBADF, self._peer)

    def close(self) -> None:
        self.closed = True
        if not self._turn.acquire(blocking=False):
            self._results.put("")
            self._turn.acquire()
        with contextlib.ExitStack() as stack:
            stack.callback(self._turn.release)
            if not self._ended:
                self._ended = True
                self._transport.give_back(self._address)


def _batches(ranges: np.ndarray) -> Iterator[np.ndarray]:
    """Parts of the table that fit into the buffer."""
    first = total = 0
    for i, nbytes in enumerate(ranges[:, LENGTH].tolist()):
        if i - first == _BATCH or total + nbytes > _BUFFER:
            yield ranges[first:i]
            first, total = i, 0
        total += nbytes
    if first < len(ranges):
        yield ranges[first:]


def _answers(target: str, timeout_s: float) -> bool:
    """Whether the kernel there takes connections for it; True also for a process that is stopped."""
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """The engine takes the level of its messages to stderr from the environment when it is loaded. What the user has set stays."""
    ours = {name: value for name, value in (("GLOG_minloglevel", "3"), ("MC_LOG_LEVEL", "ERROR")) if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
