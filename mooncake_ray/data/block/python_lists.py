"""Python lists of numbers to and from memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_ray._native import lists
from mooncake_ray._native.lists import BOOL, BYTES, DICT, FLOAT, INT, LIST, NONE, STR, TUPLE, Scan, kinds, scan

__all__ = ["BOOL", "BYTES", "DICT", "FLOAT", "INT", "LIST", "NONE", "STR", "TUPLE", "Scan", "kinds", "numbers_from", "numbers_into", "scan"]


def numbers_into(rows: Sequence[Any], nested: bool, address: int, count: int, dtype: np.dtype) -> None:
    """Writes the items of a list, or of the lists in it, as `count` items of `dtype` (bool: a byte each), all of which fit.

    Raises:
        TypeError, OverflowError, ValueError: The lists were changed since it was found that they fit. Nothing is written outside.
    """
    if dtype.kind == "b":
        lists.bools_into(rows, nested, address, count)
    elif dtype.kind == "f":
        lists.floats_into(rows, nested, address, dtype.itemsize, count)
    else:
        lists.ints_into(rows, nested, address, dtype.itemsize, dtype.kind == "i", count)


def numbers_from(array: np.ndarray, offsets: np.ndarray | None, as_tuple: bool) -> list[Any]:
    """The numbers as Python's: a flat list, or a list (tuple) for each row.

    Args:
        array: (items,) of a boolean, integer or floating dtype, contiguous.
        offsets: int64 (rows + 1,), which do not fall; they are within the array.
    """
    address, item, kind, count = array.ctypes.data, array.itemsize, array.dtype.kind, array.size
    if kind == "b":
        return lists.bools_from(address, offsets, as_tuple, count)
    if kind == "f":
        return lists.floats_from(address, item, offsets, as_tuple, count)
    return lists.ints_from(address, item, kind == "i", offsets, as_tuple, count)
