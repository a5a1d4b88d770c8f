"""`Blob`: plain bytes in a node's pool that the process which made them keeps, and others read, whole or in part, from any node.

For those who count references themselves: a blob is told to others as plain data, and keeps nothing alive. It stays until its maker drops it, or
ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_ray._native import pool
from mooncake_ray.errors import BrokerDiedError, ConfigError, GetTimeoutError, ObjectLostError, ObjectNotFoundError
from mooncake_ray.objects import nodes, session
from mooncake_ray.objects.elsewhere import Elsewhere
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.transfer.door import Part

__all__ = ["Blob", "drop", "gather", "view", "write"]

_AGAIN_S = 0.05
_ENSURE_EVERY_S = 5.0


@dataclass(frozen=True)
class Blob:
    """Names bytes in a pool."""

    pool_id: bytes
    id: bytes
    nbytes: int

    def part(self, runs: np.ndarray) -> Part:
        """Some of its bytes: runs as `Part` has them."""
        return Part(self.pool_id, self.id, runs)


def _here() -> session.Session:
    here = session.current()
    if here is None:
        raise ConfigError("no pool: ray.init() has not been called, or the broker could not be started")
    return here


def _claim(id: bytes) -> bytes:
    """Under which a blob is kept: not the claim that the engine which gathered it has for a moment."""
    return id + b"blob"


def write(nbytes: int, fill: Callable[[np.ndarray], None], *, timeout_s: float, note: str = "") -> Blob:
    """Makes a blob whose bytes `fill` writes in their place: it gets uint8 (nbytes), and must not keep it. If it raises, there is no blob.

    Raises:
        StoreFullError: no room within `timeout_s` seconds.
    """
    client = _here().client
    id = client.new_id()
    lease = client.create(id, max(nbytes, 1), timeout_s, note)
    fill(np.frombuffer(lease, np.uint8, nbytes))
    lease.seal(pool.KIND_SELF, _claim(id))
    return Blob(client.pool_id, id, nbytes)


def gather(parts: Sequence[Part], nbytes: int, *, timeout_s: float) -> Blob:
    """Makes a blob on this node of parts of others, wherever they are; see `Puller.gather`.

    Raises:
        ObjectNotFoundError, ObjectLostError: one of the others is gone.
        GetTimeoutError: not done within `timeout_s` seconds.
        StoreFullError: no room for it.
        TransportError: a run reaches beyond its blob, or the transport that was asked for cannot be used.
    """
    here, deadline = _here(), Deadline(timeout_s)
    ensured, last = float("-inf"), ""
    while True:
        try:
            left = deadline.left(f"{nbytes} bytes of {len(parts)} objects")
        except GetTimeoutError as e:
            raise GetTimeoutError(f"{e}: {last or nodes.why_none()}") from None
        try:
            with here.door.gathered(parts, nbytes, left) as id:
                here.client.claim([id], pool.KIND_SELF, _claim(id))
            return Blob(here.client.pool_id, id, nbytes)
        except ConnectionError as e:
            if isinstance(e, BrokerDiedError):
                raise
            last = f"this node's engine cannot be asked: {e}"
        if time.monotonic() - ensured > _ENSURE_EVERY_S:
            nodes.ensure(here.key[1], here.config)
            ensured = time.monotonic()
        time.sleep(_AGAIN_S)


def view(blob: Blob) -> np.ndarray:
    """Its bytes, read-only: uint8 (nbytes), valid as long as it lives. Of a blob of another node: once they are all here.

    Raises:
        ObjectNotFoundError, ObjectLostError: it was dropped, or its maker died.
        GetTimeoutError: it did not come within `Config.pull_timeout_s`.
    """
    here = _here()
    if blob.pool_id == here.client.pool_id:
        return np.frombuffer(here.client.get(blob.id, 0.0), np.uint8, blob.nbytes)
    return np.frombuffer(Elsewhere(here, blob.pool_id, blob.id).shared(), np.uint8, blob.nbytes)


def drop(blobs: Iterable[Blob]) -> None:
    """Ends blobs of this process: nobody can read them any more, but for views that are there. Those of a broker that died are gone already."""
    here = session.current()
    for blob in blobs:
        if here is not None and blob.pool_id == here.client.pool_id:
            with contextlib.suppress(BrokerDiedError, ObjectNotFoundError, ObjectLostError):
                here.client.unclaim(pool.KIND_SELF, _claim(blob.id))
