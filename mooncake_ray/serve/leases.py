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

__all__ = ["Lease", "Leases"]

_FOLDER = "leases"
_ID = re.compile(r"[0-9a-f]{32}$")
_PIN = "lease-"
_GRACE_S = 2.0  # for clocks of hosts that differ a little


@dataclass(frozen=True)
class Lease:
    """Keeps a version until it is over."""

    id: str
    version: int
    holder: str
    expires: float
    """Seconds of Unix time."""

    @property
    def pin(self) -> str:
        """What it is called among the version's pins."""
        return _PIN + self.id


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
            self._store.pin(version, lease.pin)
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
        found = [e for e in map(self._read, self._ids()) if e is not None and e.expires > now and version in (None, e.version)]
        return sorted(found, key=lambda e: (e.expires, e.id))

    def sweep(self) -> Sequence[Lease]:
        """Ends those that are over, and pins that were left without one. Returns the former."""
        over = []
        for id in self._ids():
            if (lease := self._read(id)) is None:
                self._files.remove(self._folder / id)  # nobody can renew or end one that cannot be read
            elif lease.expires + _GRACE_S <= self._clock():
                self._drop(lease)
                over.append(lease)
        for version in self._store.versions():
            for pin in self._store.pins(version):
                id = pin.removeprefix(_PIN)
                if pin.startswith(_PIN) and _ID.match(id) and not (self._folder / id).exists():
                    self._store.unpin(version, pin)
        return over

    def _drop(self, lease: Lease) -> None:
        self._store.unpin(lease.version, lease.pin)
        self._files.remove(self._folder / lease.id)

    def _write(self, lease: Lease) -> None:
        mine = self._folder / f"{lease.id}-{uuid.uuid4().hex}"  # others may renew it at the same moment
        self._files.put(mine, [json.dumps(asdict(lease)).encode()])
        self._files.rename(mine, self._folder / lease.id)

    def _read(self, id: str) -> Lease | None:
        """None: there is none, or a crash of the machine has left nothing of it that could be read."""
        if not _ID.match(id):
            return None
        try:
            return Lease(**json.loads((self._folder / id).read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _ids(self) -> Sequence[str]:
        try:
            return [name for name in os.listdir(self._folder) if _ID.match(name)]
        except FileNotFoundError:
            return []
