"""What changed since the version before, as verl's `delta_flush` has it: places and values, which a loader writes over what is there.

Trainers compare buckets, bit by bit; workers make of their patches the flushes that verl's loaders for SGLang and vLLM take. Those mark what
did not change by NaN. So what changed to NaN, or in a tensor that is not of floating point, cannot be sent in this way: then all is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mooncake_ray.integrations.verl_stream import Named, dtype_of

__all__ = ["Changes", "Flush", "blocking", "changes_of", "dense_flushes", "patch_flushes", "summable", "worth_it"]

Flush = tuple[list[tuple[str, torch.Tensor]], bool]
"""Named tensors, and whether they are the last."""

_ALIGNMENT = 8  # of each tensor's values in a patch
_MOST = (1 << 31) - 1  # elements of a tensor: places are int32
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Changes:
    """Of a bucket, for its tensors in their order."""

    counts: tuple[int, ...]
    places: np.ndarray  # int32, (changed,): in the flat tensors
    values: list[np.ndarray]  # uint8, those of a tensor each

    @property
    def values_at(self) -> int:
        return _aligned(self.places.nbytes)

    @property
    def nbytes(self) -> int:
        return self.values_at + sum(_aligned(v.nbytes) for v in self.values)

    def write(self, out: np.ndarray) -> None:
        out[:] = 0
        out[: self.places.nbytes] = self.places.view(np.uint8)
        at = self.values_at
        for values in self.values:
            out[at : at + values.nbytes] = values
            at += _aligned(values.nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def changes_of(tensors: Sequence[Named], begin: int, size: int, old: np.ndarray, new: np.ndarray) -> Changes | None:
    """What is different in a bucket. None where that cannot be sent as changes.

    Args:
        begin: Where the bucket begins in the stream.
        size: Of whole buckets.
        old, new: The bucket's bytes, uint8, of one length.
    """
    counts, places, values = [], [np.zeros(0, np.int32)], []
    for named in tensors:
        dtype = dtype_of(named.dtype)
        lo, hi = named.part(begin, begin + size)
        at = slice(named.at + lo - begin, named.at + hi - begin)
        bits = _BITS[dtype.itemsize]
        before, now = old[at].view(bits), new[at].view(bits)
        changed = np.flatnonzero(before != now)
        found = now[changed].view(np.uint8)
        if len(changed) and (not dtype.is_floating_point or named.nbytes // dtype.itemsize > _MOST or _has_nan(found, dtype)):
            return None
        counts.append(len(changed))
        places.append((changed + lo // dtype.itemsize).astype(np.int32))
        values.append(found)
    return Changes(tuple(counts), np.concatenate(places), values)


def _has_nan(data: np.ndarray, dtype: torch.dtype) -> bool:
    return bool(torch.from_numpy(data).view(dtype).isnan().any())


def summable(dtype: torch.dtype) -> bool:
    """Whether verl's checksum, which is torch's, knows it."""
    return not dtype.is_complex and not (dtype.is_floating_point and dtype.itemsize == 1)


def worth_it(patches: int, dense: int) -> bool:
    """Whether changes of so many bytes are sent in place of all."""
    return 2 * patches <= dense


@dataclass
class _Gathered:
    """Entries of one dtype that go together."""

    params: list[dict[str, Any]] = field(default_factory=list)
    places: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    place_bytes: int = 0
    elements: int = 0

    def add(self, name: str, shape: Sequence[int], places: torch.Tensor | None, values: torch.Tensor) -> None:
        n = values.numel()
        width = 0 if places is None else n * 4
        self.params.append(
            {
                "name": name,
                "dtype": str(values.dtype).removeprefix("torch."),
                "shape": list(shape),
                "pos_start": self.place_bytes,
                "pos_end": self.place_bytes + width,
                "pos_width": 4,
                "val_start": self.elements,
                "val_end": self.elements + n,
            }
        )
        if places is not None:
            self.places.append(places)
        self.values.append(values)
        self.place_bytes += width
        self.elements += n

    @property
    def nbytes(self) -> int:
        return self.place_bytes + sum(v.nbytes for v in self.values)

    def flush(self, encoding: str, is_last: bool) -> list[tuple[str, torch.Tensor]]:
        from verl.checkpoint_engine.delta_sync.encode import checksum

        values = torch.cat(self.values)
        places = torch.cat(self.places).view(torch.uint8) if self.places else torch.empty(0, dtype=torch.uint8)
        spec = {"encoding": encoding, "params": self.params, "checksum": int(checksum(places, values)), "verify": False, "is_last": is_last}
        named = [("__delta_spec__", torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8))]
        return [*named, *([("__positions__", places)] if encoding == "indices" else []), ("__values__", values)]


def _flushes(entries: Iterable[tuple[str, Sequence[int], torch.Tensor | None, torch.Tensor]], encoding: str, limit: int) -> Iterator[Flush]:
    """Each of one dtype; only with the next one is it known that one is not the last."""
    open_: dict[torch.dtype, _Gathered] = {}
    pending: _Gathered | None = None
    for name, shape, places, values in entries:
        gathered = open_.setdefault(values.dtype, _Gathered())
        gathered.add(name, shape, places, values)
        if gathered.nbytes >= limit:
            if pending is not None:
                yield pending.flush(encoding, False), False
            pending = open_.pop(values.dtype)
    for gathered in open_.values():
        if pending is not None:
            yield pending.flush(encoding, False), False
        pending = gathered
    if pending is not None:
        yield pending.flush(encoding, True), True


def dense_flushes(items: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[Flush]:
    """All of each tensor, in flushes of about `limit` bytes."""
    return _flushes(((name, tensor.shape, None, tensor.reshape(-1)) for name, tensor in items), "dense", limit)


def patch_flushes(patches: Iterable[tuple[Sequence[Named], Sequence[int], int, np.ndarray]], limit: int) -> Iterator[Flush]:
    """What changed: of each bucket its tensors, how many elements of each, where in the patch values begin, and the patch. None, if nothing
    did."""

    def entries() -> Iterator[tuple[str, Sequence[int], torch.Tensor, torch.Tensor]]:
        for tensors, counts, values_at, data in patches:
            patch, first, at = torch.from_numpy(data), 0, values_at
            for named, n in zip(tensors, counts, strict=True):
                dtype = dtype_of(named.dtype)
                if n:
                    places = patch[4 * first : 4 * (first + n)].view(torch.int32)
                    yield named.name, named.shape, places, patch[at : at + n * dtype.itemsize].view(dtype)
                first += n
                at += _aligned(n * dtype.itemsize)

    return _flushes(entries(), "indices", limit)


@contextlib.contextmanager
def blocking() -> Iterator[Any]:
    """Gives a function that runs coroutines to their end from code that must not be one, one after the other: on a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="mooncake_ray.verl", daemon=True)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    try:
        yield run
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
