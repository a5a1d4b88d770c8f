"""verl's `delta_flush` format: named tensors that its loaders for SGLang and vLLM take, of whole tensors or of what changed in them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mooncake_ray.data.bits import dtype_name
from mooncake_ray.integrations.verl_weights.changes import parts
from mooncake_ray.integrations.verl_weights.stream import Named

__all__ = ["Flush", "dense_flushes", "patch_flushes", "summable"]

Flush = tuple[list[tuple[str, torch.Tensor]], bool]
"""Named tensors, and whether they are the last."""

Encoding = Literal["dense", "indices"]


@dataclass(frozen=True, slots=True)
class _Entry:
    """All of a tensor, or what changed in it, or in a part of it."""

    name: str
    shape: Sequence[int]
    values: torch.Tensor  # 1-D
    places: torch.Tensor | None = None  # int32, of the same length

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.places is None else self.places.nbytes)


def summable(dtype: torch.dtype) -> bool:
    """Whether verl's checksum, which is torch's, knows it."""
    return not dtype.is_complex and not (dtype.is_floating_point and dtype.itemsize == 1)


def dense_flushes(items: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[Flush]:
    """All of each tensor, in flushes of about `limit` bytes."""
    return _flushes((_Entry(name, tensor.shape, tensor.reshape(-1)) for name, tensor in items), "dense", limit)


def patch_flushes(patches: Iterable[tuple[Sequence[Named], Sequence[int], np.ndarray]], limit: int) -> Iterator[Flush]:
    """What changed: of each bucket its tensors, how many elements of each, and its patch. None, if nothing did."""
    found = (part for patch in patches for part in parts(*patch))
    return _flushes((_Entry(named.name, named.shape, values, places) for named, places, values in found), "indices", limit)


def _flushes(entries: Iterable[_Entry], encoding: Encoding, limit: int) -> Iterator[Flush]:
    """Only with the next one is it known that one is not the last."""
    before: list[_Entry] | None = None
    for gathered in _gathered(entries, limit):
        if before is not None:
            yield _named(before, encoding, False), False
        before = gathered
    if before is not None:
        yield _named(before, encoding, True), True


def _gathered(entries: Iterable[_Entry], limit: int) -> Iterator[list[_Entry]]:
    """Entries of one dtype that go together."""
    gathered: dict[torch.dtype, list[_Entry]] = {}
    nbytes: Counter[torch.dtype] = Counter()
    for entry in entries:
        dtype = entry.values.dtype
        gathered.setdefault(dtype, []).append(entry)
        nbytes[dtype] += entry.nbytes
        if nbytes[dtype] >= limit:
            del nbytes[dtype]
            yield gathered.pop(dtype)
    yield from gathered.values()


def _named(entries: Sequence[_Entry], encoding: Encoding, is_last: bool) -> list[tuple[str, torch.Tensor]]:
    from verl.checkpoint_engine.delta_sync.encode import DeltaParam, checksum

    params, at = [], 0
    for entry in entries:
        end = at + entry.values.numel()
        place, place_end = (4 * at, 4 * end) if encoding == "indices" else (0, 0)
        dtype = dtype_name(entry.values.dtype)
        params.append(vars(DeltaParam(entry.name, dtype, list(entry.shape), place, place_end, 4, at, end)))
        at = end
    values = torch.cat([entry.values for entry in entries])
    found = [entry.places for entry in entries if entry.places is not None]
    places = torch.cat(found).view(torch.uint8) if found else torch.empty(0, dtype=torch.uint8)
    spec = {"encoding": encoding, "params": params, "checksum": int(checksum(places, values)), "verify": False, "is_last": is_last}
    named = [("__delta_spec__", torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8))]
    return [*named, *([("__positions__", places)] if encoding == "indices" else []), ("__values__", values)]
