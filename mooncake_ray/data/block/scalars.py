"""Rows that are numbers, text, bytes or None; what encodes a kind stands beside what decodes it.

none    every row is None
const   every row is the same int, float, bool, str or bytes, bit for bit: it stands in the node
bools   `buffer` of bits, lowest first
ints    `buffer` of the narrowest `type` that holds them all
floats  `buffer` of float32 where every value survives it bit for bit, else of float64
text    UTF-8 (lone surrogates as three bytes each); see `node.spans` for `length`, `offsets` and `total` (bytes)
bytes   likewise
numpy   NumPy scalars of one `dtype`
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mooncake_ray.data.block import python_lists
from mooncake_ray.data.block.chunk import Builder, Chunk
from mooncake_ray.data.block.node import Node, bits, corrupt, decoder, items, lengths, narrow, natural, number_type, pieces
from mooncake_ray.data.block.python_lists import BOOL, FLOAT, INT, Scan
from mooncake_ray.data.block.read import Runs, Steps

__all__ = [
    "NUMBERS",
    "encode_bytes",
    "encode_none",
    "encode_numbers",
    "encode_numpy",
    "encode_positions",
    "encode_text",
    "int_type",
    "numbers",
    "numpy_type",
    "pack_bits",
]

_INTS = tuple(np.dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"))
_FLOATS = {True: np.dtype(np.float32), False: np.dtype(np.float64)}
_BOOL = np.dtype(bool)
_LARGEST_CONST = 64  # bytes of a text in a node; the index of a block is to stay small


def encode_none(rows: int) -> Node:
    return {"kind": "none", "rows": rows}


@decoder("none")
def _decode_none(node: Node, runs: Runs) -> Steps[list[Any]]:
    return [None] * runs.total
    yield


# Numbers


def int_type(lo: int, hi: int) -> np.dtype | None:
    """The narrowest type that holds lo … hi, if there is one."""
    for dtype in _INTS:
        info = np.iinfo(dtype)
        if info.min <= lo and hi <= info.max:
            return dtype
    return None


def encode_numbers(rows: Sequence[Any], nested: bool, found: Scan, out: Builder) -> Node | None:
    """Encodes the items of a list, or of the lists in it, as one run of numbers.

    Returns:
        None where the items are not all ints, all floats or all bools, or the ints have no common type.
    """
    count = found.items
    if not count:
        return encode_none(0)
    if found.flags == INT:
        if found.lo is None:
            return None
        if found.lo == found.hi:
            return {"kind": "const", "rows": count, "type": "int", "value": found.lo}
        dtype = int_type(found.lo, found.hi)
        if dtype is None:
            return None
        return {"kind": "ints", "rows": count, "type": dtype.name, "buffer": _place(rows, nested, count, dtype, out)}
    if found.flags == FLOAT:
        if _may_be_const(rows, nested):
            wide = _gather(rows, nested, count, _FLOATS[False])
            if (wide.view(np.int64) == wide[:1].view(np.int64)).all():
                return {"kind": "const", "rows": count, "type": "float", "value": wide[:1].tobytes().hex()}
        dtype = _FLOATS[found.fits_float32]
        return {"kind": "floats", "rows": count, "type": dtype.name, "buffer": _place(rows, nested, count, dtype, out)}
    if found.flags == BOOL:
        flat = _gather(rows, nested, count, _BOOL)
        if (flat == flat[0]).all():
            return {"kind": "const", "rows": count, "type": "bool", "value": bool(flat[0])}
        return {"kind": "bools", "rows": count, "buffer": pack_bits(flat, out)}
    return None


def _place(rows: Sequence[Any], nested: bool, count: int, dtype: np.dtype, out: Builder) -> int:
    """A buffer that the numbers are converted into at its place."""
    return out.add(Chunk(count * dtype.itemsize, rows, write=lambda to: python_lists.numbers_into(rows, nested, to, count, dtype)))


def _gather(rows: Sequence[Any], nested: bool, count: int, dtype: np.dtype) -> np.ndarray:
    array = np.empty(count, dtype)
    python_lists.numbers_into(rows, nested, array.ctypes.data, count, dtype)
    return array


def _may_be_const(rows: Sequence[Any], nested: bool) -> bool:
    """Whether the first and the last item agree: looking at all of them costs a copy."""
    if nested:
        first, last = next(row[0] for row in rows if row), next(row[-1] for row in reversed(rows) if row)
    else:
        first, last = rows[0], rows[-1]
    return struct.pack("<d", first) == struct.pack("<d", last)


def pack_bits(flat: np.ndarray, out: Builder) -> int:
    """A buffer of bits from bools (rows,)."""
    return out.add(np.packbits(flat, bitorder="little"))


def encode_positions(positions: np.ndarray, out: Builder) -> Node:
    """Encodes int64 positions (rows,), all >= 0, as ints or one const int."""
    count = len(positions)
    if not count:
        return encode_none(0)
    highest = int(positions.max())
    if highest == positions.min():
        return {"kind": "const", "rows": count, "type": "int", "value": highest}
    dtype = narrow(highest)
    return {"kind": "ints", "rows": count, "type": dtype.name, "buffer": out.add(positions.astype(dtype))}


def numbers(node: Node, runs: Runs) -> Steps[np.ndarray]:
    """The selected items of a node of one of the `NUMBERS` kinds as an array: bool, int64 or uint64 if const, else of the stored type.

    The caller has checked that the node has such positions.
    """
    kind = node["kind"]
    if kind == "bools":
        return (yield from bits(natural(node, "buffer"), runs))
    if kind == "const":
        value = _const_value(node)
        if type(value) is int:
            return np.full(runs.total, value, np.int64 if value < 1 << 63 else np.uint64)
        return np.full(runs.total, value, bool if type(value) is bool else np.float64)
    dtype = number_type(node, "type", "iu" if kind == "ints" else "f")
    return (yield from items(natural(node, "buffer"), runs, dtype))


NUMBERS = frozenset({"ints", "floats", "bools"})


@decoder("ints")
@decoder("floats")
@decoder("bools")
def _decode_numbers(node: Node, runs: Runs) -> Steps[list[Any]]:
    return python_lists.numbers_from((yield from numbers(node, runs)), None, False)


@decoder("const")
def _decode_const(node: Node, runs: Runs) -> Steps[list[Any]]:
    value = _const_value(node)
    if value != value:  # a NaN equals itself only as the same object, which would make one key of two in a dict
        return np.full(runs.total, value).tolist()
    return [value] * runs.total
    yield


def _const_value(node: Node) -> Any:
    kind, value = node.get("type"), node.get("value")
    if (kind == "bool" and type(value) is bool) or (kind == "int" and type(value) is int and -(1 << 63) <= value < 1 << 64):
        return value
    try:
        if kind == "float":
            return struct.unpack("<d", bytes.fromhex(value))[0]
        if kind == "str":
            return base64.b64decode(value, validate=True).decode("utf-8", "surrogatepass")
        if kind == "bytes":
            return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, struct.error, binascii.Error) as error:
        raise corrupt(f"{value!r} is no {kind}") from error
    raise corrupt(f"{value!r} is no {kind!r} of a const node")


# Text and bytes


def encode_text(values: list[str], out: Builder) -> Node:
    joined = "".join(values)
    data = joined.encode("utf-8", "surrogatepass")
    if len(data) == len(joined):  # ASCII
        return _encode_strings(values, data, map(len, values), "text", "str", out)
    sizes = [len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass")) for value in values]
    return _encode_strings(values, data, sizes, "text", "str", out)


def encode_bytes(values: list[bytes], out: Builder) -> Node:
    return _encode_strings(values, b"".join(values), map(len, values), "bytes", "bytes", out)


def _encode_strings(values: list[Any], data: bytes, sizes: Any, kind: str, type_name: str, out: Builder) -> Node:
    rows = len(values)
    distinct = dict.fromkeys(values)
    if len(distinct) == 1 and len(data) <= _LARGEST_CONST * rows:
        value = base64.b64encode(data[: len(data) // rows]).decode()
        return {"kind": "const", "rows": rows, "type": type_name, "value": value}
    counts = np.fromiter(sizes, np.int64, rows)
    if len(distinct) <= rows // 2:
        for number, value in enumerate(distinct):
            distinct[value] = number
        index = np.fromiter(map(distinct.__getitem__, values), np.int64, rows)
        first = np.unique(index, return_index=True)[1]
        saved = len(data) - int(counts[first].sum()) - rows * narrow(len(distinct)).itemsize
        if saved > 0:
            encode = encode_text if kind == "text" else encode_bytes
            return {"kind": "dictionary", "rows": rows, "index": encode_positions(index, out), "values": encode(list(distinct), out)}
    return {"kind": kind, "rows": rows, **lengths(counts, out), "buffer": out.add(np.frombuffer(data, np.uint8))}


@decoder("text")
def _decode_text(node: Node, runs: Runs) -> Steps[list[str]]:
    got, bounds = yield from pieces(node, runs)
    data = got.tobytes()
    try:
        if data.isascii():
            text = data.decode("ascii")
            return [text[a:b] for a, b in pairwise(bounds)]
        return [data[a:b].decode("utf-8", "surrogatepass") for a, b in pairwise(bounds)]
    except UnicodeDecodeError as error:
        raise corrupt(f"text is no UTF-8: {error}") from error


@decoder("bytes")
def _decode_bytes(node: Node, runs: Runs) -> Steps[list[bytes]]:
    got, bounds = yield from pieces(node, runs)
    data = got.tobytes()
    return [data[a:b] for a, b in pairwise(bounds)]


# NumPy scalars


def numpy_type(name: Any) -> np.dtype:
    """The dtype of stored NumPy values.

    Raises:
        CorruptBlockError: The name is none of such a dtype.
    """
    try:
        dtype = np.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError) as error:
        raise corrupt(f"{name!r} is no dtype") from error
    if dtype is None or dtype.kind not in "biufcmMSU":
        raise corrupt(f"{name!r} is no dtype of stored values")
    return dtype


def encode_numpy(values: list[np.generic], dtype: np.dtype, out: Builder) -> Node:
    """Encodes NumPy scalars, all of that dtype; their bytes are taken as they are."""
    data = b"".join([value.tobytes() for value in values])
    return {"kind": "numpy", "rows": len(values), "dtype": dtype.str, "buffer": out.add(np.frombuffer(data, np.uint8))}


@decoder("numpy")
def _decode_numpy(node: Node, runs: Runs) -> Steps[list[np.generic]]:
    dtype = numpy_type(node.get("dtype"))
    if dtype.kind not in "biufcmM":
        raise corrupt(f"{dtype} is no dtype of stored scalars")
    return list((yield from items(natural(node, "buffer"), runs, dtype)))
