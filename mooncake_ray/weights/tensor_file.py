"""Files of tensors in the safetensors format: a length, a JSON header, and the tensors' bytes, end to end.

Written from wherever the tensors lie, in one pass; what lies packed is not copied before it is written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mooncake_ray.errors import CorruptBlockError, PlanError
from mooncake_ray.weights.files import Files
from mooncake_ray.weights.meta import ITEMSIZE

__all__ = ["Entry", "bits", "blocks", "header", "parsed", "raw", "write"]

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALIGNMENT = 64  # bytes; where the first tensor begins
_LENGTH = 8  # bytes, of the header's length


@dataclass(frozen=True)
class Entry:
    """A tensor of a file."""

    key: str
    dtype: str
    """As torch names it."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEMSIZE[self.dtype] * math.prod(self.shape)


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """What a file begins with, and where in the file each tensor then is, in bytes.

    Elements lie aligned if those of more bytes come first.
    """
    described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at, places = 0, []
    for entry in entries:
        if entry.key in described:
            raise PlanError(f"{entry.key} is twice in a file of tensors")
        shape = list(entry.shape)
        if entry.dtype == "float4_e2m1fn_x2" and shape:  # the format counts single elements, torch pairs of them
            shape[-1] *= 2
        described[entry.key] = {"dtype": _NAMES[entry.dtype], "shape": shape, "data_offsets": [at, at + entry.nbytes]}
        places.append(at)
        at += entry.nbytes
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(_LENGTH + len(text)) % _ALIGNMENT)
    begin = _LENGTH + len(text)
    return len(text).to_bytes(_LENGTH, "little") + text, [begin + place for place in places]


def parsed(text: bytes, nbytes: int) -> tuple[list[tuple[Entry, int]], dict[str, str]]:
    """What a header says: entries and where each begins, in bytes after the header; and metadata.

    Args:
        text: The JSON, without its length.
        nbytes: That follow it.

    Raises:
        CorruptBlockError: it is no header, or tensors do not lie end to end in so many bytes.
    """
    try:
        found = json.loads(text)
        metadata = found.pop("__metadata__", {})
        rows = [(name, d["dtype"], tuple(d["shape"]), *d["data_offsets"]) for name, d in found.items()]
        rows.sort(key=lambda row: (row[3], row[4]))
        kinds = {known: name for name, known in _NAMES.items()}
        if not all(isinstance(v, str) for v in metadata.values()):
            raise TypeError("metadata that is not text")
        if not all(type(n) is int and n >= 0 for _, _, shape, _, _ in rows for n in shape):
            raise TypeError("a length that is not one")
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise CorruptBlockError(f"the {len(text)} bytes at the beginning are no header of tensors: {type(e).__name__}: {e}") from None
    out, at = [], 0
    for name, dtype, shape, begin, end in rows:
        if dtype not in kinds:
            raise CorruptBlockError(f"{name}: dtype {dtype!r} is none of {', '.join(kinds)}")
        if dtype == "F4":
            if not shape or shape[-1] % 2:
                raise CorruptBlockError(f"{name}: shape {list(shape)} of F4, which are in pairs")
            shape = (*shape[:-1], shape[-1] // 2)
        entry = Entry(name, kinds[dtype], shape)
        if begin != at or end - begin != entry.nbytes:
            raise CorruptBlockError(
                f"{name} is at bytes {begin} to {end}; it has {entry.nbytes} bytes, and what lies before it ends at {at}"
            )
        out.append((entry, at))
        at = end
    if at != nbytes:
        raise CorruptBlockError(f"tensors have {at} bytes, and {nbytes} follow the header")
    return out, metadata


def write(
    files: Files, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str], tensor: Callable[[int], Iterable[torch.Tensor]]
) -> tuple[list[int], int]:
    """Writes a file and syncs it. The directory must be synced, too.

    Args:
        tensor: Gives an entry's elements, in parts that follow each other; each of any strides.

    Returns:
        Where in the file each tensor is, and the length of the file; both in bytes.
    """
    head, places = header(entries, metadata)
    ends = [place + entry.nbytes for place, entry in zip(places, entries, strict=True)]
    file = files.create(path)
    try:
        files.append(file, memoryview(head))
        at = len(head)
        for number, end in enumerate(ends):
            for part in tensor(number):
                data = raw(part)
                files.append(file, data)
                at += len(data)
            if at != end:
                raise PlanError(f"{entries[number].key}: {at - places[number]} bytes were given of {entries[number].nbytes}")
        files.sync(file)
    finally:
        os.close(file)
    return places, at


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as integers: torch can do little with some dtypes."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def raw(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in C order: its own memory where it lies packed on the host, else a copy."""
    packed = bits(tensor).cpu().contiguous()
    flat = packed.as_strided((packed.numel(),), (1,))  # a dimension of length 1 may have had any stride
    return memoryview(flat.view(torch.uint8).numpy())


def blocks(shape: Sequence[int], itemsize: int, block_bytes: int) -> tuple[int, int, int]:
    """How a packed tensor divides into blocks of about that size: (dimension, its length, rows of it a block).

    The dimension is the first one longer than 1, so a block is one stretch of bytes.
    """
    dim = next((k for k, n in enumerate(shape) if n != 1), len(shape) - 1)
    if dim < 0:
        return 0, 1, 1
    row = itemsize * math.prod(shape[dim + 1 :])
    return dim, shape[dim], max(1, block_bytes // max(1, row))
