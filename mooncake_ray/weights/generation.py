"""`Snapshot`: a committed one, as a source of weights for whoever wants them, in whatever layout."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from mooncake_ray.errors import ChecksumError, ConfigError, CorruptBlockError
from mooncake_ray.weights.delivery import deliver_plan
from mooncake_ray.weights.digest import DIGESTS, content_digest
from mooncake_ray.weights.files import Lock
from mooncake_ray.weights.manifest import Manifest, Region, few
from mooncake_ray.weights.meta import ITEMSIZE, ParamMeta
from mooncake_ray.weights.placement import Fragment, Placement
from mooncake_ray.weights.publication import Publication, publish_plan
from mooncake_ray.weights.shard import Shard, views
from mooncake_ray.weights.tensor_file import bits

__all__ = ["Loaded", "Snapshot"]

Verify = Literal["full", "read"]


@dataclass(frozen=True)
class Loaded:
    """What `Snapshot.load_into` did."""

    version: int
    nbytes: int
    """That were copied."""
    digests: Mapping[str, int]
    """For each tensor that was loaded, the content digest of the parts that were. Over ranks which together have the whole tensor once, these
    add up (modulo 2^64) to what `Manifest.digests` says."""
    unverified: tuple[str, ...]
    """Tensors of which parts were loaded that no digest of the snapshot's could tell anything of."""


