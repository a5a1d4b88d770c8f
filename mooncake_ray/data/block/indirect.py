"""Nodes that say where a row's value is.

nullable            `valid`, a bit a row; `child` has some value where a row is None
union               `tags` say which child has the row, `index` (a node of ints) where in it: no row is converted to another's type
shared, dictionary  `index` of each row in `values`: rows that are one object, or equal text
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress, repeat
from operator import is_not
from typing import Any

import numpy as np

from mooncake_ray.data.block.chunk import Builder
from mooncake_ray.data.block.node import Node, bits, check_within, corrupt, decode, decoder, items, natural
from mooncake_ray.data.block.read import Runs, Steps, together
from mooncake_ray.data.block.scalars import encode_positions, numbers, pack_bits

__all__ = ["encode_nullable", "encode_shared", "encode_union"]

Encode = Callable[[list[Any]], Node]

_MOST_CHILDREN = 256
_POSITIONS = [["const", "int"], *(["ints", name] for name in ("uint8", "uint16", "uint32", "uint64"))]


def encode_nullable(values: list[Any], fillers: Callable[[], Any], inner: Encode, out: Builder) -> Node:
    """Encodes values of which some are None; `fillers` makes what stands for a None."""
    valid = np.fromiter(map(is_not, values, repeat(None)), bool, len(values))
    filled = [fillers() if value is None else value for value in values]
    return {"kind": "nullable", "rows": len(values), "valid": pack_bits(valid, out), "child": inner(filled)}


@decoder("nullable")
def _decode_nullable(node: Node, runs: Runs) -> Steps[list[Any]]:
    parts = [bits(natural(node, "valid"), runs), decode(node.get("child"), runs)]
    valid, values = yield from together(parts)
    for row in np.flatnonzero(~valid).tolist():
        values[row] = None
    return values


def encode_union(values: list[Any], tags: np.ndarray, encoders: list[Encode], out: Builder) -> Node:
    """Encodes values of several kinds, each kind by its own encoder; `tags` uint8 (rows,) number them."""
    index = np.empty(len(values), np.int64)
    children = []
    for tag, encode in enumerate(encoders):
        mine = tags == tag
        index[mine] = np.arange(np.count_nonzero(mine))
        children.append(encode(list(compress(values, mine.tolist()))))
    return {"kind": "union", "rows": len(values), "tags": out.add(tags), "index": encode_positions(index, out), "children": children}


@decoder("union")
def _decode_union(node: Node, runs: Runs) -> Steps[list[Any]]:
    children = node.get("children")
    if not isinstance(children, list) or not 0 < len(children) <= _MOST_CHILDREN:
        raise corrupt("a union node has no children, or too many")
    tags, index = yield from together([items(natural(node, "tags"), runs, np.dtype(np.uint8)), _positions(node, runs)])
    if tags.size and tags.max() >= len(children):
        raise corrupt(f"a row of a union node is in child {tags.max()} of {len(children)}")
    rows = [np.flatnonzero(tags == tag) for tag in range(len(children))]
    some = [(child, mine) for child, mine in zip(children, rows, strict=True) if mine.size]
    values: list[Any] = [None] * runs.total
    parts = yield from together([decode(child, Runs.of(index[mine])) for child, mine in some])
    for (_, mine), part in zip(some, parts, strict=True):
        for row, value in zip(mine.tolist(), part, strict=True):
            values[row] = value
    return values


def encode_shared(values: list[Any], inner: Encode, out: Builder) -> Node | None:
    """Encodes values of which some are one object, so that they are one object again; None if all are different."""
    ids = list(map(id, values))
    distinct = dict(zip(ids, values, strict=True))
    if len(distinct) == len(ids):
        return None
    place = dict(zip(distinct, range(len(distinct)), strict=True))
    places = np.fromiter(map(place.__getitem__, ids), np.int64, len(ids))
    node = {"kind": "shared", "rows": len(values), "index": encode_positions(places, out)}
    return {**node, "values": inner(list(distinct.values()))}


@decoder("shared")
@decoder("dictionary")
def _decode_shared(node: Node, runs: Runs) -> Steps[list[Any]]:
    index = yield from _positions(node, runs)
    wanted, places = np.unique(index, return_inverse=True)
    values = yield from decode(node.get("values"), Runs.of(wanted))
    return [values[place] for place in places.tolist()]


def _positions(node: Node, runs: Runs) -> Steps[np.ndarray]:
    """The selected entries of the field `index`, int64."""
    index = node.get("index")
    if not isinstance(index, dict) or [index.get("kind"), index.get("type")] not in _POSITIONS:
        raise corrupt(f"the index of a {node['kind']} node is none")
    check_within(runs, natural(index, "rows"), node["kind"])
    return (yield from numbers(index, runs)).astype(np.int64)
