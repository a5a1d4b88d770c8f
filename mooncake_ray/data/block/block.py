"""A batch's columns to a block, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mooncake_ray.data.block import decode, layout, number_lists, ragged_columns, values
from mooncake_ray.data.block.chunk import Builder, Chunk
from mooncake_ray.data.block.columns import ColumnEncoder
from mooncake_ray.data.block.index import Field, Index, dump
from mooncake_ray.data.block.plain import Plain, plain_array, plain_tensor
from mooncake_ray.data.block.read import Runs, Steps
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.errors import CorruptBlockError

__all__ = ["Encoded", "column", "encode"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A block to be written: nothing is copied yet. The columns must not change until it is."""

    layout: layout.Layout
    index: bytes
    chunks: list[Chunk]
    left: dict[str, Any]
    """Columns that no block can hold: on devices, sparse, with refs of Ray's in them, …"""

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def copies(self) -> list[tuple[int, int, int]]:
        """`(offset, address, nbytes)` of what is copied as it is."""
        return layout.copies(self.layout, self.chunks)

    def write(self, memory: np.ndarray) -> None:
        """Writes the rest into the block's bytes: uint8 (nbytes,)."""
        layout.write(self.layout, self.index, self.chunks, memory)


def encode(rows: int, batch: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, checksums: bool = False) -> Encoded:
    """Plans the block of a batch: looks at every column, copies none.

    Args:
        rows: of every column.
        batch: dense tensors (rows, …) and `Ragged`.
        arrays: NumPy arrays (rows, …).
        checksums: a CRC-32 for every buffer.
    """
    out = Builder()
    encoder = ColumnEncoder(rows, out)
    grids, forms, left = _sorted(batch, arrays)
    nodes = encoder.dense(grids)
    for name, column in sorted(batch.items(), key=_items, reverse=True):  # parts after what they are parts of
        if isinstance(column, Ragged):
            with out.column(name):
                node = ragged_columns.encode(name, column, encoder)
            if node is None:
                left[name] = column
            else:
                nodes[name], forms[name] = node, "ragged"
    for name, column in arrays.items():
        if name not in nodes and name not in left:
            try:
                with out.column(name):
                    nodes[name], forms[name] = {"kind": "values", "tree": values.encode(column.tolist(), out)}, "objects"
            except values.NotStorable:
                left[name] = column
    fields = {name: Field(name, forms[name], nodes[name], out.ranges[name]) for name in (*batch, *arrays) if name in nodes}
    head = Builder()
    families = encoder.families.nodes({node["family"] for node in nodes.values() if "family" in node}, head.add)
    chunks = [*head.chunks, *out.chunks]
    sizes = [chunk.nbytes for chunk in chunks]
    index = dump(rows, fields, families, sizes)
    return Encoded(layout.layout_of(len(index), sizes, len(head.chunks), checksums), index, chunks, left)


def _sorted(batch: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Plain], dict[str, str], dict[str, Any]]:
    """The columns that are plain memory, and what each of them is; and those that no block can hold."""
    grids: dict[str, Plain] = {}
    forms: dict[str, str] = {}
    left: dict[str, Any] = {}
    for name, column in batch.items():
        if not isinstance(column, Ragged):
            plain = None if column.requires_grad or type(column) is not torch.Tensor else plain_tensor(column)
            if plain is None:
                left[name] = column
            else:
                grids[name], forms[name] = plain, "tensor"
    for name, array in arrays.items():
        plain = plain_array(array)
        if plain is not None:
            grids[name], forms[name] = plain, "array"
        elif array.dtype != object or array.ndim != 1 or type(array) is not np.ndarray:
            left[name] = array
    return grids, forms, left


def _items(entry: tuple[str, Any]) -> int:
    """How many items a ragged column has."""
    return entry[1].span[1] - entry[1].span[0] if isinstance(entry[1], Ragged) else 0


def column(index: Index, name: str, rows: Runs, form: str = "as-put") -> Steps[Any]:
    """The selected rows of a column, as it was (`as-put`), or as a `Ragged` where it has row lengths or is lists of numbers (`ragged`).

    Raises:
        CorruptBlockError: the index or the bytes contradict themselves. Names the column.
    """
    try:
        return (yield from _column(index, index.fields[name], rows, form))
    except CorruptBlockError as e:
        raise CorruptBlockError(f"field {name!r} of the stored batch: {e}") from None
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, RuntimeError) as e:
        raise CorruptBlockError(f"field {name!r} of the stored batch cannot be decoded: {type(e).__name__}: {e}") from e


def _column(index: Index, field: Field, rows: Runs, form: str) -> Steps[Any]:
    if field.form == "objects":
        if form == "ragged" and number_lists.dtype_of(field.node["tree"]) is not None:
            return (yield from number_lists.rows_of(field.node["tree"], rows))
        return np.fromiter((yield from values.decode(field.node["tree"], rows)), object, rows.total)
    if field.form == "ragged":
        return (yield from ragged_columns.decode(index, field, rows))
    if form == "ragged" and index.has_lengths(field.name):
        return ragged_columns.rebuilt((yield from decode.ragged(index, field, rows)))
    got = yield from decode.dense(index, field, rows)
    if field.form == "array":
        return got.data.view(np.dtype(got.dtype)).reshape(got.shape)
    return got.tensor()
