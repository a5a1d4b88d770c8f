"""`ParamMeta`: a tensor of the model, as Hugging Face names and shapes it, whoever holds which part of it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

__all__ = ["ITEMSIZE", "ParamMeta"]

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
}
"""Bytes of an element, by torch's name of its dtype."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, order=True)
class ParamMeta:
    """A whole tensor. Equal on every rank that holds a part of it."""

    name: str
    """Canonical: as in the model's Hugging Face checkpoint."""
    dtype: str
    """As torch names it: "bfloat16"."""
    shape: tuple[int, ...]
    """Of the whole, not of anybody's part."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"{self.name}: dtype {self.dtype!r} is none of {', '.join(ITEMSIZE)}")
        if any(n < 0 for n in self.shape):
            raise ValueError(f"{self.name}: shape {self.shape} has a negative length")

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.itemsize * math.prod(self.shape)

    @property
    def layer(self) -> int:
        """The number after `layers.` in its name; -1 for what belongs to no layer."""
        found = _LAYER.search(self.name)
        return int(found[1]) if found else -1
