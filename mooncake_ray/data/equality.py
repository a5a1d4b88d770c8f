"""Comparison of columns and of the values in object arrays and meta_info."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch

from mooncake_ray.data.bits import flat_bytes
from mooncake_ray.data.ragged import Ragged


def values_equal(a: Any, b: Any, *, exact: bool = False) -> bool:
    """Compares two values, through dicts, lists, tuples, arrays and tensors.

    Args:
        a: Any value.
        b: Any value.
        exact: False: numbers are equal by value and NaN equals NaN. True: Python types must be
            the same and numbers equal bit by bit: 0.0 differs from -0.0, and a NaN from another.

    Returns:
        Whether they are equal. Tensors, arrays and ragged columns of different dtype or shape never are, nor are
        elements of object arrays with different types. Devices, strides, subclasses of arrays and
        the order of dict keys do not matter.
    """
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _tensors_equal(a, b, exact)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return _arrays_equal(a, b, exact)
    if isinstance(a, Ragged) and isinstance(b, Ragged):
        return _ragged_equal(a, b, exact)
    if isinstance(a, torch.Tensor | np.ndarray | Ragged) or isinstance(b, torch.Tensor | np.ndarray | Ragged):
        return False
    if exact and type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(values_equal(a[k], b[k], exact=exact) for k in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(values_equal(x, y, exact=exact) for x, y in zip(a, b, strict=True))
    if exact and isinstance(a, complex | float | np.generic):
        return bool(_scalar_bits(a) == _scalar_bits(b))
    return bool(a == b) or (_is_nan(a) and _is_nan(b))


def _is_nan(value: Any) -> bool:
    return isinstance(value, complex | float | np.inexact) and bool(np.isnan(value))


def _tensors_equal(a: torch.Tensor, b: torch.Tensor, exact: bool) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    b = b.to(a.device)
    if exact:
        return torch.equal(flat_bytes(a), flat_bytes(b))
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    nan = torch.isnan(a)
    return torch.equal(nan, torch.isnan(b)) and torch.equal(a[~nan], b[~nan])


def _ragged_equal(a: Ragged, b: Ragged, exact: bool) -> bool:
    if exact:
        return a.equals(b)
    return a.same_form(b) and values_equal(a.compact().values, b.compact().values)


def _arrays_equal(a: np.ndarray, b: np.ndarray, exact: bool) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.hasobject:
        return all(type(x) is type(y) and values_equal(x, y, exact=exact) for x, y in zip(a.flat, b.flat, strict=True))
    if exact:
        return np.array_equal(_array_bits(a), _array_bits(b))
    # numpy's NaN test raises for strings.
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM")


def _array_bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _scalar_bits(value: complex | np.generic) -> Any:
    # A numpy scalar first: np.float64 is a float and np.complex128 a complex as well.
    if isinstance(value, np.generic):
        return value.dtype, value.tobytes()
    return struct.pack("<dd", value.real, value.imag)
