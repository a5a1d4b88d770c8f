"""Python values, a row each, as nodes: exact in types and bits, and column by column as far down as the values are alike.

Lists and tuples become one child of all their items, dicts with the same keys a child a key; so a column of lists of lists of dicts of ints
ends in some buffers of ints. Values of different types never meet in one buffer, and nothing is converted to another type. What is none
of the known types, or a subclass of one, is pickled.

What comes back are new values. Values that are one object in several rows (or in several places of the same kind within a row) are one object
again; a container that is at once in two places of different kinds is two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from mooncake_ray.data.block import arrays, containers, indirect, python_lists, scalars
from mooncake_ray.data.block.chunk import Builder
from mooncake_ray.data.block.node import Node, decode
from mooncake_ray.data.block.objects import NotStorable, encode_objects
from mooncake_ray.data.block.python_lists import BOOL, BYTES, DICT, FLOAT, INT, LIST, NONE, STR, TUPLE

__all__ = ["NotStorable", "decode", "encode"]

_DEEPEST = 32  # containers in containers
_MOST_GROUPS = 250  # of arrays in a column that differ in type or rank; tags of a union are bytes
_INT64, _UINT64 = 1 << 63, 1 << 64


class _TooDeep(Exception):
    """A value holds itself, or containers in containers in containers …"""


def encode(values: list[Any], out: Builder) -> Node:
    """Encodes values, a row each. They must not change until the chunks are written.

    Raises:
        NotStorable: A value must be pickled by Ray itself.
        Exception: Whatever pickling a value raises.
    """
    before = len(out.chunks)
    try:
        return _encode(values, out, 0)
    except _TooDeep:
        del out.chunks[before:]
    heights: dict[int, int] = {}
    deep = np.fromiter((_height(value, heights, 0) > _DEEPEST for value in values), bool, len(values))
    flat = partial(_encode, out=out, depth=0)
    pickled = partial(_encode_as, "object", out=out, depth=0)
    if deep.all():
        return pickled(values)
    return indirect.encode_union(values, deep.astype(np.uint8), [flat, pickled], out)


def _encode(values: list[Any], out: Builder, depth: int) -> Node:
    if not values:
        return scalars.encode_none(0)
    flags = python_lists.kinds(values)
    if flags in _KINDS:
        return _encode_as(_KINDS[flags], values, out, depth)
    if flags & NONE and not flags & ~_NULLABLE:
        filler = _filler(values, flags)
        return indirect.encode_nullable(values, filler, partial(_encode, out=out, depth=depth), out)
    kinds = {kind: _kind_of(kind) for kind in set(map(type, values))}
    tag_of = {kind: tag for tag, kind in enumerate(dict.fromkeys(kinds.values()))}
    if len(tag_of) == 1:
        return _encode_as(next(iter(tag_of)), values, out, depth)
    tags = {kind: tag_of[name] for kind, name in kinds.items()}
    numbers = np.frombuffer(bytes(map(tags.__getitem__, map(type, values))), np.uint8)
    return indirect.encode_union(values, numbers, [partial(_encode_as, kind, out=out, depth=depth) for kind in tag_of], out)


def _kind_of(kind: type) -> Any:
    """The name of a type's kind, or a type of NumPy scalars."""
    if kind in _BY_TYPE:
        return _BY_TYPE[kind]
    return kind if kind in _SCALARS else "object"


def _filler(values: list[Any], flags: int) -> Callable[[], Any]:
    """Makes what stands for a None: nothing, as far as the kind has it, else a value that is there, so that the others' range stays theirs."""
    if flags & LIST:
        return list
    if flags & TUPLE:
        return tuple
    if flags & STR:
        return str
    if flags & BYTES:
        return bytes
    some = next(value for value in values if value is not None)
    return lambda: some


def _encode_as(kind: Any, values: list[Any], out: Builder, depth: int) -> Node:
    """Encodes values that are all of one kind."""
    if isinstance(kind, type):
        return _encode_scalars(values, out)
    if kind in _SHARED:
        inner = partial(_encode_distinct, kind, out=out, depth=depth)
        if kind != "tuple" or all(values):  # there is one empty tuple
            return indirect.encode_shared(values, inner, out) or inner(values)
    return _encode_distinct(kind, values, out, depth)


