"""What every kind of node needs: checked fields, checked reads, and rows of different lengths.

A node is JSON: `{"kind": …, "rows": …}` and what the kind needs. It was read from memory that anything may have happened to, so nothing in it
is believed: a field that is missing or out of range, and bytes that are not there, are a `CorruptBlockError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mooncake_ray.data.block.chunk import Builder
from mooncake_ray.data.block.read import Read, Runs, Steps, offsets_of
from mooncake_ray.errors import CorruptBlockError

__all__ = [
    "Decoder",
    "Node",
    "bits",
    "corrupt",
    "decode",
    "decoder",
    "items",
    "lengths",
    "narrow",
    "natural",
    "number_type",
    "pieces",
    "spans",
    "typed",
]

Node = dict[str, Any]
Decoder = Callable[[Node, Runs], Steps[list[Any]]]

_DECODERS: dict[str, Decoder] = {}
_MOST = 1 << 48  # no block has more rows, items or bytes, and a product of two such numbers is caught before it overflows
_UNSIGNED = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.uint64))
_NUMBERS = {
    name: np.dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64")
}


def decoder(kind: str) -> Callable[[Decoder], Decoder]:
    """Notes the function that decodes nodes of a kind."""

    def note(function: Decoder) -> Decoder:
        _DECODERS[kind] = function
        return function

    return note


def decode(node: Node, runs: Runs) -> Steps[list[Any]]:
    """The values at the selected positions, in order; a position selected twice gives two values.

    Values are new objects, except where the node says that several rows are one object.

    Raises:
        CorruptBlockError: The node or its buffers make no sense, or it has no such positions.
    """
    kind = node.get("kind") if isinstance(node, dict) else None
    function = _DECODERS.get(kind) if isinstance(kind, str) else None
    if function is None:
        raise corrupt(f"{kind!r} is no kind of node")
    check_within(runs, natural(node, "rows"), kind)
    return function(node, runs)


def check_within(runs: Runs, rows: int, kind: Any) -> None:
    """Whether all of the selected positions exist."""
    ends = runs.starts + runs.lengths
    if ends.size and (runs.starts.min() < 0 or runs.lengths.min() < 0 or ends.max() > rows):
        raise corrupt(f"positions {runs.starts.min()} … {ends.max() - 1} of a {kind} node are wanted, and it has {rows} rows")


def corrupt(what: str) -> CorruptBlockError:
    return CorruptBlockError(f"a stored batch is damaged: {what}")


def natural(node: Node, name: str) -> int:
    """A field that is a count, an offset or the number of a buffer."""
    value = node.get(name)
    if type(value) is not int or not 0 <= value < _MOST:
        raise corrupt(f"{name!r} of a {node.get('kind')} node is {value!r}, expected a number in [0, 2**48)")
    return value


def number_type(node: Node, name: str, kinds: str) -> np.dtype:
    """A field that names a number type of one of NumPy's `kinds` ("i", "u", "f")."""
    value = node.get(name)
    dtype = _NUMBERS.get(value) if isinstance(value, str) else None
    if dtype is None or dtype.kind not in kinds:
        raise corrupt(f"{name!r} of a {node.get('kind')} node is {value!r}, expected the name of a number type")
    return dtype


def narrow(highest: int) -> np.dtype:
    """The narrowest unsigned type that holds 0 … highest."""
    return next(dtype for dtype in _UNSIGNED if highest < 1 << (8 * dtype.itemsize))


def typed(data: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
    """Fetched bytes (uint8) as `count` items: a view.

    Raises:
        CorruptBlockError: There are more or fewer bytes.
    """
    if data.size != count * dtype.itemsize:
        raise corrupt(f"{data.size} bytes where {count} items of {dtype.itemsize} bytes were to be")
    return data.view(dtype)


def items(buffer: int, runs: Runs, dtype: np.dtype) -> Steps[np.ndarray]:
    """The items at the selected positions, (total,)."""
    (data,) = yield [Read.items(buffer, runs, dtype.itemsize)]
    return typed(data, dtype, runs.total)


def bits(buffer: int, runs: Runs) -> Steps[np.ndarray]:
    """The bits at the selected positions, bool (total,)."""
    first, skip = runs.starts >> 3, runs.starts & 7
    lengths = np.where(runs.lengths > 0, (skip + runs.lengths + 7) >> 3, 0)
    (data,) = yield [Read(buffer, Runs(first, lengths))]
    flat = np.unpackbits(typed(data, np.dtype(np.uint8), int(lengths.sum())), bitorder="little").view(bool)
    if runs.one:
        return flat[skip[0] : skip[0] + runs.lengths[0]]
    return flat[Runs((np.cumsum(lengths) - lengths) * 8 + skip, runs.lengths).positions()]


def lengths(counts: np.ndarray, out: Builder) -> Node:
    """Fields that say how many items each row has: one `length`, or `offsets` (rows + 1 of them).

    Args:
        counts: Items of each row, int64 (rows,).
    """
    if counts.size and (counts == counts[0]).all():
        return {"length": int(counts[0]), "total": int(counts[0]) * counts.size}
    offsets = offsets_of(counts)
    total = int(offsets[-1])
    dtype = narrow(total)
    return {"offsets": out.add(offsets.astype(dtype)), "offset_type": dtype.name, "total": total}


def spans(node: Node, runs: Runs) -> Steps[tuple[Runs, np.ndarray]]:
    """Where the items of the selected rows are.

    Returns:
        The runs of items, one for each run of rows; and, when they are fetched as one array, where in it each row begins and the last ends:
        int64 (selected rows + 1,).
    """
    rows, total = natural(node, "rows"), natural(node, "total")
    if "length" in node:
        length = natural(node, "length")
        if rows * length != total:
            raise corrupt(f"{rows} rows of {length} items are {rows * length} items, not {total}")
        return runs.scaled(length), np.arange(runs.total + 1) * length
    dtype = number_type(node, "offset_type", "u")
    # A run of n rows has n + 1 offsets; between the last of one run and the first of the next there is no row.
    edges = (yield from items(natural(node, "offsets"), Runs(runs.starts, runs.lengths + 1), dtype)).astype(np.int64)
    counts = np.diff(edges)
    last = np.cumsum(runs.lengths + 1) - 1
    starts, ends = edges[last - runs.lengths], edges[last]
    if len(last) > 1:
        counts = np.delete(counts, last[:-1])
    if edges.min() < 0 or edges.max() > total or (counts.size and counts.min() < 0):
        raise corrupt(f"offsets of a {node.get('kind')} node fall, or lie outside of its {total} items")
    local = offsets_of(counts)
    return Runs(starts, ends - starts), local


def pieces(node: Node, runs: Runs) -> Steps[tuple[np.ndarray, list[int]]]:
    """The selected rows of a node whose rows are bytes in its `buffer`: uint8 (bytes,), and where in it each row begins and the last ends."""
    inner, edges = yield from spans(node, runs)
    (data,) = yield [Read(natural(node, "buffer"), inner)]
    return typed(data, np.dtype(np.uint8), inner.total), edges.tolist()
