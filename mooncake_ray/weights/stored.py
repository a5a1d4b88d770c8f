"""`Stored`: the regions of a version of a model, wherever their bytes are, and how they get into other layouts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from mooncake_ray.errors import ChecksumError, ConfigError, SnapshotError
from mooncake_ray.weights.delivery import deliver_plan
from mooncake_ray.weights.digest import DIGESTS, content_digest
from mooncake_ray.weights.manifest import Manifest, Region, few
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.placement import Fragment, Placement
from mooncake_ray.weights.publication import Publication, publish_plan
from mooncake_ray.weights.shard import Shard, views
from mooncake_ray.weights.tensor_file import bits

__all__ = ["Loaded", "Stored", "buffer_name", "fragments", "stretch"]

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


class Stored(ABC):
    """One version, immutable. Thread-safe, but for `load_into` of shards that share memory."""

    def __init__(self, manifest: Manifest, place: str) -> None:
        """`place`: what its files' names follow in messages."""
        self.manifest, self.place = manifest, place

    @abstractmethod
    def rows(self, number: int, first: int, last: int) -> torch.Tensor:
        """Rows of a region (its number in `regions`), along the dimension of its blocks. Not verified, not to be written."""

    @property
    def version(self) -> int:
        return self.manifest.version

    @cached_property
    def regions(self) -> Sequence[tuple[str, ParamMeta, Region]]:
        """(file, tensor, region) of all of them, in the order of `fragments`."""
        return [(p.file, self.manifest.metas[r.tensor], r) for p in self.manifest.parts for r in p.regions]

    def fragments(self) -> Sequence[Fragment]:
        """Where the regions are in buffers that have one file's elements of one dtype."""
        return fragments(self.regions)

    @cached_property
    def _numbers(self) -> Mapping[str, list[int]]:
        """Of the regions of each tensor."""
        out: dict[str, list[int]] = {m.name: [] for m in self.manifest.metas}
        for number, (_, meta, _) in enumerate(self.regions):
            out[meta.name].append(number)
        return out

    def parts_of(self, meta: ParamMeta) -> Sequence[int]:
        """Numbers of the regions that a tensor is in. Raises SnapshotError: they have not got all of it."""
        numbers = self._numbers[meta.name]
        if (held := sum(math.prod(self.regions[n][2].extent) for n in numbers)) != math.prod(meta.shape):
            raise SnapshotError(f"{meta.name}: version {self.version} holds {held} of {math.prod(meta.shape)} elements")
        return numbers

    def whole(self, meta: ParamMeta) -> torch.Tensor:
        """A tensor: where it lies, if that is in one region; else a copy. Not to be written.

        Raises:
            SnapshotError: the regions have not got all of it.
            ChecksumError: it is not what was written.
        """
        numbers = self.parts_of(meta)
        if len(numbers) == 1:
            out = self.tensor(numbers[0])
        else:
            out = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype))
            for number in numbers:
                region = self.regions[number][2]
                bits(out)[tuple(slice(a, b) for a, b in zip(region.lo, region.hi, strict=True))] = bits(self.tensor(number))
        if content_digest(out, (0,) * len(meta.shape), meta.shape) != self._digests[meta.name]:
            raise ChecksumError(f"{meta.name}: version {self.version} does not hold what was written")
        return out

    @cached_property
    def _digests(self) -> Mapping[str, int]:
        return self.manifest.digests()

    def tensor(self, number: int) -> torch.Tensor:
        """A region (its number in `regions`) as `rows`."""
        _, meta, region = self.regions[number]
        return self.rows(number, 0, region.blocks(meta.itemsize)[1])

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
            copies.append((region, box, lo, hi, self._box(region, lo, hi)))
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
        dim, length, rows = region.blocks(meta.itemsize)
        first, last = (0, length) if box is None else _along(region, dim, *box)
        for block in range(first // rows, -(-last // rows)):
            begin, end = block * rows, min(length, (block + 1) * rows)
            if content_digest(self.rows(number, begin, end), _moved(region.lo, dim, begin), meta.shape) != region.digests[block]:
                return True
        return False

    def _box(self, number: int, lo: list[int], hi: list[int]) -> torch.Tensor:
        """What a region holds of a box of its tensor, which is in it."""
        _, meta, region = self.regions[number]
        dim, _, _ = region.blocks(meta.itemsize)
        first, last = _along(region, dim, lo, hi)
        return _cut(self.rows(number, first, last), _moved(region.lo, dim, first), lo, hi)

    def _raise(self, bad: Sequence[int]) -> None:
        if bad:
            names = dict.fromkeys(self.regions[n][1].name for n in bad)
            raise ChecksumError(
                f"version {self.version}: {self.place}{self.regions[bad[0]][0]} does not hold what was written, in tensors {few(names)}"
            )


def fragments(regions: Sequence[tuple[str, ParamMeta, Region]]) -> Sequence[Fragment]:
    out = []
    for file, meta, region in regions:
        strides, step = [], meta.itemsize
        for n in reversed(region.extent):
            strides.append(step)
            step *= n
        out.append(Fragment(meta, region.lo, region.hi, buffer_name(file, meta.dtype), region.offset, tuple(reversed(strides))))
    return out


def buffer_name(file: str, dtype: str) -> str:
    return f"{file}:{dtype}"


def stretch(meta: ParamMeta, region: Region, first: int, last: int) -> tuple[int, int, tuple[int, ...]]:
    """Where rows of a region are in its file (from byte, to byte), and their shape."""
    dim, length, _ = region.blocks(meta.itemsize)
    row = int(np.prod(region.extent, dtype=np.int64)) // length * meta.itemsize
    shape = list(region.extent)
    if shape:
        shape[dim] = last - first
    return region.offset + first * row, region.offset + last * row, tuple(shape)


def _along(region: Region, dim: int, lo: Sequence[int], hi: Sequence[int]) -> tuple[int, int]:
    """Which of a region's rows a box of its tensor is in."""
    d = len(region.lo)
    return (lo[len(lo) - d + dim] - region.lo[dim], hi[len(hi) - d + dim] - region.lo[dim]) if d else (0, 1)


def _moved(lo: Sequence[int], dim: int, by: int) -> list[int]:
    out = list(lo)
    if out:
        out[dim] += by
    return out


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
