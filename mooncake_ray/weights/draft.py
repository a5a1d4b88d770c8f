"""`Draft`: a snapshot that is being written, by several ranks at once, and that nobody sees before it is whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mooncake_ray.errors import PlanError, SnapshotError
from mooncake_ray.weights.boxes import meetings
from mooncake_ray.weights.digest import content_digest
from mooncake_ray.weights.files import Files
from mooncake_ray.weights.manifest import BLOCK_BYTES, Manifest, Part, Region, few, sealed, unsealed
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.publication import Publication
from mooncake_ray.weights.shard import Shard, views
from mooncake_ray.weights.tensor_file import Entry, bits, blocks, write
from mooncake_ray.weights.versions import begun, named, unfinished_name, version_name

__all__ = ["Draft", "key", "owned"]

MANIFEST = "manifest.json"


def key(meta_name: str, shape: tuple[int, ...], lo: tuple[int, ...], hi: tuple[int, ...]) -> str:
    """What a region is called in its file: as its tensor where it is all of it, else with its bounds."""
    if all(a == 0 and b == n for a, b, n in zip(lo, hi, shape, strict=True)):
        return meta_name
    return f"{meta_name}[{','.join(f'{a}:{b}' for a, b in zip(lo, hi, strict=True))}]"


def owned(publication: Publication, placement: Placement, rank: str) -> tuple[np.ndarray, Placement]:
    """The regions that a rank owns (int64), in the order in which they are in its file, and where each lies in its buffers, as a placement in
    that order. In a file elements lie aligned, those of a dtype are together, and otherwise the order is that of the publication.

    Raises:
        PlanError: it has not got all of one; or it is no rank of the publication.
    """
    if rank not in publication.ranks:
        raise PlanError(f"{rank} is not a rank of this publication, which has {few(publication.ranks)}")
    mine = np.flatnonzero(publication.owner == publication.ranks.index(rank))
    kinds = sorted({(-m.itemsize, m.dtype) for m in publication.metas})
    kind = np.array([kinds.index((-m.itemsize, m.dtype)) for m in publication.metas], np.int64)
    mine = mine[np.argsort(kind[publication.tensor[mine]], kind="stable")]
    d = max(publication.lo.shape[1], placement.lo.shape[1])

    def widened(a: np.ndarray, fill: int) -> np.ndarray:
        return np.pad(a, ((0, 0), (d - a.shape[1], 0)), constant_values=fill)

    number = {m: i for i, m in enumerate(publication.metas)}
    tensor = np.array([number.get(m, -1) for m in placement.metas], np.int64)[placement.tensor]
    known = np.flatnonzero(tensor >= 0)
    lo, hi = widened(publication.lo[mine], 0), widened(publication.hi[mine], 1)
    own_lo, own_hi = widened(placement.lo, 0), widened(placement.hi, 1)
    regions = (publication.tensor[mine].astype(np.int64), lo, hi)
    holder = np.full(len(mine), -1, np.int64)
    for i, j in meetings(regions, (tensor[known], own_lo[known], own_hi[known]), publication.busiest):
        j = known[j]
        inside = np.all((own_lo[j] <= lo[i]) & (hi[i] <= own_hi[j]), axis=1)
        holder[i[inside]] = j[inside]
    if len(lacking := np.flatnonzero(holder < 0)):
        names = [publication.metas[t].name for t in np.unique(publication.tensor[mine[lacking]]).tolist()]
        raise PlanError(f"{rank} should write what it has not got, of tensors {few(names)}")
    strides = widened(placement.strides, 0)[holder]
    offset = placement.offset[holder] + ((lo - own_lo[holder]) * strides).sum(axis=1)
    return mine, Placement(
        placement.metas, placement.ranks, placement.buffers, placement.tensor[holder], placement.rank[holder], lo, hi,
        placement.buffer[holder], offset, strides,
    )  # fmt: skip


class Draft:
    """A snapshot on its way to the disk. Made by `SnapshotStore.begin`; may be pickled, and sent to the ranks that write it.

    Each rank calls `save`, then one calls `commit`. It is given up by `abandon`, or by whatever comes next once no process that has it is
    alive. Not thread-safe, but ranks may be threads that have a draft each.
    """

    def __init__(self, directory: Path, files: Files, publication: Publication, version: int, attempt: str) -> None:
        self.directory, self.version, self.attempt, self.publication = directory, version, attempt, publication
        self._files, self._lock = files, None
        self._open()

    def __reduce__(self) -> Any:
        return Draft, (self.directory, self._files, self.publication, self.version, self.attempt)

    @property
    def path(self) -> Path:
        """Where it is until it is committed."""
        return self.directory / unfinished_name(self.version, self.attempt)

    def _open(self) -> None:
        self._lock = begun(self._files, self.path)

    def save(self, shard: Shard, *, rank: str) -> int:
        """Writes the regions that a rank owns, once each, straight from its buffers. Returns bytes.

        The buffers must not change meanwhile. May be called again, for the same rank, and replaces what was written.

        Raises:
            PlanError: the shard is not the one that the publication is of.
            OSError: the disk is full, or fails.
        """
        if self._lock is None:
            raise SnapshotError(f"version {self.version} is committed, or was given up")
        publication = self.publication
        mine, placement = owned(publication, Placement.of(rank, shard.fragments()), rank)
        tensors = list(views(placement, shard.buffers()))
        number = publication.ranks.index(rank)
        name = f"part-{number:05d}-of-{len(publication.ranks):05d}"
        boxes, entries = [], []
        for i in range(len(mine)):
            meta = publication.metas[publication.tensor[mine[i]]]
            d = len(meta.shape)
            lo, hi = (tuple(a[len(a) - d :].tolist()) for a in (placement.lo[i], placement.hi[i]))
            boxes.append((int(publication.tensor[mine[i]]), lo, hi))
            entries.append(Entry(key(meta.name, meta.shape, lo, hi), meta.dtype, tuple(b - a for a, b in zip(lo, hi, strict=True))))
        digests: list[list[int]] = [[] for _ in boxes]

        def content(n: int) -> Iterator[torch.Tensor]:
            t, lo, _ = boxes[n]
            for begin, block in _blocks(bits(tensors[n])[(0,) * (tensors[n].dim() - len(lo))]):
                block = block.cpu().contiguous()
                at = tuple(a + b for a, b in zip(lo, begin, strict=True))
                digests[n].append(content_digest(block, at, publication.metas[t].shape))
                yield block

        self._files.remove(self.path / f"{name}.json")  # of an earlier save: it says what is not there any more
        metadata = {"format": "pt", "version": str(self.version), "rank": rank}
        places, nbytes = write(self._files, self.path / f"{name}.safetensors", entries, metadata, content)
        regions = (Region(t, lo, hi, at, tuple(d)) for (t, lo, hi), at, d in zip(boxes, places, digests, strict=True))
        part = Part(f"{name}.safetensors", rank, nbytes, tuple(regions))
        self._files.put(self.path / f"{name}.json", [sealed({"publication": publication.digest, "part": part.to_json()})])
        self._files.sync_directory(self.path)
        return nbytes

    def commit(self, extra: Mapping[str, Any] | None = None) -> Manifest:
        """Makes it the newest snapshot, once all ranks have saved. From then on it does not change.

        Args:
            extra: To be kept in the manifest. JSON.

        Raises:
            SnapshotError: a rank's part is missing, or of another publication. Save it, and commit again.
            StaleVersionError: a snapshot of this version is there already.
        """
        if self._lock is None:
            raise SnapshotError(f"version {self.version} is committed, or was given up")
        publication = self.publication
        parts, missing = [], []
        owners = set(np.unique(publication.owner).tolist())
        for number, rank in enumerate(publication.ranks):
            name = f"part-{number:05d}-of-{len(publication.ranks):05d}"
            path = self.path / f"{name}.json"
            if not path.exists():
                if number in owners:
                    missing.append(rank)
                continue
            found = unsealed(path.read_bytes(), str(path))
            part = Part.from_json(found["part"])
            there = (self.path / part.file).stat().st_size
            if found["publication"] != publication.digest or part.rank != rank or there != part.nbytes:
                raise SnapshotError(
                    f"{path} is of {part.rank} and publication {found['publication'][:16]}, a file of {there} of {part.nbytes} bytes"
                )
            parts.append(part)
        if missing:
            raise SnapshotError(f"version {self.version} lacks the parts of ranks {few(missing)}")
        manifest = Manifest(self.version, publication.digest, publication.metas, tuple(parts), dict(extra or {}))
        self._files.put(self.path / MANIFEST, [manifest.to_bytes()])
        self._files.sync_directory(self.path)
        named(self._files, self.path, self.version)
        for part in parts:
            self._files.remove((self.directory / version_name(self.version) / part.file).with_suffix(".json"))
        self.close()
        return manifest

    def abandon(self) -> None:
        """Gives it up."""
        if self._lock is not None:
            self.close()
            self._files.remove_tree(self.path)

    def close(self) -> None:
        """This process is done with it. If no other has it either, and it is not committed, it is given up."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _blocks(tensor: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(where it begins, the block), in order."""
    dim, length, rows = blocks(tensor.shape, tensor.element_size(), BLOCK_BYTES)
    for begin in range(0, length, rows):
        if tensor.dim() == 0:
            yield (), tensor
            return
        lo = [0] * tensor.dim()
        lo[dim] = begin
        yield tuple(lo), tensor.narrow(dim, begin, min(rows, length - begin))
