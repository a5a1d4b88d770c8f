"""`Versions`: a directory of versions of something, each a directory that is there whole or not at all.

    version-00000012/
    writing-00000013-a1b2c3/                     that is being written, by living processes
    deleting-00000010-d4e5f6/                    that is on its way out

A version is there from the moment its directory gets its name, which is after all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

from mooncake_ray.errors import ConfigError, SnapshotError, SnapshotNotFoundError, StaleVersionError
from mooncake_ray.weights.files import Files, Lock

__all__ = ["NAME", "OpenVersion", "Versions", "begun", "named", "unfinished_name", "version_name"]

logger = logging.getLogger("mooncake_ray")

T = TypeVar("T")

NAME = re.compile(r"[\w.-]+$")
_VERSION = re.compile(r"version-(\d{8,})$")
_LEFTOVER = re.compile(r"(?:writing|deleting)-\d{8,}-")
_PIN = "pinned-"
_OPEN_S = 5.0  # how long who opens one waits for who is about to delete it
_TRIES = 100


def version_name(version: int) -> str:
    return f"version-{version:08d}"


def unfinished_name(version: int, attempt: str) -> str:
    return f"writing-{version:08d}-{attempt}"


def begun(files: Files, path: Path) -> Lock:
    """Makes the directory of a version that is being written, unless it is there, and uses it from now on. Raises SnapshotError."""
    for _ in range(_TRIES):  # who cleans up may hold it for a moment, or take it away before it is ours
        with contextlib.suppress(FileExistsError):
            files.make_directory(path)
        if (lock := Lock.take(path)) is not None:
            return lock
        time.sleep(0.01)
    raise SnapshotError(f"{path} cannot be locked")


def named(files: Files, path: Path, version: int) -> None:
    """Gives a directory whose content is on the disk, and its names, the name of its version. Raises StaleVersionError: it is there already."""
    final = path.parent / version_name(version)
    try:
        files.rename(path, final)
    except OSError as e:
        if final.exists():
            raise StaleVersionError(f"there is a snapshot of version {version} already in {path.parent}") from e
        raise
    files.sync_directory(path.parent)


class OpenVersion:
    """One version, which is not deleted as long as this is open (`close`, or a `with` block; garbage collection closes it, too)."""

    path: Path
    _lock: Lock

    def close(self) -> None:
        """It may be deleted from now on."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Versions:
    """See the module. Any number of these, in any number of processes and on any hosts that share it, may be used on one directory."""

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2, fsync: bool = True, files: Files | None = None) -> None:
        """
        Args:
            directory: Made with the first version, if it is not there.
            keep: So many of the newest versions stay. Older ones go when a version is committed, unless they are pinned or open.
            fsync: Versions outlive a crash of the machine, too. Without, only that of processes; and saving is faster.
            files: How the disk is written.
        """
        if keep < 1:
            raise ConfigError(f"keep must be at least 1, got {keep}")
        self.directory, self.keep = Path(directory), keep
        self._files = files or Files(fsync)

    def versions(self) -> Sequence[int]:
        """All that are there, rising."""
        return sorted(int(found[1]) for name in self._names() if (found := _VERSION.match(name)))

    def latest(self) -> int | None:
        """The newest version; None if there is none."""
        return max(self.versions(), default=None)

    def locked(self, version: int | None) -> tuple[Path, Lock, int]:
        """The directory of a version, by default the newest; it is not deleted while the lock is held.

        Raises:
            SnapshotNotFoundError: it is not there.
        """
        end = time.monotonic() + _OPEN_S
        while True:
            wanted = self.latest() if version is None else version
            path = self.directory / version_name(-1 if wanted is None else wanted)
            if wanted is None or (version is not None and not path.is_dir()):
                there = ", ".join(map(str, self.versions())) or "none"
                which = "" if version is None else f" of version {version}"
                raise SnapshotNotFoundError(f"no snapshot{which} in {self.directory}: there is {there}")
            if (lock := Lock.take(path)) is not None:
                return path, lock, wanted
            if time.monotonic() > end:
                raise SnapshotError(f"{path} has been locked for {_OPEN_S:g} s by a process that deletes it, and has not")
            time.sleep(0.005)

    def opened(self, version: int | None, kind: Callable[[Path, Lock, int], T]) -> T:
        """What `kind` makes of a directory as `locked` gives it; if it raises, the directory is let go. Raises as both."""
        path, lock, found = self.locked(version)
        try:
            return kind(path, lock, found)
        except BaseException:
            lock.close()
            raise

    def pin(self, version: int, name: str) -> None:
        """Keeps a version until `unpin`, beyond the end of this process. Raises SnapshotNotFoundError."""
        if not NAME.match(name):
            raise ConfigError(f"a pin is named by letters, digits, '.', '_' and '-', not {name!r}")
        path, lock, _ = self.locked(version)
        try:
            os.close(self._files.create(path / f"{_PIN}{name}"))
            self._files.sync_directory(path)
        finally:
            lock.close()

    def unpin(self, version: int, name: str) -> None:
        """Undoes `pin`; nothing if there is no such pin. The version goes with the next `clean`, or commit."""
        self._files.remove(self.directory / version_name(version) / f"{_PIN}{name}")

    def pins(self, version: int) -> Sequence[str]:
        """Names of the pins that keep a version."""
        path = self.directory / version_name(version)
        return sorted(name.removeprefix(_PIN) for name in (os.listdir(path) if path.is_dir() else []) if name.startswith(_PIN))

    def remove(self, version: int) -> bool:
        """Deletes a version unless it is pinned or open; says whether it did."""
        path = self.directory / version_name(version)
        if self.pins(version) or (lock := Lock.take(path, alone=True)) is None:
            return False
        try:
            if self.pins(version):  # since then
                return False
            gone = self.directory / f"deleting-{version:08d}-{uuid.uuid4().hex}"
            self._files.rename(path, gone)
            self._files.remove_tree(gone)
            return True
        finally:
            lock.close()

    def clean(self) -> Sequence[int]:
        """Deletes versions beyond the newest `keep` that are neither pinned nor open, and what dead writers have left. Returns the versions."""
        for name in self._names():
            if _LEFTOVER.match(name) and (lock := Lock.take(self.directory / name, alone=True)) is not None:
                try:
                    self._files.remove_tree(self.directory / name)
                finally:
                    lock.close()
        return [version for version in self.versions()[: -self.keep] if self.remove(version)]

    def clean_up(self) -> None:
        """As `clean`, after a version was written, which is there whether or not others can be deleted."""
        try:
            self.clean()
        except OSError as e:
            logger.warning("old versions in %s cannot be deleted: %s", self.directory, e)

    def _names(self) -> Sequence[str]:
        try:
            return os.listdir(self.directory)
        except FileNotFoundError:
            return []

    def refuse_stale(self, version: int) -> None:
        """Raises StaleVersionError: this version, or a newer one, is there already. ConfigError: it is negative."""
        if version < 0:
            raise ConfigError(f"versions are not negative, got {version}")
        if (newest := self.latest()) is not None and version <= newest:
            raise StaleVersionError(f"there is version {newest} in {self.directory} already, and it is asked to write {version}")
