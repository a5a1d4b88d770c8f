"""The engine's side of the door: a thread for each connection of this node's processes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from typing import Any

from mooncake_ray._native import pool
from mooncake_ray.errors import MooncakeRayError, TransportError
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.transfer.door import FAILED, GATHER, MOST, OK, PREFETCH, PULL, REPORT, REQUEST, Part, parse_parts

__all__ = ["Doorkeeper"]

logger = logging.getLogger("mooncake_ray")

_AGAIN_S = 0.02
_PREFETCHES = 4  # at a time


class Doorkeeper:
    """Answers until it is closed."""

    def __init__(
        self,
        name: str,
        pull: Callable[[bytes, bytes, float], pool.Pin],
        gather: Callable[[Sequence[Part], int, float], pool.Pin],
        discard: Callable[[bytes], None],
        report: Callable[[], dict[str, Any]],
    ) -> None:
        """`discard`: gets the ids of what was gathered, once the askers have it. `report`: for people, as JSON can hold it.

        Raises OSError (EADDRINUSE) if another engine serves that name."""
        self._pull, self._gather, self._discard, self._report = pull, gather, discard, report
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
                request = conn.recv_bytes(MOST)
                if len(request) < REQUEST.size:
                    return
                operation, timeout_s, pool_id, id = REQUEST.unpack_from(request)
                if operation == PREFETCH:
                    with contextlib.suppress(RuntimeError):  # this engine ends
                        self._prefetches.submit(self._prefetch, pool_id, id, Deadline(timeout_s))
                    continue
                if operation == REPORT:
                    conn.send_bytes(OK + json.dumps(self._report()).encode())
                    conn.recv_bytes(MOST)
                    continue
                try:
                    if operation == PULL:
                        pin = self._pull(pool_id, id, timeout_s)
                    else:
                        nbytes, parts = parse_parts(request)
                        pin = self._gather(parts, nbytes, timeout_s)
                except (MooncakeRayError, ValueError, OSError) as e:
                    conn.send_bytes(FAILED + _written_error(e))
                    continue
                conn.send_bytes(OK + pin.id)
                try:
                    conn.recv_bytes(MOST)  # the asker has its own pin now, or gave up
                finally:
                    if operation == GATHER:
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


def _is_same_user(conn: Any) -> bool:
    with socket.socket(fileno=os.dup(conn.fileno())) as s:
        _, uid, _ = struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid == os.geteuid()
