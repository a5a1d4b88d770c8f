"""`Volume`: a snapshot as files that other programs know: one `model.safetensors`, each tensor by itself, and the model's configuration."""

from __future__ import annotations

import hashlib
import math
import mimetypes
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from mooncake_ray.errors import SnapshotNotFoundError
from mooncake_ray.serve.spans import Content, FileSpan, Gathered, Held, Span
from mooncake_ray.weights.draft import MANIFEST
from mooncake_ray.weights.generation import Snapshot
from mooncake_ray.weights.manifest import Region, few
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.tensor_file import Entry, bits, header, raw

__all__ = ["FILES", "FILE_NAME", "MODEL", "Placed", "Volume", "on_disk"]

MODEL = "model.safetensors"
FILES = "files"
"""Key of a manifest's `extra`: small files that go with a version, their text by name."""
FILE_NAME = r"(?!\.\.?$)[A-Za-z0-9_.-]{1,200}"
"""What they, and files that go with every version, may be called. Others are not given out."""
_TENSORS_TYPE = "application/vnd.safetensors"
_BYTES_TYPE = "application/octet-stream"
_NAME = re.compile(FILE_NAME)
_BLOCK_BYTES = 4 << 20  # put together at a time


@dataclass(frozen=True)
class Placed:
    """A tensor, and which bytes of `model.safetensors` it is."""

    meta: ParamMeta
    begin: int
    end: int
    digest: int
    """Of its content; see `weights.digest`."""


