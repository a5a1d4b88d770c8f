"""`BufferSnapshots`: what is kept of a `RolloutBuffer` in a directory, each version whole and immutable.

    version-00000012/
        books.json                               which groups there are, and where their samples are in the other file
        samples.bin                              each parcel once, whole

See `Versions` for what else may be there.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_ray.data import DataProto
from mooncake_ray.errors import CorruptBlockError, SnapshotError
from mooncake_ray.rollout.books import Books
from mooncake_ray.rollout.frozen import freeze, thaw
from mooncake_ray.weights.files import Lock
from mooncake_ray.weights.manifest import sealed, unsealed
from mooncake_ray.weights.versions import OpenVersion, Versions, begun, named, unfinished_name

__all__ = ["BufferSnapshot", "BufferSnapshots", "StoredParcel"]

_BOOKS, _SAMPLES = "books.json", "samples.bin"
_FORMAT = 1


@dataclass(frozen=True)
class StoredParcel:
    """Where a parcel is. Bytes."""

    offset: int
    columns: int
    rest: int
    """After the columns: see `freeze`."""
    as_put: str
    """What class its batch was put as."""


class BufferSnapshots(Versions):
    """Versions in a directory, which may be shared between hosts. `RolloutBuffer.save` and `create` use it; it can also say which there are, and
    pin and remove them."""

    def save(self, version: int, books: Books, parcels: Iterable[tuple[str, str, DataProto]]) -> int:
        """Writes a version, and deletes what is not to be kept. Returns bytes.

        Args:
            parcels: Names, what class each was put as, and its batch. One of them is in memory at a time.

        Raises:
            StaleVersionError: this version, or a newer one, is there already.
            SnapshotError: something cannot be kept.
            OSError: the disk is full, or fails.
        """
        self.refuse_stale(version)
        plain = books.to_json()
        self._files.make_directories(self.directory)
        path = self.directory / unfinished_name(version, uuid.uuid4().hex)
        lock = begun(self._files, path)
        try:
            found, nbytes = self._write(path / _SAMPLES, parcels)
            head = sealed({"format": _FORMAT, "version": version, "nbytes": nbytes, "parcels": found, "books": plain})
            self._files.put(path / _BOOKS, [head])
            self._files.sync_directory(path)
            named(self._files, path, version)
        except Exception:
            self._files.remove_tree(path)
            raise
        finally:
            lock.close()
        self.clean_up()
        return nbytes + len(head)

    def _write(self, path: Path, parcels: Iterable[tuple[str, str, DataProto]]) -> tuple[dict[str, tuple[Any, ...]], int]:
        out, end = {}, 0
        file = self._files.create(path)
        try:
            for name, as_put, batch in parcels:
                columns, rest = freeze(batch)
                for part in (columns, rest):
                    self._files.append(file, memoryview(part))
                out[name] = astuple(StoredParcel(end, len(columns), len(rest), as_put))
                end += len(columns) + len(rest)
            self._files.sync(file)
        finally:
            os.close(file)
        return out, end

    def open(self, version: int | None = None) -> BufferSnapshot:
        """Opens a version, by default the newest. It stays until it is closed, whatever is saved meanwhile.

        Raises:
            SnapshotNotFoundError: it is not there.
            SnapshotError: it is of another format.
            CorruptBlockError, ChecksumError: its books are damaged, or the file of its samples missing or of another length.
        """
        return self.opened(version, BufferSnapshot)


class BufferSnapshot(OpenVersion):
    """One version, immutable. For one thread.

    Attributes:
        books: See `Books`.
        parcels: By name.
    """

    def __init__(self, path: Path, lock: Lock, version: int) -> None:
        """Of a directory that is locked. See `BufferSnapshots.open`."""
        self.path, self.version, self._lock = path, version, lock
        where = path / _BOOKS
        try:
            found = unsealed(where.read_bytes(), str(where))
            there = (path / _SAMPLES).stat().st_size
        except FileNotFoundError as e:
            raise CorruptBlockError(f"{e.filename} is gone") from None
        if (format := found.get("format")) != _FORMAT:
            raise SnapshotError(f"{where} is of format {format}, and this package reads format {_FORMAT}")
        if found["version"] != version:
            raise CorruptBlockError(f"{where} is of version {found['version']}")
        if there != found["nbytes"]:
            raise CorruptBlockError(f"{path / _SAMPLES} has {there} bytes of {found['nbytes']}")
        self.books = Books.from_json(found["books"])
        self.parcels = {name: StoredParcel(*parcel) for name, parcel in found["parcels"].items()}

    def batch(self, name: str) -> DataProto:
        """Reads a parcel. Its columns are not loaded.

        Raises:
            CorruptBlockError: it is damaged.
        """
        parcel = self.parcels[name]
        where = self.path / _SAMPLES
        raw = np.fromfile(where, np.uint8, parcel.columns + parcel.rest, offset=parcel.offset)
        try:
            return thaw(raw[: parcel.columns], raw[parcel.columns :])
        except CorruptBlockError as e:
            raise CorruptBlockError(f"{where}, parcel {name}: {e}") from e
