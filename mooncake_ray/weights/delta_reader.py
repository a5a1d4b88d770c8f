"""`DeltaReader`: brings a receiver from the version it holds to the newest one of a directory of deltas, at the cost of what changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mooncake_ray.errors import (
    ChecksumError,
    ConfigError,
    DeltaBaseError,
    MooncakeRayError,
    PlanError,
    SnapshotNotFoundError,
    StaleVersionError,
)
from mooncake_ray.weights import patching
from mooncake_ray.weights.boxes import busiest, distinct, meetings
from mooncake_ray.weights.delta_index import Index, Step
from mooncake_ray.weights.delta_log import object_digest
from mooncake_ray.weights.file_source import Directory, LocalDirectory, source_of
from mooncake_ray.weights.generation import FetchedSnapshot
from mooncake_ray.weights.manifest import Manifest, few
from mooncake_ray.weights.memory import refuse_shared
from mooncake_ray.weights.patch import HEAD_BYTES, Patch, Regions, merge
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.shard import Shard, views
from mooncake_ray.weights.snapshot import SnapshotStore
from mooncake_ray.weights.tensor_file import bits

__all__ = ["CaughtUp", "DeltaReader"]

logger = logging.getLogger("mooncake_ray")

How = Literal["auto", "delta", "anchor"]
_TRIES = 3  # a version may be deleted while it is read; newer ones are then there
_NEAR = 64 << 10  # bytes; what is nearer is read together


@dataclass(frozen=True)
class CaughtUp:
    """What `DeltaReader.catch_up` did."""

    version: int
    """What the shard holds now."""
    how: Literal["nothing", "delta", "anchor"]
    steps: int
    """Patches one after the other that were merged into one."""
    nbytes: int
    """That were read of patches and anchor."""
    changed: int
    """Elements of the shard that patches have changed."""


class DeltaReader:
    """One receiver's. Not thread-safe."""

    def __init__(
        self,
        place: str | os.PathLike[str] | Directory,
        shard: Shard,
        *,
        rank: str = "target",
        version: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """
        Args:
            place: A `DeltaLog`'s directory, or its URL.
            shard: What to bring up to date, in any layout. Its fragments must not change.
            version: What it holds; None: nothing that could be the base of a patch.
            timeout_s: For each read over HTTP.
        """
        self._directory, self._shard, self._rank = source_of(place, timeout_s=timeout_s), shard, rank
        self._placement = Placement.of(rank, shard.fragments())
        self._layout: _Layout | None = None
        self.version = version

    def catch_up(self, *, how: How = "auto", verify: Literal["full", "read"] = "full") -> CaughtUp:
        """Brings the shard to the newest version: by one patch, merged from all those that lead there, or from an anchor if fewer bytes do.
        In place, in O(changed) where it is a patch. Either all of it happens or, if anything is wrong, nothing.

        Args:
            how: "delta" never takes an anchor, "anchor" always does: whatever the shard holds is then replaced.
            verify: How an anchor is verified: see `Stored.load_into`.

        Raises:
            DeltaBaseError: no patches lead from what the shard holds to the newest version (they were deleted, say); or what it holds is not
                that version. With "auto", the former means an anchor.
            StaleVersionError: the shard holds a newer version than there is.
            ChecksumError, CorruptBlockError: files are damaged.
            SnapshotNotFoundError: there is no version at all.
            SyncTimeoutError: not read in time.
        """
        if how not in ("auto", "delta", "anchor"):
            raise ConfigError(f"how must be 'auto', 'delta' or 'anchor', got {how!r}")
        for left in reversed(range(_TRIES)):
            index = Index.of(self._directory)
            try:
                return self._catch_up(index, how, verify)
            except SnapshotNotFoundError:
                # What was named a moment ago is gone: then the index names something else by now.
                if not left or Index.of(self._directory) == index:
                    raise
        raise SnapshotNotFoundError(f"versions in {self._directory.where('')} go faster than they can be read")

    def _catch_up(self, index: Index, how: How, verify: Literal["full", "read"]) -> CaughtUp:
        newest = index.newest
        if newest is None:
            raise SnapshotNotFoundError(f"there is no version in {self._directory.where('')}")
        if self.version is not None and self.version > newest and how != "anchor":
            raise StaleVersionError(f"{self._rank} holds version {self.version}; the newest in {self._directory.where('')} is {newest}")
        if self.version == newest and how != "anchor":
            return CaughtUp(newest, "nothing", 0, 0, 0)
        way = None if self.version is None or how == "anchor" else index.way(self.version, newest)
        whole = index.from_anchor(newest)
        if how == "delta" or (way is not None and whole is None):
            if way is None:
                raise DeltaBaseError(self._no_way(index))
            return self._by_patches(way)
        if whole is None:
            raise DeltaBaseError(f"{self._no_way(index)}; and no anchor does")
        anchor, rest = whole
        if way is not None and sum(s.nbytes for s in way) <= anchor.nbytes + sum(s.nbytes for s in rest):
            return self._by_patches(way)
        if way is None and self.version is not None and how == "auto":
            logger.warning("%s: %s: takes the anchor of version %d", self._rank, self._no_way(index), anchor.version)
        return self._by_anchor(anchor.version, rest, verify)

    def _no_way(self, index: Index) -> str:
        return (
            f"no patches in {self._directory.where('')} lead from {'nothing' if self.version is None else f'version {self.version}'} "
            f"to {index.newest}: there are {few([f'{s.base} to {s.version}' for s in index.steps])}"
        )

    def _by_anchor(self, version: int, rest: Sequence[Step], verify: Literal["full", "read"]) -> CaughtUp:
        stored, close = self._open(version)
        try:
            if self._layout is None or self._layout.publication != stored.manifest.publication:
                self._layout = _Layout(stored.manifest, self._placement)
            patches, nbytes = self._read(rest, self._layout)  # before anything is written
            held, self.version = self.version, None
            try:
                loaded = stored.load_into(self._shard, rank=self._rank, verify=verify)
            except MooncakeRayError:
                self.version = held  # nothing was written
                raise
            self.version = version
        finally:
            close()
        changed = self._apply(patches, self._layout) if rest else 0
        self.version = rest[-1].version if rest else version
        return CaughtUp(self.version, "anchor", len(rest), nbytes + loaded.nbytes, changed)

    def _by_patches(self, way: Sequence[Step]) -> CaughtUp:
        layout = self._layout_of(way[0])
        patches, nbytes = self._read(way, layout)
        changed = self._apply(patches, layout)
        self.version = way[-1].version
        return CaughtUp(self.version, "delta", len(way), nbytes, changed)

    def _open(self, version: int):
        if isinstance(self._directory, LocalDirectory):
            snapshot = SnapshotStore(self._directory.path).open(version)
            return snapshot, snapshot.close
        return FetchedSnapshot(self._directory, version), lambda: None

    def _layout_of(self, step: Step) -> _Layout:
        """What a patch's regions are is said by any anchor of the same publication."""
        if self._layout is None or self._layout.publication != step.publication:
            for anchor in reversed(Index.of(self._directory).anchors):
                if anchor.publication == step.publication:
                    stored = FetchedSnapshot(self._directory, anchor.version)
                    self._layout = _Layout(stored.manifest, self._placement)
                    break
            else:
                raise DeltaBaseError(f"no anchor says what the patch from version {step.base} to {step.version} is of")
        return self._layout

    def _read(self, way: Sequence[Step], layout: _Layout) -> tuple[dict[str, Patch], int]:
        """One verified patch for each rank of the writers of which the shard wants anything that changed; and bytes read."""
        out: dict[str, Patch] = {}
        total = 0
        for rank in layout.parts if way else ():
            patches = []
            for step in way:
                if step.publication != layout.publication:
                    raise DeltaBaseError(f"the patch from version {step.base} to {step.version} is of another layout of the writers")
                file = next((f for f in step.files if f.rank == rank), None)
                if file is None:
                    raise DeltaBaseError(f"the patch from version {step.base} to {step.version} has nothing of {rank}")
                patch, nbytes = self._patch(
                    file.file, None if len(way) > 1 or file.nbytes <= _NEAR else layout.wanted(rank), layout.regions[rank]
                )
                total += nbytes
                if (patch.base_version, patch.version, patch.object) != (step.base, step.version, object_digest(step.publication, rank)):
                    raise DeltaBaseError(
                        f"{self._directory.where(file.file)} is from version {patch.base_version} to {patch.version}, or of another rank; "
                        f"it should be from {step.base} to {step.version}"
                    )
                patches.append(patch)
            out[rank] = merge(patches, layout.regions[rank]) if len(patches) > 1 else patches[0]
        return out, total

    def _patch(self, file: str, wanted: tuple[np.ndarray, np.ndarray, np.ndarray] | None, regions: Regions) -> tuple[Patch, int]:
        """A patch, with those of its segments that boxes (region, lo, hi) want; or all of it."""
        where = self._directory.where(file)
        try:
            if wanted is None:
                data = self._directory.read(file)
                return Patch.parse(data), len(data)
            size = Patch.bytes_of_index(self._directory.read(file, 0, HEAD_BYTES))
            patch = Patch.parse(self._directory.read(file, 0, size), whole=False)
        except ChecksumError as e:
            raise ChecksumError(f"{where}: {e}") from e
        needed = np.unique(patch.needed(regions, *wanted)[0])
        begin = patch.segments["offset"][needed].astype(np.int64) + patch.index_bytes
        end = begin + patch.segments["nbytes"][needed].astype(np.int64)
        read = HEAD_BYTES + size
        for run in np.split(np.arange(len(needed)), np.flatnonzero(begin[1:] - end[:-1] > _NEAR) + 1) if len(needed) else ():
            first, last = int(begin[run[0]]), int(end[run[-1]])
            data = memoryview(self._directory.read(file, first, last))
            read += len(data)
            pieces = b"".join(data[int(begin[n]) - first : int(end[n]) - first] for n in run.tolist())
            patch = patch.with_segments(needed[run], pieces)
        return patch, read

    def _apply(self, patches: dict[str, Patch], layout: _Layout) -> int:
        """All of them, or none. Returns how many elements changed."""
        boxes = {rank: layout.boxes(rank, patch) for rank, patch in patches.items()}
        which = np.unique(np.concatenate([np.zeros(0, np.int64), *(fragments for fragments, _ in boxes.values())]))
        tensors = dict(zip(which.tolist(), views(self._placement.take(which), self._shard.buffers()), strict=True))
        held, self.version = self.version, None
        done: list[tuple[Patch, Regions, list[patching.Part]]] = []
        changed = 0
        try:
            for rank, patch in patches.items():
                rows = zip(*(a.tolist() for a in boxes[rank]), strict=True)
                parts = [patching.Part(region, bits(tensors[f]), self._placement.lo[f].tolist()) for f, region in rows]
                job = patch, layout.regions[rank], parts
                changed += sum(c.changed for c in patching.apply(*job))
                done.append(job)
        except MooncakeRayError:
            for job in reversed(done):
                patching.revert(*job)
            self.version = held  # as it was
            raise
        return changed


class _Layout:
    """What writers' ranks write, and what of it a shard wants."""

    def __init__(self, manifest: Manifest, placement: Placement) -> None:
        self.publication, self.placement = manifest.publication, placement
        number = {m.name: i for i, m in enumerate(manifest.metas)}
        wanted = np.unique(placement.tensor).tolist()
        if unknown := [m.name for m in (placement.metas[t] for t in wanted) if m.name not in number or manifest.metas[number[m.name]] != m]:
            raise PlanError(f"the deltas are not of these tensors that the shard wants, or of another dtype or shape: {few(unknown)}")
        rows = [(rank, r) for rank, part in enumerate(manifest.parts) for r in part.regions]
        d = max([placement.lo.shape[1], *(len(r.lo) for _, r in rows)])
        tensor = np.array([r.tensor for _, r in rows], np.int64)
        lo, hi = _padded([r.lo for _, r in rows], d, 0), _padded([r.hi for _, r in rows], d, 1)
        shape = _padded([manifest.metas[r.tensor].shape for _, r in rows], d, 1)
        own = np.array([number.get(m.name, -1) for m in placement.metas], np.int64)[placement.tensor]
        own_lo, own_hi = _widened(placement.lo, d, 0), _widened(placement.hi, d, 1)
        self._lo, self._hi = own_lo, own_hi
        pairs = [np.stack(p) for p in meetings((own, own_lo, own_hi), (tensor, lo, hi), busiest(tensor, lo, len(manifest.metas)))]
        fragment, region = np.concatenate(pairs, axis=1) if pairs else np.zeros((2, 0), np.int64)
        once = np.isin(fragment, _places(placement))
        fragment, region = fragment[once], region[once]
        rank_of = np.array([rank for rank, _ in rows], np.int64)
        first = np.searchsorted(rank_of, np.arange(len(manifest.parts) + 1))
        itemsize = np.array([m.itemsize for m in manifest.metas], np.int32)
        self.regions: dict[str, Regions] = {}
        self._pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for n, part in enumerate(manifest.parts):
            of = slice(int(first[n]), int(first[n + 1]))
            zeros = np.zeros(of.stop - of.start, np.int64)  # where they lie in the writer's memory is no matter here
            self.regions[part.rank] = Regions(lo[of], hi[of], shape[of], itemsize[tensor[of]], zeros)
            mine = rank_of[region] == n
            self._pairs[part.rank] = fragment[mine], region[mine] - of.start
        self.parts = [rank for rank, (fragments, _) in self._pairs.items() if len(fragments)]

    def wanted(self, rank: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Region, lo, hi of the shard's boxes that meet what a rank writes."""
        fragments, regions = self._pairs[rank]
        return regions, self._lo[fragments], self._hi[fragments]

    def boxes(self, rank: str, patch: Patch) -> tuple[np.ndarray, np.ndarray]:
        """(fragment, region) of the shard's boxes in regions that a patch changes."""
        fragments, regions = self._pairs[rank]
        changed = np.flatnonzero(patch.touched[regions])
        return fragments[changed], regions[changed]


def _places(placement: Placement) -> np.ndarray:
    """int64: a fragment for each place in memory. Tied tensors are one: what changed is added once."""
    refuse_shared(placement)
    extent = placement.hi - placement.lo
    strides = np.where(extent > 1, placement.strides, 0)
    return distinct([placement.buffer, placement.offset, *extent.T, *strides.T])[0]


def _padded(rows: Iterable[Sequence[int]], d: int, fill: int) -> np.ndarray:
    rows = [[fill] * (d - len(row)) + list(row) for row in rows]
    return np.array(rows, np.int64).reshape(len(rows), d)


def _widened(places: np.ndarray, d: int, fill: int) -> np.ndarray:
    return np.pad(places, ((0, 0), (d - places.shape[1], 0)), constant_values=fill)
