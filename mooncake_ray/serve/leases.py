"""`Leases`: pins with an end. Each is a file beside the versions, so that they outlive replicas and all of these see the same."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from mooncake_ray.errors import SnapshotNotFoundError
from mooncake_ray.weights.files import Files
from mooncake_ray.weights.snapshot import SnapshotStore

__all__ = ["PIN", "Lease", "Leases"]

_FOLDER = "leases"
_ID = re.compile(r"[0-9a-f]{32}$")
PIN = "lease-"
_TRIES = 5
_GRACE_S = 2.0  # for clocks of hosts that differ a little


@dataclass(frozen=True)
class Lease:
    """Keeps a version until it is over."""

    id: str
    version: int
    holder: str
    expires: float
    """Seconds of Unix time."""


class Leases:
    """Of a store's versions. Thread-safe; may be used by several processes at once."""

    def __init__(self, store: SnapshotStore, *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock, self._files = store, clock, Files(fsync=False)
        self._folder = store.directory / _FOLDER

    def take(self, version: int, ttl_s: float, holder: str = "") -> Lease:
        """Raises SnapshotNotFoundError: there is no such version (any more)."""
        lease = Lease(uuid.uuid4().hex, version, holder, self._clock() + ttl_s)
        self._files.make_directories(self._folder)
        self._write(lease)  # first: a pin that no lease ends would last for ever
        try:
            self._store.pin(version, PIN + lease.id)
        except BaseException:
            self._files.remove(self._folder / lease.id)
            raise
        return lease

    def renew(self, id: str, ttl_s: float) -> Lease:
        """Raises SnapshotNotFoundError: it is over, or was none."""
        lease = replace(self.get(id), expires=self._clock() + ttl_s)
        self._write(lease)
        return lease

    def get(self, id: str) -> Lease:
        """Raises SnapshotNotFoundError: it is over, or was none."""
        lease = self._read(id)
        if lease is None or lease.expires <= self._clock():
            raise SnapshotNotFoundError(f"there is no pin {id!r}, or it is over")
        return lease

    def end(self, id: str) -> Lease:
        """Raises SnapshotNotFoundError: it is over, or was none."""
        lease = self.get(id)
        self._drop(lease)
        return lease

    def of(self, version: int | None = None) -> Sequence[Lease]:
        """Those that keep a version (by default any) now, by their ends."""
        now = self._clock()
        found = [e for e in self._all() if e.expires > now and version in (None, e.version)]
        return sorted(found, key=lambda e: (e.expires, e.id))

    def sweep(self) -> Sequence[Lease]:
        """Ends those that are over, and pins that were left without one. Returns the former."""
        over = [e for e in self._all() if e.expires + _GRACE_S <= self._clock()]
        for lease in over:
            self._drop(lease)
        for version in self._store.versions():
            for pin in self._store.pins(version):
                id = pin.removeprefix(PIN)
                if pin.startswith(PIN) and _ID.match(id) and not (self._folder / id).exists():
                    self._store.unpin(version, pin)
        return over

    def _drop(self, lease: Lease) -> None:
        self._store.unpin(lease.version, PIN + lease.id)
        self._files.remove(self._folder / lease.id)

    def _write(self, lease: Lease) -> None:
        for left in reversed(range(_TRIES)):
            try:
                self._files.put(self._folder / lease.id, [json.dumps(asdict(lease)).encode()])
                return
            except FileNotFoundError:  # somebody else has just renewed it, and taken what was to become the file
                if not left:
                    raise

    def _read(self, id: str) -> Lease | None:
        if not _ID.match(id):
            return None
        try:
            return Lease(**json.loads((self._folder / id).read_bytes()))
        except FileNotFoundError:
            return None

    def _all(self) -> list[Lease]:
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        return [lease for name in names if (lease := self._read(name)) is not None]
