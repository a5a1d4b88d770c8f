"""Where this node's processes ask its engine: an abstract unix socket, one connection a thread.

A request is one message: operation, seconds, pool, object; or in place of these two, the parts to gather. The answer says that the object is
in the local pool, under which id, and is pinned by the engine until the asker, who has pinned it by then, says so or hangs up.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from mooncake_ray import errors
from mooncake_ray.errors import GetTimeoutError, MooncakeRayError, StoreError

if TYPE_CHECKING:
    import numpy as np  # not at run time: `mooncake-ray status` asks here too, and starts without it

__all__ = ["FAILED", "GATHER", "MOST", "OK", "PREFETCH", "PULL", "REPORT", "REQUEST", "Door", "Part", "door_name", "parse_parts"]

REQUEST = struct.Struct("<Bd16s16s")  # operation, seconds, pool, object
PULL, GATHER, PREFETCH, REPORT = 1, 2, 3, 4
_SIZE = struct.Struct("<Q")  # bytes of what is gathered; then each part
_PART = struct.Struct("<16s16sQ")  # pool, object, runs; then these: uint64 (n, 3)
OK, FAILED = b"\0", b"\1"
_TAKEN = b"\2"
_GRACE_S = 2.0  # beyond the deadline, in which the engine's own answer to it is waited for
MOST = 1 << 30  # bytes of a message


@dataclass(frozen=True)
class Part:
    """Bytes of one object that are wanted."""

    pool_id: bytes
    id: bytes
    runs: np.ndarray
    """uint64 (n, 3): offset in the object, offset where it is gathered, nbytes."""

    @classmethod
    def packed(cls, pool_id: bytes, id: bytes, runs: np.ndarray) -> Part:
        """Runs (uint64 (n, 2): offset, nbytes) that are gathered one after the other, from the beginning."""
        import numpy as np

        placed = np.zeros((len(runs), 3), np.uint64)
        placed[:, 0], placed[:, 2] = runs[:, 0], runs[:, 1]
        np.cumsum(runs[:-1, 1], out=placed[1:, 1])
        return cls(pool_id, id, placed)


def parse_parts(message: bytes) -> tuple[int, list[Part]]:
    """The bytes to gather, and the parts, of a request. Raises ValueError."""
    import numpy as np

    at = REQUEST.size + _SIZE.size
    if len(message) < at:
        raise ValueError(f"a request to gather of {len(message)} bytes")
    (nbytes,) = _SIZE.unpack_from(message, REQUEST.size)
    parts = []
    while at < len(message):
        if len(message) < at + _PART.size:
            raise ValueError("a request to gather ends within a part")
        pool_id, id, n = _PART.unpack_from(message, at)
        at += _PART.size
        runs = np.frombuffer(message, np.uint64, 3 * n, at).reshape(n, 3)  # raises ValueError if they are not there
        parts.append(Part(pool_id, id, runs))
        at += runs.nbytes
    return nbytes, parts


def door_name(broker_name: str) -> str:
    """The abstract socket of the engine that serves the pool of that broker name."""
    return f"\0{broker_name}/engine"


class Door:
    """The asking side. Thread-safe. Connects when first needed, and anew after an error or a fork."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._local = threading.local()

    @contextlib.contextmanager
    def pulled(self, pool_id: bytes, id: bytes, timeout_s: float) -> Iterator[bytes]:
        """While in the block, the object is pinned in this node's pool. Gives its id.

        Raises:
            What `Puller.pull` does; ConnectionError: no engine serves this node.
        """
        with self._asked(REQUEST.pack(PULL, timeout_s, pool_id, id), timeout_s) as key:
            yield key

    @contextlib.contextmanager
    def gathered(self, parts: Sequence[Part], nbytes: int, timeout_s: float) -> Iterator[bytes]:
        """As `pulled`, for parts of objects, of any pools: gives the id of a new object of `nbytes` bytes that holds them. It is gone after the
        block, unless it is pinned or claimed by then."""
        request = [REQUEST.pack(GATHER, timeout_s, b"", b""), _SIZE.pack(nbytes)]
        for part in parts:
            request += _PART.pack(part.pool_id, part.id, len(part.runs)), part.runs.astype("uint64", copy=False).tobytes()
        with self._asked(b"".join(request), timeout_s) as key:
            yield key

    def prefetch(self, pool_id: bytes, id: bytes, timeout_s: float) -> None:
        """Asks for an object, and does not wait for it. Raises ConnectionError: no engine serves this node."""
        conn = self._connected()
        try:
            conn.send_bytes(REQUEST.pack(PREFETCH, timeout_s, pool_id, id))
        except OSError as e:
            self._forget()
            raise ConnectionError(f"the engine of this node is gone: {e!r}") from e

    def report(self, timeout_s: float) -> dict[str, Any]:
        """What the engine says of itself. Raises ConnectionError: no engine serves this node; GetTimeoutError."""
        with self._asked(REQUEST.pack(REPORT, timeout_s, b"", b""), timeout_s) as text:
            return json.loads(text)

    @contextlib.contextmanager
    def _asked(self, request: bytes, timeout_s: float) -> Iterator[bytes]:
        conn = self._connected()
        try:
            conn.send_bytes(request)
            if not conn.poll(timeout_s + _GRACE_S):
                raise GetTimeoutError(f"the engine of this node did not answer within {timeout_s + _GRACE_S:g} s")
            answer = conn.recv_bytes(MOST)
        except BaseException as e:  # what comes next on this connection would be the answer to something else
            self._forget()
            if isinstance(e, EOFError | OSError) and not isinstance(e, GetTimeoutError):
                raise ConnectionError(f"the engine of this node is gone: {e!r}") from e
            raise
        if answer[:1] != OK:
            raise _read_error(answer[1:])
        try:
            yield answer[1:]
        finally:
            try:
                conn.send_bytes(_TAKEN)
            except OSError:
                self._forget()

    def _connected(self) -> Any:
        mine = getattr(self._local, "connection", None)
        if mine is None or self._local.pid != os.getpid():
            self._local.connection, self._local.pid = connection.Client(self._name, "AF_UNIX"), os.getpid()
        return self._local.connection

    def _forget(self) -> None:
        mine, self._local.connection = self._local.connection, None
        mine.close()


def _read_error(data: bytes) -> MooncakeRayError:
    """What the engine raised; a StoreError where it is none of this package's."""
    what = json.loads(data)
    kind, text = what.pop("kind"), what.pop("text")
    found = getattr(errors, kind, None)
    return found(text, **what) if found is not None else StoreError(f"{kind}: {text}")
