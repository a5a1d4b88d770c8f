"""A snapshot as a plain Hugging Face checkpoint, for everything that loads those."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mooncake_ray.errors import ConfigError
from mooncake_ray.weights.files import Files
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.stored import Stored
from mooncake_ray.weights.tensor_file import Entry, write

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
    shards = _shards(snapshot.manifest.metas, max_shard_bytes)
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, metas in zip(names, shards, strict=True):
        entries = [Entry(m.name, m.dtype, m.shape) for m in metas]

        def content(n: int, metas: Sequence[ParamMeta] = metas) -> Iterator[torch.Tensor]:
            yield snapshot.whole(metas[n])

        write(files, target / f"{name}.unfinished", entries, {"format": "pt"}, content)
    for name in names:
        files.rename(target / f"{name}.unfinished", target / name)
    if len(shards) > 1:
        weight_map = {m.name: name for name, metas in zip(names, shards, strict=True) for m in metas}
        index = {"metadata": {"total_size": sum(m.nbytes for m in snapshot.manifest.metas)}, "weight_map": weight_map}
        files.put(target / _INDEX, [json.dumps(index, indent=2).encode()])
    files.sync_directory(target)
    return [target / name for name in names]


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
