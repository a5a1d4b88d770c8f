"""Tensors and arrays as plain strided memory: an address, a shape, and how wide an item is."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mooncake_ray.data.bits import named_dtype
from mooncake_ray.data.kernels import Cells

__all__ = ["Plain", "kind_of", "plain_array", "plain_tensor", "wire_of"]

_INTS = {"int8": 1, "int16": 2, "int32": 4, "int64": 8}
_UINTS = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}
_ONE = {"float16": "003c", "bfloat16": "803f", "float32": "0000803f", "float64": "000000000000f03f"}


@dataclass(frozen=True, slots=True)
class Plain:
    """A column whose rows are each contiguous; `stride` bytes lie between the starts of two rows. Bits, whatever the dtype."""

    owner: Any  # keeps the memory
    address: int
    shape: tuple[int, ...]
    stride: int
    dtype: str  # torch's name, or numpy's descr where torch has no such type
    item: int  # bytes

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def width(self) -> int:
        """Items of the second dimension; 1 without one."""
        return self.shape[1] if len(self.shape) > 1 else 1

    @property
    def tail(self) -> tuple[int, ...]:
        """The shape behind the second dimension."""
        return self.shape[2:]

    @property
    def cell(self) -> int:
        """Bytes of one position of the second dimension."""
        return self.item * math.prod(self.tail)

    @property
    def cells(self) -> Cells:
        """Rows of positions, each with its tail."""
        return Cells(self.address, self.rows, self.width, self.stride, self.cell)


def plain_tensor(tensor: torch.Tensor) -> Plain | None:
    """A view of a tensor's memory, copied only where its rows are not contiguous or not on the CPU. None for what has no such memory."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.ndim == 0:
        return None
    base = tensor.detach().cpu().resolve_conj().resolve_neg()
    if base.shape[0] and not base[0].is_contiguous():
        base = base.contiguous()
    dtype = str(base.dtype).removeprefix("torch.")
    item = base.element_size()
    stride = base.stride(0) * item if base.shape[0] > 1 else math.prod(base.shape[1:]) * item
    if stride <= 0 and base.numel():  # rows that are one and the same
        return plain_tensor(base.contiguous())
    return Plain(base, base.data_ptr(), tuple(base.shape), stride, dtype, item)


def plain_array(array: np.ndarray) -> Plain | None:
    """A view of an array's memory. None for arrays of objects or records, and for what would lose its order in memory."""
    dtype = array.dtype
    if dtype.hasobject or dtype.names or dtype.subdtype or type(array) is not np.ndarray or array.ndim == 0 or not dtype.itemsize:
        return None
    if array.ndim > 1 and not array.flags.c_contiguous and array.flags.f_contiguous:
        return None
    base = array
    if len(base) and not base[0:1].flags.c_contiguous:
        base = np.ascontiguousarray(base)
    stride = base.strides[0] if len(base) > 1 else math.prod(base.shape[1:]) * dtype.itemsize
    if stride <= 0 and base.size:
        return plain_array(np.ascontiguousarray(array).copy())
    name = dtype.name if dtype.isnative and dtype.name in _NAMES else dtype.str
    return Plain(base, base.ctypes.data, base.shape, stride, name, dtype.itemsize)


_NAMES = frozenset({"bool", *_INTS, *_UINTS, "float16", "float32", "float64", "complex64", "complex128"})


def kind_of(dtype: str) -> str:
    """bool, int, uint, float or other."""
    return "bool" if dtype == "bool" else "int" if dtype in _INTS else "uint" if dtype in _UINTS else "float" if dtype in _ONE else "other"


def one_of(dtype: str, item: int) -> bytes | None:
    """The bits of 1, for dtypes that a mask may have."""
    if dtype in _ONE:
        return bytes.fromhex(_ONE[dtype])
    return (1).to_bytes(item, "little") if kind_of(dtype) in ("bool", "int", "uint") else None


def wire_of(low: int, high: int, dtype: str, item: int) -> str:
    """The narrowest dtype that holds low … high, at most as wide as `dtype`. Bits for 0 and 1."""
    if low >= 0 and high <= 1:
        return "bits"
    for name, width in (*_UINTS.items(), *_INTS.items()) if low >= 0 else _INTS.items():
        if width >= item:
            break
        bits = 8 * width
        signed = name in _INTS
        if -(1 << bits - 1) * signed <= low and high < 1 << (bits - signed):
            return name
    return dtype


@functools.cache
def width_of(dtype: str) -> int:
    """Bytes of one item."""
    found = named_dtype(dtype)
    return found.itemsize if found is not None else np.dtype(dtype).itemsize
