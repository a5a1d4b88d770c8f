"""`Shelf`: the versions that a replica has open. One that is open is deleted by nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mooncake_ray.errors import SnapshotNotFoundError
from mooncake_ray.serve.contents import Volume
from mooncake_ray.weights.snapshot import SnapshotStore

__all__ = ["Shelf"]


@dataclass
class _Slot:
    volume: Volume
    readers: int = 0
    last: float = field(default_factory=time.monotonic)


class Shelf:
    """Opens each when it is first asked for, and closes it when nobody has read it for a while. Thread-safe."""

    def __init__(self, store: SnapshotStore, files: Path | None, linger_s: float) -> None:
        self._store, self._files, self._linger_s = store, files, linger_s
        self._slots: dict[int, _Slot] = {}
        self._lock = threading.Lock()

    @contextmanager
    def take(self, version: int) -> Iterator[Volume]:
        """The version stays as it is within the `with` block, and for a while after.

        Raises:
            SnapshotNotFoundError: it is not there.
            CorruptBlockError, ChecksumError: it is damaged.
        """
        with self._lock:
            slot = self._slots.get(version)
            if slot is None or not slot.volume.snapshot.in_place():  # where locks are not seen, or nobody has looked for any
                volume = Volume(self._store.open(version), self._files)
                slot = self._slots[version] = _Slot(volume)
            slot.readers += 1
        try:
            yield slot.volume
        finally:
            with self._lock:
                slot.readers -= 1
                slot.last = time.monotonic()

    def latest(self) -> int:
        """Raises SnapshotNotFoundError: there is none yet."""
        if (found := self._store.latest()) is None:
            raise SnapshotNotFoundError(f"there is no version in {self._store.directory} yet")
        return found

    def readers(self) -> dict[int, int]:
        """So many read each version now."""
        with self._lock:
            return {version: slot.readers for version, slot in sorted(self._slots.items())}

    def sweep(self, *, all_of_them: bool = False) -> None:
        """Closes those that nobody reads, and nobody has lately."""
        now = time.monotonic()
        with self._lock:
            for version, slot in list(self._slots.items()):
                if not slot.readers and (all_of_them or now - slot.last >= self._linger_s):
                    del self._slots[version]
                    slot.volume.snapshot.close()