class Snapshot:
    """One version, immutable. A `Shard`: its fragments are the regions in its files, its buffers those files, mapped.

    It is not deleted as long as this is open (`close`, or a `with` block; garbage collection closes it, too), and may be read by any number of
    processes. Thread-safe, but for `close`. Tensors over it stay valid after `close`; they are private: writing one changes no file.
    """

    def __init__(self, path: Path, lock: Lock, version: int) -> None:
        """Of a directory that is locked. See `SnapshotStore.open`.

        Raises:
            CorruptBlockError, ChecksumError: the manifest is damaged, or a file has not the length that it says.
        """
        self.path, self._lock = path, lock
        where = path / "manifest.json"
        try:
            self.manifest = Manifest.from_bytes(where.read_bytes(), str(where))
        except FileNotFoundError:
            raise CorruptBlockError(f"{where} is gone") from None
        if self.manifest.version != version:
            raise CorruptBlockError(f"{where} is of version {self.manifest.version}")
        self._maps: dict[str, mmap.mmap] = {}
        for part in self.manifest.parts:
            try:
                with open(path / part.file, "rb") as file:
                    nbytes = os.fstat(file.fileno()).st_size
                    if nbytes != part.nbytes:
                        raise CorruptBlockError(f"{path / part.file} has {nbytes} bytes of {part.nbytes}")
                    self._maps[part.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except FileNotFoundError:
                raise CorruptBlockError(f"{path / part.file} is gone") from None

    @property
    def version(self) -> int:
        return self.manifest.version

    @cached_property
    def regions(self) -> Sequence[tuple[str, ParamMeta, Region]]:
        """(file, tensor, region) of all of them, in the order of `fragments`."""
        return [(p.file, self.manifest.metas[r.tensor], r) for p in self.manifest.parts for r in p.regions]

    def fragments(self) -> Sequence[Fragment]:
        return _fragments(self.regions)

    def buffers(self) -> dict[str, torch.Tensor]:
        """For each file and dtype in it: all of that file that is whole elements of that dtype."""
        return self._buffers({(file, meta.dtype) for file, meta, _ in self.regions})

    def _buffers(self, of: Iterable[tuple[str, str]]) -> dict[str, torch.Tensor]:
        return {
            _buffer(file, dtype): torch.frombuffer(
                self._maps[file], dtype=getattr(torch, dtype), count=len(self._maps[file]) // ITEMSIZE[dtype]
            )
            for file, dtype in of
        }

    def tensor(self, number: int) -> torch.Tensor:
        """A region (its number in `regions`) over its file: not copied, not verified."""
        file, meta, region = self.regions[number]
        raw = torch.frombuffer(self._maps[file], dtype=torch.uint8, count=_nbytes(meta, region), offset=region.offset)
        return raw.view(getattr(torch, meta.dtype)).view(region.extent)

    def load_into(self, shard: Shard, *, rank: str = "target", verify: Verify = "full", ignore: Iterable[str] | None = None) -> Loaded:
        """Copies into a shard, of any layout, what it wants. Every element that it wants is written exactly once, or an error tells before
        anything is.

        Digests of a tensor's parts tell only together whether they are right. A snapshot has digests of blocks (about 4 MiB of a region).

        Args:
            verify: "full" reads every block that anything is wanted of, all of it, and compares its digest. "read" reads what is
                wanted and nothing else, and compares only tensors that are wanted whole; `Loaded` says what is left to be compared, by adding up
                the ranks'. Either does so before anything is written.
            ignore: Names of tensors that the shard need not want. By default all: one rank wants what it wants.

        Raises:
            PlanError: the snapshot has not got what the shard wants, or it has another dtype or shape there.
            ChecksumError: what is in the files is not what was written. Names the first few tensors, and a file. The shard is as it was.
        """
        if verify not in ("full", "read"):
            raise ConfigError(f"verify must be 'full' or 'read', got {verify!r}")
        target = Placement.of(rank, shard.fragments())
        publication = self._publication
        wanted = {target.metas[t].name for t in np.unique(target.tensor).tolist()}
        unwanted = {m.name for m in self.manifest.metas} - wanted
        delivery = deliver_plan(publication, target, ignore=unwanted if ignore is None else unwanted & set(ignore))
        into = list(views(target, shard.buffers()))
        box_of = _by_box(delivery.box_of, len(delivery.tensor))

        ops = zip(delivery.op_region.tolist(), delivery.op_box.tolist(), delivery.op_lo.tolist(), delivery.op_hi.tolist(), strict=True)
        copies = []
        for number, box, lo, hi in ops:
            region = int(publication.fragment[number])
            copies.append((region, box, lo, hi, _cut(self.tensor(region), self.regions[region][2].lo, lo, hi)))
        digests, unverified = self._verified(copies, verify)
        nbytes = 0
        for _, box, lo, hi, source in copies:
            for number in box_of[box]:
                place = _cut(into[number], target.lo[number].tolist(), lo, hi)
                bits(place).copy_(bits(source)[(None,) * (place.dim() - source.dim())])
                nbytes += source.nbytes
        return Loaded(self.version, nbytes, digests, unverified)

    def verify(self) -> None:
        """Reads all of it. Raises ChecksumError if anything is not what was written."""
        self._raise(sorted({n for n in range(len(self.regions)) if self._wrong(n, None)}))

    def close(self) -> None:
        """It may be deleted from now on."""
        self._lock.close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @cached_property
    def _publication(self) -> Publication:
        """A plan whose source this is; `fragment` is the number of the region."""
        return publish_plan(Placement.of("snapshot", self.fragments()))

    def _verified(self, copies: list[tuple], verify: Verify) -> tuple[dict[str, int], tuple[str, ...]]:
        """Digests of the parts that are copied, by tensor, if they are right."""
        digests: dict[str, int] = {}
        sizes: dict[str, int] = {}
        bad: set[int] = set()
        for region, _, lo, _, source in copies:
            _, meta, _ = self.regions[region]
            digests[meta.name] = (digests.get(meta.name, 0) + content_digest(source, lo[len(lo) - source.dim() :], meta.shape)) % DIGESTS
            sizes[meta.name] = sizes.get(meta.name, 0) + source.nbytes
        whole = {m.name for m in self.manifest.metas if sizes.get(m.name) == m.nbytes}
        known = self.manifest.digests()
        for name in whole:
            if digests[name] != known[name]:
                # None is wrong where boxes that overlap have the size of the whole by chance.
                bad |= {n for n, (_, meta, _) in enumerate(self.regions) if meta.name == name and self._wrong(n, None)}
        left = [c for c in copies if self.regions[c[0]][1].name not in whole]
        if verify == "full":
            for region, _, lo, hi, _ in left:
                if region not in bad and self._wrong(region, (lo, hi)):
                    bad.add(region)
        self._raise(sorted(bad))
        unverified = () if verify == "full" else tuple(dict.fromkeys(self.regions[c[0]][1].name for c in left))
        return digests, unverified

    def _wrong(self, number: int, box: tuple[list[int], list[int]] | None) -> bool:
        """Whether the blocks of a region that a box of its tensor meets (by default all) are not what was written."""
        _, meta, region = self.regions[number]
        tensor = self.tensor(number)
        dim, length, rows = region.blocks(meta.itemsize)
        first, last = 0, length
        if box is not None and region.lo:
            d = len(region.lo)
            first, last = (edge[len(edge) - d + dim] - region.lo[dim] for edge in box)
        for block in range(first // rows, -(-last // rows)):
            begin, end = block * rows, min(length, (block + 1) * rows)
            lo = list(region.lo)
            if lo:
                lo[dim] += begin
            if content_digest(tensor.narrow(dim, begin, end - begin) if lo else tensor, lo, meta.shape) != region.digests[block]:
                return True
        return False

    def _raise(self, bad: Sequence[int]) -> None:
        if bad:
            names = dict.fromkeys(self.regions[n][1].name for n in bad)
            raise ChecksumError(
                f"version {self.version}: {self.path / self.regions[bad[0]][0]} does not hold what was written, in tensors {few(names)}"
            )


class SnapshotSource:
    """A snapshot as a trainer in a group of engines: a `Shard` of one or several ranks, each of which gives some of the files."""

    def __init__(self, directory: str | Path, version: int | None = None, *, rank: int = 0, world: int = 1) -> None:
        """
        Args:
            directory: Of a `SnapshotStore`.
            version: By default the newest.

        Raises:
            SnapshotNotFoundError: it is not there.
        """
        from mooncake_ray.weights.snapshot import SnapshotStore

        if not 0 <= rank < world:
            raise ConfigError(f"rank {rank} of {world}")
        self.snapshot = SnapshotStore(directory).open(version)
        files = {part.file for part in self.snapshot.manifest.parts[rank::world]}
        self._regions = [r for r in self.snapshot.regions if r[0] in files]

    @property
    def version(self) -> int:
        return self.snapshot.version

    def fragments(self) -> Sequence[Fragment]:
        return _fragments(self._regions)

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.snapshot._buffers({(file, meta.dtype) for file, meta, _ in self._regions})


def _fragments(regions: Sequence[tuple[str, ParamMeta, Region]]) -> Sequence[Fragment]:
    out = []
    for file, meta, region in regions:
        strides, step = [], meta.itemsize
        for n in reversed(region.extent):
            strides.append(step)
            step *= n
        out.append(Fragment(meta, region.lo, region.hi, _buffer(file, meta.dtype), region.offset, tuple(reversed(strides))))
    return out


def _buffer(file: str, dtype: str) -> str:
    return f"{file}:{dtype}"


def _nbytes(meta: ParamMeta, region: Region) -> int:
    return int(np.prod(region.extent, dtype=np.int64)) * meta.itemsize


def _by_box(box_of: np.ndarray, boxes: int) -> Sequence[list[int]]:
    out: list[list[int]] = [[] for _ in range(boxes)]
    for number, box in enumerate(box_of.tolist()):
        out[box].append(number)
    return out


def _cut(tensor: torch.Tensor, origin: Sequence[int], lo: Sequence[int], hi: Sequence[int]) -> torch.Tensor:
    """[lo, hi) of a tensor that begins at `origin`. Coordinates may have leading dimensions that it has not."""
    d = tensor.dim()
    for dim, (first, a, b) in enumerate(zip(origin[len(origin) - d :], lo[len(lo) - d :], hi[len(hi) - d :], strict=True)):
        tensor = tensor.narrow(dim, a - first, b - a)
    return tensor
