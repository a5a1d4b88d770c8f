"""`Ragged` columns as nodes of a block.

The row lengths of the outer level are those of a family, in the block's head. Where rows are lists of rows the inner lengths are a buffer of
offsets, read before the values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from mooncake_ray.data.block import decode as decoding
from mooncake_ray.data.block import fill
from mooncake_ray.data.block.chunk import Builder
from mooncake_ray.data.block.columns import ColumnEncoder
from mooncake_ray.data.block.index import Field, Index
from mooncake_ray.data.block.node import bits, lengths, spans
from mooncake_ray.data.block.plain import Plain, plain_tensor
from mooncake_ray.data.block.read import Runs, Steps, offsets_of, together
from mooncake_ray.data.ragged import Ragged

__all__ = ["decode", "encode", "rebuilt"]


def encode(name: str, column: Ragged, encoder: ColumnEncoder) -> dict[str, Any] | None:
    """The node of a column, or None where its values are nothing a block can hold."""
    marks = _marks(column, encoder.out)
    if isinstance(column.values, Ragged):
        first, last = column.span
        child = _nested(column.values[first:last], encoder.out)
        node = None if child is None else {**encoder.lengths(column.offsets.numpy()), "fill": "nested", "child": child}
    else:
        plain = _flat(column.values)
        node = None if plain is None else encoder.ragged(name, plain, column.offsets.numpy())
    return node and {**node, **marks, "dim": column.ragged_dim}


def _flat(values: torch.Tensor) -> Plain | None:
    if values.device.type != "cpu" or values.requires_grad or type(values) is not torch.Tensor:
        return None
    return plain_tensor(values.contiguous())


def _marks(column: Ragged, out: Builder) -> dict[str, Any]:
    return {} if column.valid is None else {"valid": out.add(np.packbits(column.valid.numpy(), bitorder="little"))}


def _nested(column: Ragged, out: Builder) -> dict[str, Any] | None:
    """The node of rows that are items of other rows."""
    counts = np.diff(column.offsets.numpy())
    node = {"kind": "ragged", "rows": len(column), **lengths(counts, out), "dim": column.ragged_dim, **_marks(column, out)}
    if isinstance(column.values, Ragged):
        first, last = column.span
        child = _nested(column.values[first:last], out)
        return child and {**node, "fill": "nested", "child": child}
    plain = _flat(column.values)
    if plain is None:
        return None
    flat = Plain(plain.owner, plain.address, (len(column), 0, *plain.shape[1:]), 0, plain.dtype, plain.item)
    held = fill.Spans(flat, 0, len(column), column.offsets.numpy()[:-1], counts)
    return {**node, "dtype": plain.dtype, "tail": list(plain.shape[1:]), "fill": "values", **fill.encode_items(held, out)}


def decode(index: Index, field: Field, rows: Runs) -> Steps[Ragged]:
    """The selected rows."""
    node = field.node
    if node.get("fill") == "nested":
        offsets = index.family(node["family"]).offsets
        values, valid = yield from together([_decode_nested(node["child"], decoding.children(offsets, rows)), _valid(node, rows)])
        counts = np.diff(offsets)[rows.positions()]
        return Ragged(values, torch.from_numpy(offsets_of(counts)), valid, node["dim"])
    got, valid = yield from together([decoding.ragged(index, field, rows), _valid(node, rows)])
    return rebuilt(got, valid, node["dim"])


def _valid(node: dict[str, Any], rows: Runs) -> Steps[torch.Tensor | None]:
    """Which of the selected rows are not null; None where no row is."""
    return torch.from_numpy((yield from bits(node["valid"], rows)).copy()) if "valid" in node else None


def rebuilt(got: decoding.RaggedRows, valid: torch.Tensor | None = None, dim: int = 0) -> Ragged:
    """The same memory as a column."""
    return Ragged(got.values.tensor(), torch.from_numpy(got.offsets), valid, dim)


def _decode_nested(node: dict[str, Any], items: Runs) -> Steps[Ragged]:
    (inner, edges), valid = yield from together([spans(node, items), _valid(node, items)])
    if node["fill"] == "nested":
        values: Any = yield from _decode_nested(node["child"], inner)
    else:
        tail = tuple(node["tail"])
        per = math.prod(tail)
        numbers, wire = yield from fill.read_items(node, inner.scaled(per))
        count = int(edges[-1])
        values = decoding.Dense(decoding.widened(numbers, wire, node["dtype"], count * per), node["dtype"], (count, *tail)).tensor()
    return Ragged(values, torch.from_numpy(edges), valid, node["dim"])
