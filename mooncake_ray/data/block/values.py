"""Python values, a row each, as nodes: exact in types and bits, and column by column as far down as the values are alike.

Lists and tuples become one child of all their items, dicts with the same keys a child a key; so a column of lists of lists of dicts of ints
ends in some buffers of ints. Values of different types never meet in one buffer, and nothing is converted to another type. What is none
of the known types, or a subclass of one, is pickled.

What comes back are new values. Values that are one object in several rows (or in several places of the same kind within a row) are one object
again; a container that is at once in two places of different kinds is two. Arrays and tensors of one node are views of one memory, which any
of them keeps.
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
_MOST_NODES = 512  # of a column: each takes some hundred bytes of the block's index, and a few rows are not worth many
_FEW_NODES, _NODES_A_ROW = 32, 8
_MOST_GROUPS = 250  # of arrays in a column that differ in type or rank; tags of a union are bytes
_INT64, _UINT64 = 1 << 63, 1 << 64


class _TooDeep(Exception):
    """A value holds itself, or containers in containers in containers …"""


class _TooManyNodes(Exception):
    """The values are too little alike."""


def encode(values: list[Any], out: Builder) -> Node:
    """Encodes values, a row each. They must not change until the chunks are written.

    Raises:
        NotStorable: A value must be pickled by Ray itself.
        Exception: Whatever pickling a value raises.
    """
    before = len(out.chunks)
    try:
        return _Encoder(out, len(values)).encode(values)
    except (_TooDeep, _TooManyNodes) as error:
        del out.chunks[before:]
        too_deep = isinstance(error, _TooDeep)
    deep = np.ones(len(values), bool)
    if too_deep:
        heights: dict[int, int] = {}
        deep = np.fromiter((_height(value, heights, 0) > _DEEPEST for value in values), bool, len(values))
    if deep.all():
        return _Encoder(out, 0).encode_as("object", values)
    parts = [lambda flat: encode(flat, out), lambda deep: _Encoder(out, 0).encode_as("object", deep)]
    return indirect.encode_union(values, deep.astype(np.uint8), parts, out)


class _Encoder:
    """Encodes one column."""

    def __init__(self, out: Builder, rows: int) -> None:
        self.out = out
        self._left = min(_MOST_NODES, _FEW_NODES + _NODES_A_ROW * rows)
        self._by_kind: dict[str, Callable[[list[Any]], Node]] = {
            "none": lambda values: scalars.encode_none(len(values)),
            "bool": self._encode_numbers,
            "int": self._encode_numbers,
            "float": self._encode_numbers,
            "str": lambda values: scalars.encode_text(values, out),
            "bytes": lambda values: scalars.encode_bytes(values, out),
            "array": lambda values: self._encode_groups(values, arrays.array_group, arrays.encode_arrays),
            "tensor": lambda values: self._encode_groups(values, arrays.tensor_group, arrays.encode_tensors),
            "object": lambda values: encode_objects(values, out),
        }

    def encode(self, values: list[Any], depth: int = 0) -> Node:
        """Encodes values that are `depth` containers deep in the rows."""
        self._left -= 1
        if self._left < 0:
            raise _TooManyNodes
        if not values:
            return scalars.encode_none(0)
        flags = python_lists.kinds(values)
        if flags in _KINDS:
            return self.encode_as(_KINDS[flags], values, depth)
        if flags & NONE and not flags & ~_NULLABLE:
            return indirect.encode_nullable(values, _filler(values, flags), partial(self.encode, depth=depth), self.out)
        kinds = {kind: _kind_of(kind) for kind in set(map(type, values))}
        tag_of = {name: tag for tag, name in enumerate(dict.fromkeys(kinds.values()))}
        if len(tag_of) == 1:
            return self.encode_as(next(iter(tag_of)), values, depth)
        tags = {kind: tag_of[name] for kind, name in kinds.items()}
        numbers = np.frombuffer(bytes(map(tags.__getitem__, map(type, values))), np.uint8)
        return indirect.encode_union(values, numbers, [partial(self.encode_as, name, depth=depth) for name in tag_of], self.out)

    def encode_as(self, kind: Any, values: list[Any], depth: int = 0) -> Node:
        """Encodes values that are all of one kind: a name, or a type of NumPy scalars."""
        if isinstance(kind, type):
            return self._encode_scalars(values)
        inner = partial(self._encode_containers, kind, depth=depth) if kind in _CONTAINERS else self._by_kind[kind]
        if kind in _SHARED and (kind != "tuple" or _repeats(values)):
            return indirect.encode_shared(values, inner, self.out) or inner(values)
        return inner(values)

    def _encode_containers(self, kind: str, values: list[Any], depth: int) -> Node:
        if depth >= _DEEPEST:
            raise _TooDeep
        inner = partial(self.encode, depth=depth + 1)
        if kind == "dict":
            return containers.encode_dicts(values, inner, self.out)
        return containers.encode_lists(values, kind, inner, self.out)

    def _encode_numbers(self, values: list[Any]) -> Node:
        node = scalars.encode_numbers(values, False, python_lists.scan(values, False), self.out)
        return self._encode_wide_ints(values) if node is None else node

    def _encode_wide_ints(self, values: list[int]) -> Node:
        """Encodes ints that no one type holds: those from 2**63 on apart, and those that have no type at all pickled."""

        def part(mine: list[int]) -> Node:
            node = scalars.encode_numbers(mine, False, python_lists.scan(mine, False), self.out)
            return encode_objects(mine, self.out) if node is None else node

        numbers = [0 if -_INT64 <= value < _INT64 else 1 if 0 <= value < _UINT64 else 2 for value in values]
        present = sorted(set(numbers))
        if len(present) == 1:
            return part(values)
        tags = np.searchsorted(present, numbers).astype(np.uint8)
        return indirect.encode_union(values, tags, [part] * len(present), self.out)

    def _encode_scalars(self, values: list[np.generic]) -> Node:
        dtypes = {value.dtype for value in values}
        dtype = next(iter(dtypes))
        if len(dtypes) > 1 or not dtype.isnative or dtype.metadata:
            return encode_objects(values, self.out)
        return scalars.encode_numpy(values, dtype, self.out)

    def _encode_groups(self, values: list[Any], group: Callable[[Any], Any], encode_group: Callable[[list[Any], Builder], Node]) -> Node:
        """Encodes arrays or tensors: those with one dtype and number of dimensions together, and pickled what is not stored raw."""
        groups = list(map(group, values))
        found = list(dict.fromkeys(groups))
        if len(found) > _MOST_GROUPS:
            return encode_objects(values, self.out)
        encoders = [partial(encode_objects if key is None else encode_group, out=self.out) for key in found]
        if len(found) == 1:
            return encoders[0](values)
        number = {key: tag for tag, key in enumerate(found)}
        return indirect.encode_union(values, np.array([number[key] for key in groups], np.uint8), encoders, self.out)


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


def _repeats(values: list[tuple[Any, ...]]) -> bool:
    """Whether a tuple is there twice. Every empty tuple is the same one, and shared anyway."""
    filled = list(filter(None, values))
    return len(set(map(id, filled))) < len(filled)


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
_CONTAINERS = frozenset({"list", "tuple", "dict"})
_SHARED = _CONTAINERS | {"array", "tensor", "object"}
_NULLABLE = NONE | BOOL | INT | FLOAT | STR | BYTES | LIST | TUPLE
_SCALARS = frozenset(
    {np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.float16, np.float32, np.float64}
    | {np.complex64, np.complex128, np.datetime64, np.timedelta64, np.longlong, np.ulonglong, np.intc, np.uintc}
)
