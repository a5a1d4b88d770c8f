"""`Blob`: plain bytes in a node's pool that the process which made them keeps, and others read, whole or in part, from any node.

For those who count references themselves: a blob is told to others as plain data, and keeps nothing alive. It stays until its maker drops it, or
ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_ray._native import pool
from mooncake_ray.errors import BrokerDiedError, ConfigError, ObjectLostError, ObjectNotFoundError
from mooncake_ray.objects import session
from mooncake_ray.objects.asking import ask_engine
from mooncake_ray.objects.elsewhere import Elsewhere
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.transfer.door import Part

__all__ = ["Blob", "Reserved", "drop", "gather", "is_here", "view", "write"]

_SEAL_S = 60.0  # between that a maker has sealed a blob, and that the broker knows; it is mostly none


@dataclass(frozen=True)
class Blob:
    """Names bytes in a pool."""

    pool_id: bytes
    id: bytes
    nbytes: int

    def whole(self) -> Part:
        return self.part(np.array([[0, 0, self.nbytes]], np.uint64))

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


class Reserved:
    """Room for a blob that can be told already: whoever reads it waits until it is written. If this object ends before, there is no blob.
    For one thread."""

    def __init__(self, nbytes: int, *, timeout_s: float, note: str = "") -> None:
        """Raises StoreFullError: no room within `timeout_s` seconds."""
        client = _here().client
        self.blob = Blob(client.pool_id, client.new_id(), nbytes)
        self._lease: pool.Lease | None = client.create(self.blob.id, max(nbytes, 1), timeout_s, note)

    def write(self, fill: Callable[[np.ndarray], None]) -> Blob:
        """`fill` gets the bytes, uint8 (nbytes), and must not keep them. If it raises, there is no blob. Once."""
        lease, self._lease = self._lease, None  # which ends with this call, or with the error that `fill` raised
        if lease is None:
            raise ValueError(f"blob {self.blob.id.hex()} is written already, or could not be")
        fill(np.frombuffer(lease, np.uint8, self.blob.nbytes))
        lease.seal(pool.KIND_SELF, _claim(self.blob.id))
        return self.blob


def write(nbytes: int, fill: Callable[[np.ndarray], None], *, timeout_s: float, note: str = "") -> Blob:
    """Makes a blob whose bytes `fill` writes, as `Reserved.write` has it.

    Raises:
        StoreFullError: no room within `timeout_s` seconds.
    """
    return Reserved(nbytes, timeout_s=timeout_s, note=note).write(fill)


def gather(parts: Sequence[Part], nbytes: int, *, timeout_s: float) -> Blob:
    """Makes a blob on this node of parts of others, wherever they are; see `Puller.gather`.

    Raises:
        ObjectNotFoundError, ObjectLostError: one of the others is gone.
        GetTimeoutError: not done within `timeout_s` seconds.
        StoreFullError: no room for it.
        TransportError: a run reaches beyond its blob, or the transport that was asked for cannot be used.
    """
    here = _here()

    def take(id: bytes) -> Blob:
        here.client.claim([id], pool.KIND_SELF, _claim(id))
        return Blob(here.client.pool_id, id, nbytes)

    what = f"{nbytes} bytes of {len(parts)} objects"
    return ask_engine(here, what, lambda door, left: door.gathered(parts, nbytes, left), take, Deadline(timeout_s))


def is_here(blob: Blob) -> bool:
    """Whether it is in this node's pool."""
    return blob.pool_id == _here().client.pool_id


def view(blob: Blob, *, writable: bool = False) -> np.ndarray:
    """Its bytes, read-only unless `writable`, and then private: what is written stays in this view. uint8 (nbytes), valid as long as it
    lives. Of a blob of another node: once they are all here, once for all processes of this one.

    Raises:
        ObjectNotFoundError, ObjectLostError: it was dropped, or its maker died.
        GetTimeoutError: it did not come within `Config.pull_timeout_s`.
    """
    here = _here()
    if is_here(blob):
        return np.frombuffer(here.client.get(blob.id, _SEAL_S, writable), np.uint8, blob.nbytes)
    there = Elsewhere(here, blob.pool_id, blob.id)
    return np.frombuffer(there.private() if writable else there.shared(), np.uint8, blob.nbytes)


def drop(blobs: Iterable[Blob]) -> None:
    """Ends blobs of this process: nobody can read them any more, but for views that are there. Those of a broker that died are gone already."""
    here = session.current()
    for blob in blobs:
        if here is not None and blob.pool_id == here.client.pool_id:
            with contextlib.suppress(BrokerDiedError, ObjectNotFoundError, ObjectLostError):
                here.client.unclaim(pool.KIND_SELF, _claim(blob.id))
