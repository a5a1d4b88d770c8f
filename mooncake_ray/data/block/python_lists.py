"""Python lists of numbers to and from memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

NONE, BOOL, INT, FLOAT, STR, BYTES, LIST, TUPLE, DICT, OTHER = (1 << n for n in range(10))
_FLAGS = {type(None): NONE, bool: BOOL, int: INT, float: FLOAT, str: STR, bytes: BYTES, list: LIST, tuple: TUPLE, dict: DICT}


class Scan(NamedTuple):
    """What lists hold. `lo` and `hi` are set where all items are ints, in [-2**63, 2**64); else 0 and -1."""

    flags: int
    lengths: np.ndarray  # int64 (rows,); of a flat list empty
    lo: int
    hi: int
    fits_float32: bool


def kinds(values: Sequence[Any]) -> int:
    """The kinds of the values, by exact type: flags."""
    flags = 0
    for kind in set(map(type, values)):
        flags |= _FLAGS.get(kind, OTHER)
    return flags


def scan(rows: Sequence[Any], nested: bool) -> Scan:
    """Looks at all items of a list, or of the lists in it."""
    items = list(chain.from_iterable(rows)) if nested else rows
    lengths = np.fromiter(map(len, rows), np.int64, len(rows)) if nested else np.empty(0, np.int64)
    flags = kinds(items)
    lo, hi, fits = 0, -1, False
    if flags == INT:
        lo, hi = min(items), max(items)
        if lo < -(1 << 63) or hi >= 1 << 64:
            lo, hi = 0, -1
    elif flags == FLOAT:
        wide = np.fromiter(items, np.float64, len(items))
        with np.errstate(all="ignore"):
            back = wide.astype(np.float32).astype(np.float64)
        fits = bool((wide.view(np.int64) == back.view(np.int64)).all())
    return Scan(flags, lengths, lo, hi, fits)


def numbers_into(rows: Sequence[Any], nested: bool, address: int, count: int, dtype: np.dtype) -> None:
    """Writes the items, which `scan` found to fit, as `dtype` (bool: a byte each)."""
    place = np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)
    place[:] = np.fromiter(chain.from_iterable(rows) if nested else rows, np.float64 if dtype.kind == "f" else dtype, count)


def numbers_from(array: np.ndarray, offsets: np.ndarray | None, as_tuple: bool) -> list[Any]:
    """The numbers as Python's: a flat list, or a list (tuple) for each row that the offsets bound."""
    flat = (array.astype(np.float64) if array.dtype.kind == "f" else array).tolist()
    if offsets is None:
        return flat
    edges = offsets.tolist()
    rows = [flat[a:b] for a, b in pairwise(edges)]
    return list(map(tuple, rows)) if as_tuple else rows
