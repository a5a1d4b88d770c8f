"""Values that are known from a number, and a table in shared memory through which processes tell each other what they put."""

from __future__ import annotations

import mmap
import random
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_ray.store import ObjectKey

__all__ = ["LARGEST", "Board", "CorruptError", "Slot", "check", "check_raw", "fill_raw", "is_raw", "raw_bytes", "size_of", "value"]

SMALLEST, LARGEST = 4 << 10, 4 << 20  # bytes
_STARTS = 4096
_NOISE = np.random.default_rng(1).integers(0, 1 << 63, LARGEST // 8 + _STARTS, dtype=np.uint64)
_HEAD = 8  # bytes of a raw object before its body: the seed
_RAW, _TORCH = 1, 2  # bits of a seed: what it is the seed of


class CorruptError(AssertionError):
    """What was read is not what was put."""


def size_of(seed: int) -> int:
    """Bytes of the body that belongs to a seed, a multiple of 8; small ones are as frequent as large ones."""
    return int(SMALLEST * (LARGEST / SMALLEST) ** random.Random(seed).random()) // 8 * 8


def is_raw(seed: int) -> bool:
    """Whether the seed belongs to an object of plain bytes, and not to a value."""
    return bool(seed & _RAW)


def _body(seed: int) -> np.ndarray:
    start = seed % _STARTS
    return _NOISE[start : start + size_of(seed) // 8] ^ np.uint64(seed * 0x9E3779B97F4A7C15 & (1 << 64) - 1)


def value(seed: int) -> dict[str, Any]:
    """Its arrays or tensors, its seed, and a checksum."""
    body = _body(seed)
    value: dict[str, Any] = {"seed": seed, "head": np.full(16, seed), "body": body, "crc": zlib.crc32(body)}
    if seed & _TORCH:
        import torch

        value["body"] = torch.from_numpy(body.view(np.int64))
    return value


def check(value: dict[str, Any], seed: int | None = None) -> None:
    """Raises CorruptError unless this is the value of the seed; without one, of the seed it names itself."""
    found = int(value["seed"])
    if seed is not None and found != seed:
        raise CorruptError(f"asked for {seed:#x}, got the value of {found:#x}")
    if not (value["head"] == found).all():
        raise CorruptError(f"value of {found:#x}: the head says {value['head'].tolist()}")
    body = value["body"]
    _compare(found, np.asarray(body).view(np.uint64))
    if zlib.crc32(np.asarray(body)) != value["crc"]:
        raise CorruptError(f"value of {found:#x}: checksum")


def raw_bytes(seed: int) -> int:
    return _HEAD + size_of(seed)


def fill_raw(view: memoryview, seed: int) -> None:
    view[_HEAD : raw_bytes(seed)] = memoryview(_body(seed)).cast("B")
    view[:_HEAD] = seed.to_bytes(_HEAD, "little")


def check_raw(view: memoryview, seed: int) -> None:
    """Raises CorruptError unless these are the bytes of the seed."""
    if len(view) != raw_bytes(seed):
        raise CorruptError(f"object of {seed:#x}: {len(view)} bytes, not {raw_bytes(seed)}")
    if (found := int.from_bytes(view[:_HEAD], "little")) != seed:
        raise CorruptError(f"asked for {seed:#x}, got the object of {found:#x}")
    _compare(seed, np.frombuffer(view, np.uint64, offset=_HEAD))


def _compare(seed: int, body: np.ndarray) -> None:
    wanted = _body(seed)
    if np.array_equal(body, wanted):
        return
    if body.shape != wanted.shape:
        raise CorruptError(f"body of {seed:#x}: {body.size} words, not {wanted.size}")
    wrong = np.flatnonzero(body != wanted)
    zero = int((body[wrong] == 0).sum())
    raise CorruptError(
        f"body of {seed:#x}: {wrong.size} of {wanted.size} words are wrong, from {wrong[0]} to {wrong[-1]}; {zero} of them are 0"
    )


@dataclass(frozen=True)
class Slot:
    key: ObjectKey
    seed: int


class Board:
    """What was put last, in slots. Writers do not wait for each other: a slot that a kill tore fails its checksum, and names nothing."""

    SLOTS = 512
    _FORM = struct.Struct("<16s16sQI4x")
    NBYTES = SLOTS * _FORM.size

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, self.NBYTES)

    def write(self, number: int, slot: Slot) -> None:
        crc = zlib.crc32(slot.key.pool + slot.key.id + slot.seed.to_bytes(8, "little"))
        at = number * self._FORM.size
        self._memory[at : at + self._FORM.size] = self._FORM.pack(slot.key.pool, slot.key.id, slot.seed, crc)

    def read(self, number: int) -> Slot | None:
        at = number * self._FORM.size
        pool, id, seed, crc = self._FORM.unpack(self._memory[at : at + self._FORM.size])
        if zlib.crc32(pool + id + seed.to_bytes(8, "little")) != crc or not any(pool):
            return None
        return Slot(ObjectKey(pool, id), seed)
