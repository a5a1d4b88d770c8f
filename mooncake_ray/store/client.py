"""`Store`: put, get, wait, free and create on this node's pool. Synchronous; knows nothing of Ray."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_ray._native import pool
from mooncake_ray.config import Config
from mooncake_ray.errors import ObjectLostError, ObjectNotFoundError, StoreError, StoreFullError
from mooncake_ray.store import devices, node
from mooncake_ray.store.callsite import call_site
from mooncake_ray.store.packing import Here, Packer, Region

__all__ = ["ObjectKey", "Store"]

_HEADER = struct.Struct("<8sQ")  # magic, bytes of pickle; then the pickle, then the segments
_MAGIC = b"MCRAYOB1"
_PAGE = 4096
_loading = threading.local()


@dataclass(frozen=True)
class ObjectKey:
    """Names an object of one pool. Plain data: it may be pickled and sent by any means; it keeps nothing alive."""

    pool: bytes
    id: bytes

    def __repr__(self) -> str:
        return f"ObjectKey({self.pool.hex()[:8]}:{self.id.hex()})"


def _region_being_loaded() -> Region:
    return _loading.region


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, packer: Packer) -> None:
        super().__init__(file, protocol=5)
        self._packer = packer

    def reducer_override(self, obj: Any) -> Any:
        return (_region_being_loaded, ()) if type(obj) is Here else self._packer.reduce(obj)


class Store:
    """This process's view of one node-wide pool. Thread-safe; a forked child connects anew on first use.

    Objects belong to the store that put them: they stay until `free`, or until the process ends, and as long after as a view of them lives
    anywhere on the node. Nothing that is not freed is ever dropped to make room: it goes to the disk, and comes back when it is got. Should
    the broker be killed, what is on disk is there again with the next one, and the rest raises ObjectLostError.
    """

    def __init__(self, scope: str = "default", config: Config | None = None) -> None:
        """Joins the pool `scope` of this user on this node, starting its broker if need be.

        Raises:
            BrokerDiedError: no broker could be reached or started.
            ConfigError: a setting is out of range.
        """
        self.config = config or Config.from_env()
        self._name = node.broker_name(scope)
        self._lock = threading.Lock()
        self._closed = False
        self._client = node.connect(self._name, self.config)

    @property
    def client(self) -> pool.Client:
        if self._closed:
            raise StoreError("this store is closed")
        client = self._client
        if client.usable:
            return client
        with self._lock:
            if not self._client.usable:
                devices.forget(self._client)
                self._client = node.connect(self._name, self.config, before=self._client)
            return self._client

    def put(self, value: Any, timeout_s: float | None = None) -> ObjectKey:
        """Stores a picklable value; tensors and arrays in it are copied once, straight into the pool.

        Args:
            timeout_s: How long to wait for room; default `config.put_timeout_s`.

        Raises:
            StoreFullError: no room before the deadline; nothing was stored.
        """
        client = self.client
        packer = Packer(typed=self.config.typed_batches)
        file = io.BytesIO()
        file.write(_HEADER.pack(_MAGIC, 0))
        _Pickler(file, packer).dump(value)
        blob = file.getbuffer()
        _HEADER.pack_into(blob, 0, _MAGIC, len(blob) - _HEADER.size)
        segments = packer.segments
        if not segments.nbytes and len(blob) <= pool.INLINE_MAX:
            id = client.new_id()
            with contextlib.suppress(StoreFullError):  # the broker's own heap has a budget; the arena may have room
                client.put_inline(id, blob, pool.KIND_SELF, id)
                return ObjectKey(client.pool_id, id)
        start = _start_of_segments(len(blob)) if segments.nbytes else len(blob)
        lease = self.create(start + segments.nbytes, timeout_s)
        memoryview(lease)[: len(blob)] = blob
        segments.fill(client, lease, start)
        return self.publish(lease)

    def get(self, key: ObjectKey, timeout_s: float | None = None, device: str | None = None) -> Any:
        """The value. Tensors are private copy-on-write views of the pool, arrays read-only views; both keep their memory alive. On
        devices tensors are copies.

        Args:
            device: Where all its tensors go: "cpu", "cuda:0", …; None: where `config.cuda_get` says, by default back where they were put from.

        Raises:
            ObjectNotFoundError: freed, or never stored here.
            ObjectLostError: it went with a broker that died, or cannot be read back from the disk.
            GetTimeoutError: still being written after `timeout_s` seconds (None: no limit).
        """
        client = self._client_of(key)
        raw = memoryview(client.get(key.id, timeout_s, True))
        magic, n = _HEADER.unpack_from(raw) if len(raw) >= _HEADER.size else (b"", 0)
        if magic != _MAGIC:
            raise ObjectNotFoundError(f"object {key.id.hex()} was not stored by Store.put; use view()")
        region = _Pinned(client, raw[_start_of_segments(_HEADER.size + n) :])
        outer, _loading.region = getattr(_loading, "region", None), region
        try:
            with devices.loading(device, self.config.cuda_get):
                return pickle.loads(raw[_HEADER.size : _HEADER.size + n])
        finally:
            _loading.region = outer

    def view(self, key: ObjectKey, timeout_s: float | None = None, mutable: bool = False) -> memoryview:
        """The bytes of an object made with `create`: read-only and shared, or (`mutable`) private copy-on-write."""
        return memoryview(self._client_of(key).get(key.id, timeout_s, mutable))

    def create(self, nbytes: int, timeout_s: float | None = None) -> pool.Lease:
        """A writable, unsealed object of `nbytes` bytes. `publish` it, or let it go and the memory returns."""
        client = self.client
        timeout_s = self.config.put_timeout_s if timeout_s is None else timeout_s
        return client.create(client.new_id(), nbytes, timeout_s, f"put at {call_site()}")

    def publish(self, lease: pool.Lease) -> ObjectKey:
        """Seals a lease: from now on others can read it, and nobody can write it."""
        id = lease.id
        lease.seal(pool.KIND_SELF, id)
        return ObjectKey(self.client.pool_id, id)

    def wait(
        self, keys: Sequence[ObjectKey], num_returns: int | None = None, timeout_s: float | None = None
    ) -> tuple[list[ObjectKey], list[ObjectKey]]:
        """Waits until `num_returns` (default: all) of the objects can be read, or the deadline. Returns `(ready, not ready)`, in order."""
        if num_returns is not None and not 0 < num_returns <= len(keys):
            raise ValueError(f"num_returns must be between 1 and {len(keys)}, got {num_returns}")
        if not keys:
            return [], []
        ready = self._client_of(*keys).wait([k.id for k in keys], num_returns or len(keys), timeout_s)
        return [k for k, r in zip(keys, ready, strict=True) if r], [k for k, r in zip(keys, ready, strict=True) if not r]

    def free(self, keys: Sequence[ObjectKey]) -> None:
        """Forgets objects. Views that live keep their memory; nobody can get them any more."""
        client = self._client_of(*keys)
        client.remove([k.id for k in keys])
        for k in keys:
            client.unclaim(pool.KIND_SELF, k.id)

    def grow(self, capacity_bytes: int) -> None:
        """Lets the pool have that many bytes, by further arenas as they are needed. It never shrinks.

        Raises:
            StoreFullError: the machine (or its cgroup) has not got that much.
        """
        self.client.grow(capacity_bytes)

    def stats(self) -> dict[str, Any]:
        """The broker's state: bytes, pages, leases, pins, claims, what is on disk, and a row a session."""
        return json.loads(self.client.stats())

    def close(self) -> None:
        """Leaves the pool; what this store put is freed. Views stay valid, and delay that until they are gone."""
        if self._closed:
            return
        self._closed = True
        devices.forget(self._client)
        if not self._client.usable:  # the next broker may have what is this store's, and wait for it
            with contextlib.suppress(StoreError):
                pool.Client.connect(self._name, node.process_label(), "", self._client).close()
        self._client.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _client_of(self, *keys: ObjectKey) -> pool.Client:
        client = self.client
        for key in keys:
            if key.pool != client.pool_id:
                client.wait([], 0, 0)  # raises where it is this process's broker that died
                raise ObjectLostError(f"{key!r} is of another pool than this process's {client.pool_id.hex()[:8]}; its broker is gone")
        return client


class _Pinned(Region):
    """The segments of an object that is mapped already."""

    __slots__ = ()

    def __init__(self, client: pool.Client, segments: memoryview) -> None:
        self.client, self._private = client, segments


def _start_of_segments(blob_bytes: int) -> int:
    return -(-blob_bytes // _PAGE) * _PAGE