def _encode_distinct(kind: str, values: list[Any], out: Builder, depth: int) -> Node:
    if kind == "none":
        return scalars.encode_none(len(values))
    if kind == "str":
        return scalars.encode_text(values, out)
    if kind == "bytes":
        return scalars.encode_bytes(values, out)
    if kind == "object":
        return encode_objects(values, out)
    if kind == "array":
        return _encode_groups(values, arrays.array_group, arrays.encode_arrays, out)
    if kind == "tensor":
        return _encode_groups(values, arrays.tensor_group, arrays.encode_tensors, out)
    if kind in ("bool", "int", "float"):
        node = scalars.encode_numbers(values, False, python_lists.scan(values, False), out)
        return _encode_wide_ints(values, out) if node is None else node
    if depth >= _DEEPEST:
        raise _TooDeep
    inner = partial(_encode, out=out, depth=depth + 1)
    if kind == "dict":
        return containers.encode_dicts(values, inner, out)
    return containers.encode_lists(values, kind, inner, out)


def _encode_wide_ints(values: list[int], out: Builder) -> Node:
    """Encodes ints that no one type holds: those from 2**63 on apart, and those that have no type at all pickled."""

    def part(mine: list[int]) -> Node:
        node = scalars.encode_numbers(mine, False, python_lists.scan(mine, False), out)
        return encode_objects(mine, out) if node is None else node

    numbers = [0 if -_INT64 <= value < _INT64 else 1 if 0 <= value < _UINT64 else 2 for value in values]
    present = sorted(set(numbers))
    if len(present) == 1:
        return part(values)
    tags = np.searchsorted(present, numbers).astype(np.uint8)
    return indirect.encode_union(values, tags, [part] * len(present), out)


def _encode_scalars(values: list[np.generic], out: Builder) -> Node:
    dtypes = {value.dtype for value in values}
    dtype = next(iter(dtypes))
    if len(dtypes) > 1 or not dtype.isnative or dtype.metadata:
        return encode_objects(values, out)
    return scalars.encode_numpy(values, dtype, out)


def _encode_groups(
    values: list[Any], group: Callable[[Any], Any], encode_group: Callable[[list[Any], Builder], Node], out: Builder
) -> Node:
    """Encodes arrays or tensors: those with one dtype and number of dimensions together, and pickled what is not stored raw."""
    groups = list(map(group, values))
    found = list(dict.fromkeys(groups))
    if len(found) > _MOST_GROUPS:
        return encode_objects(values, out)
    encoders = [partial(encode_objects if key is None else encode_group, out=out) for key in found]
    if len(found) == 1:
        return encoders[0](values)
    number = {key: tag for tag, key in enumerate(found)}
    return indirect.encode_union(values, np.array([number[key] for key in groups], np.uint8), encoders, out)


def _height(value: Any, heights: dict[int, int], level: int) -> int:
    """How many containers are in each other, or more than the deepest if there is no end."""
    kind = type(value)
    if kind is not list and kind is not tuple and kind is not dict:
        return 0
    if id(value) in heights:
        return heights[id(value)]
    heights[id(value)] = _DEEPEST + 1  # until it is known: who meets it on the way down is in a cycle
    if level > _DEEPEST:
        return _DEEPEST + 1
    inside = [*value, *value.values()] if kind is dict else value
    heights[id(value)] = height = 1 + max((_height(item, heights, level + 1) for item in inside), default=0)
    return height


_KINDS = {NONE: "none", BOOL: "bool", INT: "int", FLOAT: "float", STR: "str", BYTES: "bytes", LIST: "list", TUPLE: "tuple", DICT: "dict"}
_BY_TYPE = {kind: kind.__name__ for kind in (bool, int, float, str, bytes, list, tuple, dict)}
_BY_TYPE |= {type(None): "none", np.ndarray: "array", torch.Tensor: "tensor"}
_SHARED = frozenset({"list", "tuple", "dict", "array", "tensor", "object"})
_NULLABLE = NONE | BOOL | INT | FLOAT | STR | BYTES | LIST | TUPLE
_SCALARS = frozenset(
    {np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.float16, np.float32, np.float64}
    | {np.complex64, np.complex128, np.datetime64, np.timedelta64, np.longlong, np.ulonglong, np.intc, np.uintc}
)
