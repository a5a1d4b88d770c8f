"""A snapshot as a plain Hugging Face checkpoint, for everything that loads those."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mooncake_ray.errors import ChecksumError, ConfigError, SnapshotError
from mooncake_ray.weights.digest import content_digest
from mooncake_ray.weights.files import Files
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.stored import Stored
from mooncake_ray.weights.tensor_file import Entry, bits, write

__all__ = ["export_hf"]

_INDEX = "model.safetensors.index.json"


def export_hf(snapshot: Stored, directory: str | os.PathLike[str], max_shard_bytes: int = 5 << 30, *, fsync: bool = True) -> Sequence[Path]:
    """Writes whole tensors under their canonical names: `model.safetensors`, or several and an index, as transformers' `from_pretrained`
    reads them. Configuration and tokenizer are the caller's to put there.

    One tensor at a time is in memory, and compared with its digest. The names appear when all files are written; a loader that comes before
    finds nothing.

    Args:
        directory: Made if it is not there.
        max_shard_bytes: What the tensors of a file may have together. One larger tensor is a file by itself.

    Returns:
        The files.

    Raises:
        ConfigError: there are weights in the directory already, or the limit is not positive.
        SnapshotError: the snapshot has not got all of a tensor.
        ChecksumError: what is in the snapshot is not what was written.
    """
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    target, files = Path(directory), Files(fsync)
    files.make_directories(target)
    if there := sorted(p.name for p in target.iterdir() if p.name == _INDEX or (p.name.startswith("model") and p.suffix == ".safetensors")):
        raise ConfigError(f"{target} has weights already: {', '.join(there[:5])}")
    wholes = _Wholes(snapshot)
    shards = _shards(snapshot.manifest.metas, max_shard_bytes)
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, metas in zip(names, shards, strict=True):
        entries = [Entry(m.name, m.dtype, m.shape) for m in metas]

        def content(n: int, metas: Sequence[ParamMeta] = metas) -> Iterator[torch.Tensor]:
            yield wholes.tensor(metas[n])

        write(files, target / f"{name}.unfinished", entries, {"format": "pt"}, content)
    for name in names:
        files.rename(target / f"{name}.unfinished", target / name)
    if len(shards) > 1:
        weight_map = {m.name: name for name, metas in zip(names, shards, strict=True) for m in metas}
        index = {"metadata": {"total_size": sum(m.nbytes for m in snapshot.manifest.metas)}, "weight_map": weight_map}
        files.put(target / _INDEX, [json.dumps(index, indent=2).encode()])
    files.sync_directory(target)
    return [target / name for name in names]


class _Wholes:
    """Tensors of a snapshot, put together from its regions."""

    def __init__(self, snapshot: Stored) -> None:
        self._snapshot = snapshot
        self._digests = snapshot.manifest.digests()
        self._regions: dict[str, list[int]] = {}
        for number, (_, meta, _) in enumerate(snapshot.regions):
            self._regions.setdefault(meta.name, []).append(number)

    def tensor(self, meta: ParamMeta) -> torch.Tensor:
        numbers = self._regions.get(meta.name, [])
        regions = [self._snapshot.regions[n][2] for n in numbers]
        if (held := sum(math.prod(r.extent) for r in regions)) != math.prod(meta.shape):
            raise SnapshotError(f"{meta.name}: the snapshot holds {held} of {math.prod(meta.shape)} elements")
        if len(numbers) == 1:
            whole = self._snapshot.tensor(numbers[0])
        else:
            whole = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype))
            for number, region in zip(numbers, regions, strict=True):
                place = bits(whole)[tuple(slice(a, b) for a, b in zip(region.lo, region.hi, strict=True))]
                place.copy_(bits(self._snapshot.tensor(number)))
        if content_digest(whole, (0,) * len(meta.shape), meta.shape) != self._digests[meta.name]:
            raise ChecksumError(f"{meta.name}: version {self._snapshot.version} does not hold what was written")
        return whole


def _shards(metas: Sequence[ParamMeta], limit: int) -> list[list[ParamMeta]]:
    """By layer, what fits together; in a file those of larger elements first."""
    shards: list[list[ParamMeta]] = [[]]
    held = 0
    for meta in sorted(metas, key=lambda m: (m.layer, m.name)):
        if shards[-1] and held + meta.nbytes > limit:
            shards.append([])
            held = 0
        shards[-1].append(meta)
        held += meta.nbytes
    return [sorted(shard, key=lambda m: -m.itemsize) for shard in shards]
