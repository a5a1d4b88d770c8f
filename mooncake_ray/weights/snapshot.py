"""`SnapshotStore`: versions of a model in a directory, each whole, immutable, and readable in any layout.

    version-00000012/
        manifest.json                            which region of which tensor is where, and content digests
        part-00000-of-00008.safetensors          what one rank has written
    writing-00000013-a1b2c3/                     that is being written, by living processes
    deleting-00000010-d4e5f6/                    that is on its way out

A version is there from the moment its directory gets its name, which is after all of it is on the disk.
"""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mooncake_ray.errors import ConfigError, SnapshotError, SnapshotNotFoundError, StaleVersionError
from mooncake_ray.weights.draft import Draft, version_name
from mooncake_ray.weights.files import Files, Lock
from mooncake_ray.weights.generation import Snapshot, SnapshotSource
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.publication import Publication, publish_plan
from mooncake_ray.weights.shard import Shard
from mooncake_ray.weights.stored import Loaded

__all__ = ["Draft", "Loaded", "Snapshot", "SnapshotSource", "SnapshotStore"]

logger = logging.getLogger("mooncake_ray")

_VERSION = re.compile(r"version-(\d{8,})$")
_LEFTOVER = re.compile(r"(?:writing|deleting)-\d{8,}-")
_NAME = re.compile(r"[\w.-]+$")
_PIN = "pinned-"
_OPEN_S = 5.0  # how long who opens one waits for who is about to delete it


class SnapshotStore:
    """Versions in a directory, which may be shared between hosts.

        store = SnapshotStore("/shared/run")
        store.save(12, ModuleSource(model))                  # one process that has all of the model
        with store.open() as snapshot:                       # maybe in another one, of another layout
            snapshot.load_into(ModuleSource(other))

    Several ranks write one version together with `begin`. Any number of stores, in any number of processes, may be used on one directory.
    """

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

    # ---- writing

    def begin(self, version: int, publication: Publication, *, attempt: str | None = None) -> Draft:
        """Begins to write a version, or joins those who do.

        Args:
            publication: Which rank writes what (`publish_plan` of the placements of all ranks). The same on all of them.
            attempt: A name for this try, the same on all ranks, and never used before: so parts of different tries cannot be mixed. By default
                a random one; then one process begins and sends the draft to the others.

        Raises:
            StaleVersionError: this version, or a newer one, is there already.
        """
        if version < 0:
            raise ConfigError(f"versions are not negative, got {version}")
        if attempt is not None and not _NAME.match(attempt):
            raise ConfigError(f"an attempt is named by letters, digits, '.', '_' and '-', not {attempt!r}")
        self.refuse_stale(version)
        self._files.make_directories(self.directory)
        return Draft(self.directory, self._files, publication, version, attempt or uuid.uuid4().hex)

    def commit(self, draft: Draft, extra: Mapping[str, Any] | None = None) -> None:
        """`Draft.commit`, then deletes what is not to be kept. One process does this, once all ranks have saved."""
        self.refuse_stale(draft.version)
        draft.commit(extra)
        try:
            self.clean()
        except OSError as e:  # the version is there all the same
            logger.warning("old versions in %s cannot be deleted: %s", self.directory, e)

    def save(self, version: int, shards: Shard | Mapping[str, Shard], *, extra: Mapping[str, Any] | None = None) -> None:
        """Writes a version from one process that has all of the model: one shard, or one for each rank by name.

        Raises: as `begin`, `Draft.save` and `Draft.commit`.
        """
        by_rank = shards if isinstance(shards, Mapping) else {"rank": shards}
        source = Placement.join([Placement.of(rank, shard.fragments()) for rank, shard in by_rank.items()])
        draft = self.begin(version, publish_plan(source))
        try:
            for rank, shard in by_rank.items():
                draft.save(shard, rank=rank)
            self.commit(draft, extra)
        except Exception:
            draft.abandon()
            raise

    # ---- reading

    def versions(self) -> Sequence[int]:
        """All that are there, rising."""
        return sorted(int(found[1]) for name in self._names() if (found := _VERSION.match(name)))

    def latest(self) -> int | None:
        """The newest version; None if there is none."""
        return max(self.versions(), default=None)

    def open(self, version: int | None = None) -> Snapshot:
        """Opens a version, by default the newest. It stays until it is closed, whatever is committed meanwhile.

        Raises:
            SnapshotNotFoundError: it is not there.
            CorruptBlockError, ChecksumError: its manifest is damaged, or a file of it missing or of another length.
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
                try:
                    return Snapshot(path, lock, wanted)
                except BaseException:
                    lock.close()
                    raise
            if time.monotonic() > end:
                raise SnapshotError(f"{path} has been locked for {_OPEN_S:g} s by a process that deletes it, and has not")
            time.sleep(0.005)

    # ---- what stays

    def pin(self, version: int, name: str) -> None:
        """Keeps a version until `unpin`, beyond the end of this process. Raises SnapshotNotFoundError."""
        if not _NAME.match(name):
            raise ConfigError(f"a pin is named by letters, digits, '.', '_' and '-', not {name!r}")
        with self.open(version) as snapshot:
            os.close(self._files.create(snapshot.path / f"{_PIN}{name}"))
            self._files.sync_directory(snapshot.path)

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

    def _names(self) -> Sequence[str]:
        try:
            return os.listdir(self.directory)
        except FileNotFoundError:
            return []

    def refuse_stale(self, version: int) -> None:
        """Raises StaleVersionError: this version, or a newer one, is there already."""
        if (newest := self.latest()) is not None and version <= newest:
            raise StaleVersionError(f"there is version {newest} in {self.directory} already, and it is asked to write {version}")
