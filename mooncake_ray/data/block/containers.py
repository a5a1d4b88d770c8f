"""Rows that are lists, tuples or dicts.

list, tuple  see `node.spans`; `child` holds the items of all rows, one row after the other
record       lists or tuples (`of`) of one length with items of several kinds; a child a place, each with a row a list
struct       dicts with the same `keys` (a node) in the same order; a child a key, likewise
map          any dicts: lists of keys and values, side by side
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from mooncake_ray._native import dicts
from mooncake_ray.data.block import python_lists, scalars
from mooncake_ray.data.block.chunk import Builder
from mooncake_ray.data.block.indirect import encode_union
from mooncake_ray.data.block.node import Node, check_within, corrupt, decode, decoder, lengths, natural, spans
from mooncake_ray.data.block.python_lists import BOOL, BYTES, FLOAT, INT, NONE, STR
from mooncake_ray.data.block.read import Runs, Steps, together

__all__ = ["encode_dicts", "encode_lists"]

Encode = Callable[[list[Any]], Node]

_PLAIN_KEYS = BOOL | BYTES | INT | NONE | STR  # equal keys of one of these types are the same bit for bit
_FEW_KEYS = 16
_ROWS_A_CHILD = 4  # a child of a struct costs some hundred bytes of index
_MOST_GROUPS = 32


def encode_lists(values: list[Any], kind: str, inner: Encode, out: Builder) -> Node:
    """Encodes exact lists, or exact tuples. `inner` encodes the items."""
    found = python_lists.scan(values, True)
    width = len(values[0])
    if _is_mixed(found.flags) and width * _ROWS_A_CHILD <= len(values) and (found.lengths == width).all():
        children = [inner(list(map(itemgetter(place), values))) for place in range(width)]
        return {"kind": "record", "rows": len(values), "of": kind, "children": children}
    fields = {"kind": kind, "rows": len(values), **lengths(found.lengths, out)}
    child = None
    if not found.flags & ~(BOOL | FLOAT | INT):
        child = scalars.encode_numbers(values, True, found, out)
    return {**fields, "child": inner(list(chain.from_iterable(values))) if child is None else child}


def _is_mixed(flags: int) -> bool:
    """Whether items are of more than one kind, None apart."""
    flags &= ~NONE
    return flags & (flags - 1) != 0


@decoder("record")
def _decode_records(node: Node, runs: Runs) -> Steps[list[Any]]:
    children, rows = node.get("children"), natural(node, "rows")
    if not isinstance(children, list) or not children or node.get("of") not in ("list", "tuple"):
        raise corrupt("a record node has no children, or is of neither lists nor tuples")
    columns = yield from together([decode(_child({"child": child}, "child", rows), runs) for child in children])
    records = zip(*columns, strict=True)
    return list(records if node["of"] == "tuple" else map(list, records))


@decoder("list")
@decoder("tuple")
def _decode_lists(node: Node, runs: Runs) -> Steps[list[Any]]:
    as_tuple = node["kind"] == "tuple"
    inner, edges = yield from spans(node, runs)
    child = _child(node, "child", natural(node, "total"))
    if child["kind"] in scalars.NUMBERS:
        check_within(inner, child["rows"], child["kind"])
        return python_lists.numbers_from((yield from scalars.numbers(child, inner)), edges, as_tuple)
    flat = yield from decode(child, inner)
    if child["kind"] in ("const", "none") and flat and flat[0] is flat[-1]:
        one = tuple(flat[:1]) if as_tuple else flat[:1]
        return [one * count for count in np.diff(edges).tolist()]
    bounds = edges.tolist()
    if as_tuple:
        return [tuple(flat[a:b]) for a, b in pairwise(bounds)]
    return [flat[a:b] for a, b in pairwise(bounds)]


def _child(node: Node, name: str, rows: int) -> Node:
    """A field that is a node of so many rows."""
    child = node.get(name)
    if not isinstance(child, dict) or natural(child, "rows") != rows or not isinstance(child.get("kind"), str):
        raise corrupt(f"{name!r} of a {node.get('kind')} node is no node of {rows} rows")
    return child


def encode_dicts(values: list[dict[Any, Any]], inner: Encode, out: Builder) -> Node:
    """Encodes exact dicts: structs, a union of a few kinds of structs, or a map. `inner` encodes their keys and values."""
    rows = len(values)
    if len(values[0]) <= max(_FEW_KEYS, rows // _ROWS_A_CHILD) and (parts := dicts.columns(values)):
        return _encode_struct(rows, *parts, inner)
    groups, tags = _groups(values)
    if groups and sum(map(len, groups)) * _ROWS_A_CHILD <= rows:
        return encode_union(values, tags, [lambda group: _encode_struct(len(group), *dicts.columns(group), inner)] * len(groups), out)
    counts = np.fromiter(map(len, values), np.int64, len(values))
    fields = {"kind": "map", "rows": len(values), **lengths(counts, out)}
    fields["keys"] = inner(list(chain.from_iterable(values)))
    fields["values"] = inner(list(chain.from_iterable(map(dict.values, values))))
    return fields


def _groups(values: list[dict[Any, Any]]) -> tuple[list[tuple[Any, ...]], np.ndarray]:
    """The keys of dicts, and which of them each has (uint8); no keys where there are too many, or equal ones need not be the same."""
    if python_lists.kinds(list(chain.from_iterable(values))) & ~_PLAIN_KEYS:
        return [], np.empty(0, np.uint8)
    signatures = [(*value, *map(type, value)) for value in values]  # True equals 1
    groups = {signature: number for number, signature in enumerate(dict.fromkeys(signatures))}
    if len(groups) > _MOST_GROUPS:
        return [], np.empty(0, np.uint8)
    return list(groups), np.fromiter(map(groups.__getitem__, signatures), np.uint8, len(values))


def _encode_struct(rows: int, keys: list[Any], columns: list[list[Any]], inner: Encode) -> Node:
    return {"kind": "struct", "rows": rows, "keys": inner(keys), "children": [inner(column) for column in columns]}


@decoder("struct")
def _decode_structs(node: Node, runs: Runs) -> Steps[list[dict[Any, Any]]]:
    children = node.get("children")
    if not isinstance(children, list):
        raise corrupt("a struct node has no children")
    rows = natural(node, "rows")
    names = _child(node, "keys", len(children))
    parts = [decode(names, Runs.span(0, len(children)))]
    parts += [decode(_child({"child": child}, "child", rows), runs) for child in children]
    keys, *columns = yield from together(parts)
    _dict(keys, keys)
    return dicts.dicts(keys, columns, runs.total)


@decoder("map")
def _decode_maps(node: Node, runs: Runs) -> Steps[list[dict[Any, Any]]]:
    inner, edges = yield from spans(node, runs)
    total = natural(node, "total")
    keys, values = yield from together([decode(_child(node, name, total), inner) for name in ("keys", "values")])
    bounds = edges.tolist()
    return [_dict(keys[a:b], values[a:b]) for a, b in pairwise(bounds)]


def _dict(keys: list[Any], values: Any) -> dict[Any, Any]:
    try:
        made = dict(zip(keys, values, strict=True))
    except TypeError as error:
        raise corrupt(f"a key of a dict is not hashable: {error}") from error
    if len(made) != len(keys):
        raise corrupt(f"a dict has {len(keys)} keys, and only {len(made)} different ones")
    return made
