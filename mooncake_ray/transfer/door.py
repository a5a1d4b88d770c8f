"""Where this node's processes ask its engine: an abstract unix socket, one connection a thread.

A request is one message: operation, seconds, pool, object, and for parts their runs. The answer says that the object is in the local pool,
under which id, and is pinned by the engine until the asker, who has pinned it by then, says so or hangs up.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from typing import Any

import numpy as np

from mooncake_ray import errors
from mooncake_ray._native import pool
from mooncake_ray.errors import GetTimeoutError, MooncakeRayError, StoreError, TransportError
from mooncake_ray.transfer.deadline import Deadline

__all__ = ["Door", "Doorkeeper", "door_name"]

logger = logging.getLogger("mooncake_ray")

_REQUEST = struct.Struct("<Bd16s16s")  # operation, seconds, pool, object; then runs: uint64 (n, 2)
_PULL, _READ, _PREFETCH, _REPORT = 1, 2, 3, 4
_OK, _FAILED = b"\0", b"\1"
_TAKEN = b"\2"
_GRACE_S = 2.0  # beyond the deadline, in which the engine's own answer to it is waited for
_MOST = 1 << 30  # bytes of a message
_AGAIN_S = 0.02
_PREFETCHES = 4  # at a time


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
        with self._asked(_REQUEST.pack(_PULL, timeout_s, pool_id, id), timeout_s) as key:
            yield key

    @contextlib.contextmanager
    def read(self, pool_id: bytes, id: bytes, runs: np.ndarray, timeout_s: float) -> Iterator[bytes]:
        """As `pulled`, for parts: gives the id of an object that holds the runs (uint64 (n, 2): offset, nbytes), one after the other."""
        table = np.ascontiguousarray(runs, np.uint64)
        with self._asked(_REQUEST.pack(_READ, timeout_s, pool_id, id) + table.tobytes(), timeout_s) as key:
            yield key

    def prefetch(self, pool_id: bytes, id: bytes, timeout_s: float) -> None:
        """Asks for an object, and does not wait for it. Raises ConnectionError: no engine serves this node."""
        conn = self._connected()
        try:
            conn.send_bytes(_REQUEST.pack(_PREFETCH, timeout_s, pool_id, id))
        except OSError as e:
            self._forget()
            raise ConnectionError(f"the engine of this node is gone: {e!r}") from e

    def report(self, timeout_s: float) -> dict[str, Any]:
        """What the engine says of itself. Raises ConnectionError: no engine serves this node; GetTimeoutError."""
        with self._asked(_REQUEST.pack(_REPORT, timeout_s, b"", b""), timeout_s) as text:
            return json.loads(text)

    @contextlib.contextmanager
    def _asked(self, request: bytes, timeout_s: float) -> Iterator[bytes]:
        conn = self._connected()
        try:
            conn.send_bytes(request)
            if not conn.poll(timeout_s + _GRACE_S):
                raise GetTimeoutError(f"the engine of this node did not answer within {timeout_s + _GRACE_S:g} s")
            answer = conn.recv_bytes(_MOST)
        except BaseException as e:  # what comes next on this connection would be the answer to something else
            self._forget()
            if isinstance(e, EOFError | OSError) and not isinstance(e, GetTimeoutError):
                raise ConnectionError(f"the engine of this node is gone: {e!r}") from e
            raise
        if answer[:1] != _OK:
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


class Doorkeeper:
    """The answering side: a thread a connection."""

    def __init__(
        self,
        name: str,
        pull: Callable[[bytes, bytes, float], pool.Pin],
        read: Callable[[bytes, bytes, np.ndarray, float], pool.Pin],
        discard: Callable[[bytes], None],
        report: Callable[[], dict[str, Any]],
    ) -> None:
        """`discard`: gets the ids of what was `read`, once the askers have it. `report`: for people, as JSON can hold it.

        Raises OSError (EADDRINUSE) if another engine serves that name."""
        self._pull, self._read, self._discard, self._report = pull, read, discard, report
        self._listener = connection.Listener(name, "AF_UNIX", backlog=128)
        self._lock = threading.Lock()
        self._open: set[Any] = set()
        self._closed = False
        self._prefetches = ThreadPoolExecutor(_PREFETCHES, "mooncake_ray.prefetch")
        self._thread = threading.Thread(target=self._accept, name="mooncake_ray.door", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                conn = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_AGAIN_S)  # no descriptor to be had, perhaps
                continue
            if self._closed or not _is_same_user(conn):
                conn.close()
                continue
            with self._lock:
                self._open.add(conn)
            threading.Thread(target=self._serve, args=(conn,), name="mooncake_ray.door", daemon=True).start()

    def _serve(self, conn: Any) -> None:
        try:
            while True:
                request = conn.recv_bytes(_MOST)
                if len(request) < _REQUEST.size:
                    return
                operation, timeout_s, pool_id, id = _REQUEST.unpack_from(request)
                if operation == _PREFETCH:
                    with contextlib.suppress(RuntimeError):  # this engine ends
                        self._prefetches.submit(self._prefetch, pool_id, id, Deadline(timeout_s))
                    continue
                if operation == _REPORT:
                    conn.send_bytes(_OK + json.dumps(self._report()).encode())
                    conn.recv_bytes(_MOST)
                    continue
                try:
                    if operation == _PULL:
                        pin = self._pull(pool_id, id, timeout_s)
                    else:
                        runs = np.frombuffer(request, np.uint64, offset=_REQUEST.size).reshape(-1, 2)
                        pin = self._read(pool_id, id, runs, timeout_s)
                except (MooncakeRayError, ValueError, OSError) as e:
                    conn.send_bytes(_FAILED + _written_error(e))
                    continue
                conn.send_bytes(_OK + pin.id)
                try:
                    conn.recv_bytes(_MOST)  # the asker has its own pin now, or gave up
                finally:
                    if operation == _READ:
                        self._discard(pin.id)
                    del pin
        except (EOFError, OSError):
            pass  # the asker is gone
        finally:
            with self._lock:
                self._open.discard(conn)
            conn.close()

    def _prefetch(self, pool_id: bytes, id: bytes, deadline: Deadline) -> None:
        try:
            self._pull(pool_id, id, deadline.left(f"prefetch of object {id.hex()}"))
        except (MooncakeRayError, OSError) as e:
            logger.info("mooncake_ray: nothing was prefetched: %s", e)

    def close(self) -> None:
        """Hangs up on everybody."""
        self._closed = True
        self._prefetches.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(OSError):
            connection.Client(self._listener.address, "AF_UNIX").close()  # wakes the thread that accepts
        self._thread.join(5)
        self._listener.close()
        with self._lock:
            for conn in self._open:
                with contextlib.suppress(OSError):
                    socket.socket(fileno=os.dup(conn.fileno())).shutdown(socket.SHUT_RDWR)


def _written_error(e: Exception) -> bytes:
    what = {"kind": type(e).__name__, "text": str(e)}
    if isinstance(e, TransportError):
        what |= {"op": e.op, "errno": e.errno, "peer": e.peer}
    return json.dumps(what).encode()


def _read_error(data: bytes) -> MooncakeRayError:
    """What the engine raised; a StoreError where it is none of this package's."""
    what = json.loads(data)
    kind, text = what.pop("kind"), what.pop("text")
    found = getattr(errors, kind, None)
    return found(text, **what) if found is not None else StoreError(f"{kind}: {text}")


def _is_same_user(conn: Any) -> bool:
    with socket.socket(fileno=os.dup(conn.fileno())) as s:
        _, uid, _ = struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid == os.geteuid()
