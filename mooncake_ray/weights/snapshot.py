"""`SnapshotStore`: versions of a model in a directory, each whole, immutable, and readable in any layout.

    version-00000012/
        manifest.json                            which region of which tensor is where, and content digests
        part-00000-of-00008.safetensors          what one rank has written
    writing-00000013-a1b2c3/                     that is being written, by living processes
    deleting-00000010-d4e5f6/                    that is on its way out

A version is there from the moment its directory gets its name, which is after all of it is on the disk.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from mooncake_ray.errors import ConfigError
from mooncake_ray.weights.draft import Draft
from mooncake_ray.weights.generation import Snapshot, SnapshotSource
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.publication import Publication, publish_plan
from mooncake_ray.weights.shard import Shard
from mooncake_ray.weights.stored import Loaded
from mooncake_ray.weights.versions import NAME, Versions

__all__ = ["Draft", "Loaded", "Snapshot", "SnapshotSource", "SnapshotStore"]


class SnapshotStore(Versions):
    """Versions in a directory, which may be shared between hosts.

        store = SnapshotStore("/shared/run")
        store.save(12, ModuleSource(model))                  # one process that has all of the model
        with store.open() as snapshot:                       # maybe in another one, of another layout
            snapshot.load_into(ModuleSource(other))

    Several ranks write one version together with `begin`. Any number of stores, in any number of processes, may be used on one directory.
    """

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
        if attempt is not None and not NAME.match(attempt):
            raise ConfigError(f"an attempt is named by letters, digits, '.', '_' and '-', not {attempt!r}")
        self.refuse_stale(version)
        self._files.make_directories(self.directory)
        return Draft(self.directory, self._files, publication, version, attempt or uuid.uuid4().hex)

    def commit(self, draft: Draft, extra: Mapping[str, Any] | None = None) -> None:
        """`Draft.commit`, then deletes what is not to be kept. One process does this, once all ranks have saved."""
        self.refuse_stale(draft.version)
        draft.commit(extra)
        self.clean_up()

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

    def open(self, version: int | None = None) -> Snapshot:
        """Opens a version, by default the newest. It stays until it is closed, whatever is committed meanwhile.

        Raises:
            SnapshotNotFoundError: it is not there.
            CorruptBlockError, ChecksumError: its manifest is damaged, or a file of it missing or of another length.
        """
        return self.opened(version, Snapshot)