class Volume:
    """Of one snapshot, which must be open for as long as contents are used. Thread-safe. Reads nothing but what `Gathered` parts need.

    Attributes:
        tag: Identifies the content of the version, whatever replica says it.
    """

    def __init__(self, snapshot: Snapshot, files: Path | None = None) -> None:
        """`files`: a directory with further files that go with every version."""
        self.snapshot, self._directory = snapshot, files
        self.version, self.manifest = snapshot.version, snapshot.manifest
        path = snapshot.path / MANIFEST
        self.tag = hashlib.sha256(path.read_bytes()).hexdigest()[:40]
        self._metas = {m.name: m for m in self.manifest.metas}

    # ---- tensors

    @cached_property
    def _ordered(self) -> list[ParamMeta]:
        """As they are in the file: elements of more bytes first, so that they lie aligned; else as they are on the disk, so that what is read
        together lies together."""
        place: dict[str, tuple[str, int]] = {}
        for file, meta, region in self.snapshot.regions:
            place[meta.name] = min((file, region.offset), place.get(meta.name, (file, region.offset)))
        return sorted(self.manifest.metas, key=lambda m: (-m.itemsize, place.get(m.name, ("", 0)), m.name))

    @cached_property
    def _layout(self) -> tuple[bytes, dict[str, Placed]]:
        entries = [Entry(m.name, m.dtype, m.shape) for m in self._ordered]
        head, places = header(entries, {"format": "pt", "version": str(self.version)})
        digests = self.manifest.digests()
        return head, {m.name: Placed(m, at, at + m.nbytes, digests[m.name]) for m, at in zip(self._ordered, places, strict=True)}

    @property
    def tensors(self) -> Mapping[str, Placed]:
        """All of them by name, as they follow each other in the file."""
        return self._layout[1]

    @cached_property
    def model(self) -> Content:
        """All tensors as one file of the safetensors format.

        Raises:
            SnapshotError: the snapshot has not got all of a tensor.
        """
        spans: list[Span] = [Held(self._layout[0])]
        for meta in self._ordered:
            spans += self._spans(meta)
        return Content(spans, media_type=_TENSORS_TYPE, etag=f'"{self.tag}-model"')

    def tensor(self, name: str) -> Content:
        """A tensor's bytes in C order.

        Raises:
            SnapshotNotFoundError: there is none of that name.
            SnapshotError: the snapshot has not got all of it.
        """
        spans = self._spans(self._meta(name))
        which = hashlib.sha256(name.encode()).hexdigest()[:16]
        return Content(spans, media_type=_BYTES_TYPE, etag=f'"{self.tag}-{which}"')

    def whole(self, name: str) -> torch.Tensor:
        """A tensor, not to be written. Raises as `tensor`, and ChecksumError: it is not what was written."""
        return self.snapshot.whole(self._meta(name))

    def _meta(self, name: str) -> ParamMeta:
        if (meta := self._metas.get(name)) is None:
            raise SnapshotNotFoundError(f"version {self.version} has no tensor {name!r}, of {few(sorted(self._metas))}")
        return meta

    def _spans(self, meta: ParamMeta) -> list[Span]:
        numbers = self.snapshot.parts_of(meta)
        regions = [self.snapshot.regions[n] for n in numbers]
        if all(_is_run(r, meta.shape) for _, _, r in regions):
            regions.sort(key=lambda r: _begin(r[2], meta.shape))
            return [FileSpan(str(self.snapshot.path / file), r.offset, meta.itemsize * math.prod(r.extent)) for file, _, r in regions]
        return [Gathered(self._gather(meta, numbers), 0, meta.nbytes)]

    def _gather(self, meta: ParamMeta, numbers: Sequence[int]) -> Callable[[int, int], Iterator[memoryview]]:
        """Puts rows of a tensor together that is cut across them."""
        dim = next(k for k, n in enumerate(meta.shape) if n > 1)
        row = meta.nbytes // meta.shape[dim]
        step = max(1, _BLOCK_BYTES // row)

        def read(begin: int, end: int) -> Iterator[memoryview]:
            for first in range(begin // row, -(-end // row), step):
                last = min(first + step, -(-end // row))
                data = raw(self._rows(meta, numbers, dim, first, last))
                yield data[max(0, begin - first * row) : end - first * row]

        return read

    def _rows(self, meta: ParamMeta, numbers: Sequence[int], dim: int, first: int, last: int) -> torch.Tensor:
        shape = list(meta.shape)
        shape[dim] = last - first
        out = torch.empty(shape, dtype=getattr(torch, meta.dtype))
        for number in numbers:
            region = self.snapshot.regions[number][2]
            a, b = max(first, region.lo[dim]), min(last, region.hi[dim])
            if a < b:
                into = [slice(x, y) for x, y in zip(region.lo, region.hi, strict=True)]
                into[dim] = slice(a - first, b - first)
                bits(out)[tuple(into)] = bits(self.snapshot.tensor(number)).narrow(dim, a - region.lo[dim], b - a)
        return out

    # ---- files

    @property
    def files(self) -> list[str]:
        """Names of all, the model's first."""
        common = (p.name for p in self._directory.iterdir() if _NAME.fullmatch(p.name) and p.is_file()) if self._directory else ()
        return [MODEL, *sorted({*self._own_files, *common} - {MODEL})]

    def file(self, name: str) -> Content:
        """Raises SnapshotNotFoundError: there is none of that name."""
        if name == MODEL:
            return self.model
        if name in self._own_files:
            data = self._own_files[name].encode()
            return Content([Held(data)], media_type=_type_of(name), etag=f'"{hashlib.sha256(data).hexdigest()[:32]}"')
        if self._directory is not None and _NAME.fullmatch(name) and (path := self._directory / name).is_file():
            return on_disk(path)
        raise SnapshotNotFoundError(f"version {self.version} has no file {name!r}, of {few(self.files)}")

    @property
    def _own_files(self) -> Mapping[str, str]:
        found = self.manifest.extra.get(FILES, {})
        named = found.items() if isinstance(found, dict) else ()  # anybody may have written it
        return {name: text for name, text in named if _NAME.fullmatch(name) and isinstance(text, str)}


def on_disk(path: Path) -> Content:
    """A file that is there as it is. Raises FileNotFoundError: it was deleted this moment."""
    stat = path.stat()
    tag = hashlib.sha256(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:40]
    return Content([FileSpan(str(path), 0, stat.st_size)], media_type=_type_of(path.name), etag=f'"{tag}"')


def _type_of(name: str) -> str:
    return _TENSORS_TYPE if name.endswith(".safetensors") else mimetypes.guess_type(name)[0] or _BYTES_TYPE


def _is_run(region: Region, shape: tuple[int, ...]) -> bool:
    """Whether a box is one stretch of its tensor: of length 1 up to a dimension, and all of it beyond."""
    cut = next((k for k, n in enumerate(region.extent) if n != 1), len(shape))
    return region.extent[cut + 1 :] == shape[cut + 1 :]


def _begin(region: Region, shape: tuple[int, ...]) -> int:
    """Index of a box's first element in its tensor."""
    return int(np.ravel_multi_index(region.lo, shape)) if shape and math.prod(shape) else 0
