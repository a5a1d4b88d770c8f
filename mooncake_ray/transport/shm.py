"""Peers on the same machine, in the same network namespace: a read is a copy out of their pool's own memory, by several threads.

The peer says which broker has its pool. The memory comes from that broker as it does for any of its clients, mapped for reading only, and a
region is the arena of that number. It stays readable whatever happens to the peer's process; when the broker is gone its pool is, and so
reads end with PeerLostError.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mooncake_ray._native import pool
from mooncake_ray.errors import BrokerDiedError, PeerLostError, StoreError, TransportError
from mooncake_ray.errors import TransportUnavailableError as Unavailable
from mooncake_ray.transport.base import (
    LENGTH,
    LOCAL,
    OFFSET,
    REGION,
    BaseTransport,
    Connection,
    Peer,
    check_table,
    checked_ranges,
    pieces,
    timed_out,
)
from mooncake_ray.transport.registry import register_transport

if TYPE_CHECKING:
    from mooncake_ray.config import Config

__all__ = ["Shm", "machine"]

_STEP = 64 << 20  # bytes copied between two looks at the clock


def machine() -> dict[str, Any]:
    """What two processes have in common if they can reach each other's brokers: the running kernel, and the network namespace."""
    return {"boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "netns": os.stat("/proc/self/ns/net").st_ino}


def _by(deadline: float, ask: Callable[[], Any], undo: Callable[[Any], None] = lambda answer: None) -> Any:
    """What `ask` answers; TimeoutError at the deadline, after which the answer that may still come is undone.

    A client waits for a broker that is stopped as long as it takes, and so a thread does that."""
    answers: list[tuple[Any, Exception | None]] = []
    lock, here, late = threading.Lock(), threading.Event(), False

    def work() -> None:
        try:
            answer = ask(), None
        except Exception as e:  # raised again by whoever waits
            answer = None, e
        with lock:
            if late and answer[1] is None:
                undo(answer[0])
            answers.append(answer)
        here.set()

    threading.Thread(target=work, name="mooncake_ray-shm", daemon=True).start()
    here.wait(max(0.0, deadline - time.monotonic()))
    with lock:
        late = not answers
    if late:
        raise TimeoutError
    if (error := answers[0][1]) is not None:
        raise error
    return answers[0][0]


@register_transport
class Shm(BaseTransport):
    """See `Transport`. `broker` is the name of the one that has this process's pool, `pool_id` the pool's; "" where others have none to read."""

    name: ClassVar[str] = "shm"

    def __init__(self, config: Config, host: str, *, broker: str = "", pool_id: bytes = b"") -> None:
        super().__init__()
        self._broker, self._pool_id = broker, pool_id

    @classmethod
    def unavailable(cls, config: Config) -> str:
        try:
            machine()
        except OSError as e:
            return f"this kernel does not say who it is: {e}"
        return ""

    def describe(self) -> dict[str, Any]:
        if not self._broker:
            return {"unavailable": "it has no pool that others could read"}
        return {"broker": self._broker, "pool": self._pool_id.hex(), **machine()}

    def _connect(self, peer: Peer, timeout_s: float) -> Connection:
        here, there = machine(), peer.description
        if there.get("unavailable"):
            raise Unavailable(f"shm with {peer}: {there['unavailable']}", "connect", errno.EOPNOTSUPP, str(peer))
        if here["boot"] != there.get("boot"):
            raise Unavailable(
                f"{peer} is on another machine: boot {there.get('boot')}, here {here['boot']}", "connect", errno.EXDEV, str(peer)
            )
        if here["netns"] != there.get("netns"):
            text = f"{peer} is in another network namespace: {there.get('netns')}, here {here['netns']}"
            raise Unavailable(text, "connect", errno.EXDEV, str(peer))
        return _Connection(peer, str(there.get("broker")), str(there.get("pool")), timeout_s)


class _Connection:
    """Holds a session with the peer's broker, whose maps live as long, and a socket that tells when the broker is gone."""

    follows = False

    def __init__(self, peer: Peer, broker: str, pool_id: str, timeout_s: float) -> None:
        self._peer = str(peer)
        self._idle = threading.Condition()
        self._reads = 0
        self.closed = False
        self._client = None
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        deadline = time.monotonic() + timeout_s
        try:
            self._line.connect(b"\0" + broker.encode())
            self._client = _by(deadline, lambda: pool.Client.connect(broker, "shm"), pool.Client.close)
            if self._client.pool_id.hex() != pool_id:
                raise BrokerDiedError(f"it has pool {self._client.pool_id.hex()} now, not {pool_id}")
            self._arenas = _by(deadline, self._mapped)
        except TimeoutError:
            self._end()
            raise timed_out("connect", timeout_s, self._peer) from None
        except (StoreError, OSError, ValueError) as e:
            self._end()
            raise PeerLostError(f"the broker of {self._peer} cannot be reached: {e}", "connect", errno.ECONNREFUSED, self._peer) from e

    def _mapped(self) -> dict[int, tuple[int, int]]:
        return {index: (ro, nbytes) for index, _, ro, nbytes, _ in self._client.arenas()}

    def read(self, ranges: np.ndarray, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        check_table(ranges)
        with self._idle:
            self._still_open()
            self._reads += 1
        try:
            self._copy(ranges, deadline, timeout_s)
        except TransportError as e:
            if e.errno != errno.EINVAL:
                self.closed = True
            raise
        finally:
            with self._idle:
                self._reads -= 1
                self._idle.notify_all()

    def _copy(self, ranges: np.ndarray, deadline: float, timeout_s: float) -> None:
        try:
            if not self._arenas.keys() >= set(np.unique(ranges[:, REGION]).tolist()):
                self._arenas = _by(deadline, self._mapped)
        except TimeoutError:
            raise timed_out("read", timeout_s, self._peer) from None
        except StoreError as e:
            raise PeerLostError(f"the broker of {self._peer} is gone: {e}", "read", errno.ECONNRESET, self._peer) from e
        arenas = self._arenas
        small = pieces(checked_ranges(ranges, {index: nbytes for index, (_, nbytes) in arenas.items()}), _STEP)
        moves = np.empty((len(small), 3), np.uint64)
        moves[:, 0] = small[:, LOCAL]
        for region in np.unique(small[:, REGION]):
            of = small[:, REGION] == region
            moves[of, 1] = small[of, OFFSET] + np.uint64(arenas[int(region)][0])
        moves[:, 2] = small[:, LENGTH]
        step = np.cumsum(moves[:, 2]) // np.uint64(_STEP)
        for part in np.split(moves, np.flatnonzero(np.diff(step)) + 1) if len(moves) else ():
            if time.monotonic() > deadline:
                raise timed_out("read", timeout_s, self._peer)
            pool.copy(part)
            self._still_open()
        self._still_alive()

    def _still_open(self) -> None:
        if self.closed:
            raise TransportError("this connection is closed", "read", errno.EBADF, self._peer)

    def _still_alive(self) -> None:
        poll = select.poll()
        poll.register(self._line, 0)  # only whether the other end is closed
        if poll.poll(0):
            raise PeerLostError(f"the broker of {self._peer} is gone", "read", errno.ECONNRESET, self._peer)

    def close(self) -> None:
        with self._idle:
            self.closed = True
            self._idle.wait_for(lambda: not self._reads)  # each copies for a moment longer
            self._end()

    def _end(self) -> None:
        if self._client is not None:
            self._client.close()
        self._line.close()
