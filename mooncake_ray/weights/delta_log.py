"""`DeltaLog`: versions of a model in a directory, most of them as patches of what changed, some of them whole.

    deltas.json                                               what there is; replaced last
    version-00000025/                                         an anchor: a whole version, as a snapshot
    deltas/00000025-00000026-a1b2c3-00000-of-00008.patch      what changed from one to another, in what one rank writes

The same files are read over HTTP from any server that gives files. See `DeltaReader`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mooncake_ray.errors import ConfigError, DeltaBaseError, SnapshotError, StaleVersionError
from mooncake_ray.weights.delta_index import INDEX, Anchor, Index, PatchFile, Step
from mooncake_ray.weights.draft import Draft, owned
from mooncake_ray.weights.file_source import LocalDirectory
from mooncake_ray.weights.files import Files, Lock
from mooncake_ray.weights.laid import Sources
from mooncake_ray.weights.manifest import few
from mooncake_ray.weights.patch import Regions, encode
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.publication import ALIGNMENT, Publication, publish_plan
from mooncake_ray.weights.shard import Shard
from mooncake_ray.weights.snapshot import SnapshotStore

__all__ = ["DELTAS", "DeltaLog", "DeltaRank", "Update", "object_digest"]

DELTAS = "deltas"
_PIN = "deltas"
_COMMIT_S = 60.0
_NAME = re.compile(r"[\w.-]+$")


def object_digest(publication: str, rank: str) -> bytes:
    """32 bytes: by which a patch says what it is of."""
    return hashlib.sha256(f"{publication} {rank}".encode()).digest()


@dataclass(frozen=True, eq=False)
class Update:
    """A version that is being written. May be pickled, and sent to the ranks that write it."""

    version: int
    base: int | None
    """What patches are against; None: there are none."""
    draft: Draft | None
    """Of the anchor; None: it is not one."""
    publication: Publication
    attempt: str


class DeltaRank:
    """One rank's part of a log's versions: keeps what it last wrote, and what receivers have acknowledged, to tell what has changed since.

    That is up to twice the bytes that the rank owns. Not thread-safe.
    """

    def __init__(
        self, directory: str | os.PathLike[str], shard: Shard, rank: str, *, fsync: bool = True, files: Files | None = None
    ) -> None:
        self.directory, self.rank = Path(directory), rank
        self._shard, self._files = shard, files or Files(fsync)
        self._placed: Placement | None = None
        self._plan: tuple[str, Regions, int] | None = None
        self._states: dict[int, np.ndarray] = {}

    def use(self, shard: Shard) -> None:
        """From now on this is the shard, maybe with other buffers."""
        if shard is not self._shard:
            self._shard, self._placed = shard, None

    def write(self, update: Update) -> PatchFile | None:
        """Writes what changed since the update's base (None if there is none), and the rank's part of the anchor if it is one.

        The buffers must not change meanwhile.

        Raises:
            DeltaBaseError: this rank does not have the base's weights any more (it was restarted, say): a version without base is needed.
            PlanError: the shard is not the one that the update's publication is of.
            OSError: the disk is full, or fails.
        """
        publication = update.publication
        if self._placed is None or self._plan is None or self._plan[0] != publication.digest:
            mine, self._placed = owned(publication, Placement.of(self.rank, self._shard.fragments()), self.rank)
            if self._plan is None or self._plan[0] != publication.digest:
                self._plan, self._states = (publication.digest, *_regions(publication, mine)), {}
        _, regions, nbytes = self._plan
        if update.base is not None and update.base not in self._states:
            has = ", ".join(map(str, self._states)) or "none"
            raise DeltaBaseError(f"{self.rank} should write what changed since version {update.base}, and has {has}")
        # What is not the base is not asked for any more: its memory is used again.
        spare = [self._states.pop(v) for v in list(self._states) if v != update.base]
        now = spare[0] if spare else np.empty(nbytes, np.uint8)
        Sources(self._placed, self._shard.buffers()).pack(np.arange(len(regions)), now, regions.offset)
        written = None
        if update.base is not None:
            patch = encode(
                self._states[update.base], now, regions, base_version=update.base, version=update.version,
                object=object_digest(publication.digest, self.rank),
            )  # fmt: skip
            number = publication.ranks.index(self.rank)
            name = f"{update.base:08d}-{update.version:08d}-{update.attempt}-{number:05d}-of-{len(publication.ranks):05d}.patch"
            self._files.put(self.directory / DELTAS / name, [patch.data.data])
            self._files.sync_directory(self.directory / DELTAS)
            written = PatchFile(self.rank, f"{DELTAS}/{name}", patch.nbytes, patch.changed)
        if update.draft is not None:
            update.draft.save(self._shard, rank=self.rank)
        self._states[update.version] = now
        return written


class DeltaLog:
    """Writes versions into a directory. One process at a time does (and its ranks).

        log = DeltaLog("/shared/run/deltas")
        log.append(1, ModuleSource(model))          # the first one is an anchor
        log.append(2, ModuleSource(model))
        log.acknowledge(2)                          # all receivers have it: the next patch is against it

    A patch is against what receivers have acknowledged, not against what was written last: who could not apply one version is not lost for
    the next. Not thread-safe.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, anchor_every: int = 25, keep: int = 2, fsync: bool = True, files: Files | None = None
    ) -> None:
        """
        Args:
            directory: Made with the first version, if it is not there.
            anchor_every: So many versions after an anchor, at the latest, the next one follows. 1: all are.
            keep: So many anchors stay, with the patches since the oldest of them.
            fsync: Versions outlive a crash of the machine, too.
        """
        if anchor_every < 1 or keep < 1:
            raise ConfigError(f"anchor_every and keep must be at least 1, got {anchor_every} and {keep}")
        self.directory, self.anchor_every, self.keep = Path(directory), anchor_every, keep
        self._files = files or Files(fsync)
        self._source = LocalDirectory(self.directory)
        self._anchors = SnapshotStore(self.directory, keep=1, files=self._files)
        self._baseline: tuple[int, str] | None = None  # version, publication: what the ranks still have and receivers acknowledged
        self._last: tuple[int, str] | None = None
        self._since = 0  # versions since the last anchor
        self._ranks: dict[str, DeltaRank] = {}

    @property
    def baseline(self) -> int | None:
        """What the next patch is against; None: the next version is an anchor."""
        return self._baseline[0] if self._baseline else None

    def index(self) -> Index:
        """What is there."""
        return Index.of(self._source)

    def acknowledge(self, version: int) -> bool:
        """Receivers hold this version: patches are against it from now on. Only the version that was written last can become that, and
        not once the next one has begun; for another one nothing changes. Returns whether the baseline is this version."""
        if self._last is not None and self._last[0] == version:
            self._baseline = self._last
        return self.baseline == version

    def reset(self) -> None:
        """There is no baseline any more: the next version is an anchor. After a rank was restarted, say."""
        self._baseline = None

    def begin(self, version: int, publication: Publication, *, anchor: bool = False, attempt: str | None = None) -> Update:
        """Begins to write a version. Each rank then calls `DeltaRank.write`, and one `commit`.

        Args:
            publication: Which rank writes what: `publish_plan` of the placements of all ranks. If it is another one than before, the version is
                an anchor without patches.
            anchor: Have it whole in any case: after a receiver found that its weights are not what they should be, say.
            attempt: A name for this try that was never used before.

        Raises:
            StaleVersionError: this version, or a newer one, is there already.
        """
        if attempt is not None and not _NAME.match(attempt):
            raise ConfigError(f"an attempt is named by letters, digits, '.', '_' and '-', not {attempt!r}")
        index = self.index()
        if index.newest is not None and version <= index.newest:
            raise StaleVersionError(f"there is version {index.newest} in {self.directory} already, and it is asked to write {version}")
        self._files.make_directories(self.directory / DELTAS)
        self._last = None  # as ranks will not have it any more
        base = self._baseline[0] if self._baseline is not None and self._baseline[1] == publication.digest else None
        attempt = attempt or uuid.uuid4().hex[:12]
        draft = None
        if anchor or base is None or self._since + 1 >= self.anchor_every:
            listed = {a.version for a in index.anchors}
            for stray in [v for v in self._anchors.versions() if v not in listed]:  # whose writer died before it was listed
                self._anchors.unpin(stray, _PIN)
                self._anchors.remove(stray)
            draft = self._anchors.begin(version, publication, attempt=attempt)
        return Update(version, base, draft, publication, attempt)

    def commit(self, update: Update, written: Sequence[PatchFile | None]) -> Step | None:
        """Makes a version the newest, once all ranks have written. What is not to be kept any more is deleted.

        Args:
            written: What each rank's `write` returned.

        Raises:
            SnapshotError: a rank's part is missing. Nothing has changed.
            StaleVersionError: another writer has written this version, or a newer one.
        """
        lock = self._alone()
        try:
            return self._commit(update, written)
        finally:
            lock.close()

    def _alone(self) -> Lock:
        """While nobody else replaces the index."""
        end = time.monotonic() + _COMMIT_S
        while (lock := Lock.take(self.directory, alone=True)) is None:
            if time.monotonic() > end:
                raise SnapshotError(
                    f"{self.directory} has been locked for {_COMMIT_S:g} s by a process that commits a version, and has not"
                )
            time.sleep(0.01)
        return lock

    def _commit(self, update: Update, written: Sequence[PatchFile | None]) -> Step | None:
        index, publication = self.index(), update.publication
        if index.newest is not None and update.version <= index.newest:
            raise StaleVersionError(
                f"there is version {index.newest} in {self.directory} already, and it is asked to write {update.version}"
            )
        step = None
        anchors, steps = list(index.anchors), list(index.steps)
        if update.base is not None:
            files = {f.rank: f for f in written if f is not None}
            owners = {publication.ranks[r] for r in np.unique(publication.owner).tolist()}
            if missing := sorted(owners - set(files)):
                raise SnapshotError(f"version {update.version} lacks the patches of ranks {few(missing)}")
            for file in files.values():
                path = self.directory / file.file
                there = path.stat().st_size if path.exists() else 0
                if there != file.nbytes:
                    raise SnapshotError(f"{path} has {there} bytes of {file.nbytes}")
            step = Step(update.base, update.version, publication.digest, tuple(files[r] for r in sorted(files)))
            steps.append(step)
        if update.draft is not None:
            manifest = update.draft.commit()
            self._anchors.pin(update.version, _PIN)
            anchors.append(Anchor(update.version, publication.digest, manifest.nbytes))
        index = Index(tuple(anchors), tuple(steps)).pruned(self.keep, self.baseline)
        self._files.put(self.directory / INDEX, [index.to_bytes()])
        self._files.sync_directory(self.directory)
        self._last = update.version, publication.digest
        if update.draft is not None:
            self._since = 0
        else:
            self._since += 1
        if update.base is None:  # there is nothing else that receivers could have it from, and patches can be against it
            self._baseline = self._last
        self._delete_others(index)
        return step

    def append(self, version: int, shards: Shard | Mapping[str, Shard], *, anchor: bool = False) -> Step | None:
        """Writes a version from one process that has all of the model: one shard, or one for each rank by name. They are kept for the next.

        Returns what was written as patches. Raises: as `begin`, `DeltaRank.write` and `commit`.
        """
        by_rank = shards if isinstance(shards, Mapping) else {"rank": shards}
        source = Placement.join([Placement.of(rank, shard.fragments()) for rank, shard in by_rank.items()])
        update = self.begin(version, publish_plan(source), anchor=anchor)
        try:
            written = []
            for rank, shard in by_rank.items():
                writer = self._ranks.get(rank)
                if writer is None:
                    writer = self._ranks[rank] = DeltaRank(self.directory, shard, rank, files=self._files)
                writer.use(shard)
                written.append(writer.write(update))
            return self.commit(update, written)
        except Exception as e:
            if update.draft is not None:
                update.draft.abandon()
            if isinstance(e, DeltaBaseError):
                self.reset()
            raise

    def _delete_others(self, index: Index) -> None:
        """What the index does not name. Whoever is reading it is told that it is gone, and begins again."""
        anchors = {a.version for a in index.anchors}
        for version in self._anchors.versions():
            if version not in anchors:
                self._anchors.unpin(version, _PIN)
        self._anchors.clean()
        files = {Path(f.file).name for s in index.steps for f in s.files}
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.directory / DELTAS):
                if name not in files:
                    self._files.remove(self.directory / DELTAS / name)


def _regions(publication: Publication, mine: np.ndarray) -> tuple[Regions, int]:
    """A rank's regions as an object in memory, each at a multiple of 64 bytes; and its size."""
    lo, hi, tensor = publication.lo[mine], publication.hi[mine], publication.tensor[mine]
    shape = np.ones_like(lo)
    for row, t in zip(shape, tensor.tolist(), strict=True):
        whole = publication.metas[t].shape
        row[len(row) - len(whole) :] = whole
    sizes = -(-publication.nbytes[mine] // ALIGNMENT) * ALIGNMENT
    offset = np.cumsum(sizes) - sizes
    return Regions(lo, hi, shape, publication.itemsize[tensor].astype(np.int32), offset), int(sizes.sum())
