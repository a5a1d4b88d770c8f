"""What a block holds: its rows, its families of lengths, and a node a column."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mooncake_ray.data.block import layout
from mooncake_ray.data.block.families import Family
from mooncake_ray.errors import CorruptBlockError

__all__ = ["Field", "Index", "dump", "parse"]

_KINDS = ("dense", "const", "part", "padded", "ragged", "values")


@dataclass(frozen=True, slots=True)
class Field:
    """One column as it is stored."""

    name: str
    form: str
    """What it was: `tensor`, `ragged`, `array` (numbers) or `objects` (an array of objects)."""
    node: dict[str, Any]
    buffers: tuple[int, int]
    """The first of its buffers, and the one after its last."""

    @property
    def dtype(self) -> str:
        """Of its numbers; `object` for other values."""
        node = self.node
        while "child" in node:
            node = node["child"]
        return str(node.get("dtype", "object"))

    @property
    def row_shape(self) -> tuple[int | None, ...]:
        """Shape of a row, None for a ragged dimension."""
        node, levels = self.node, 0
        if node["kind"] != "ragged":
            return tuple(node.get("shape", ()))
        while "child" in node:
            node, levels = node["child"], levels + 1
        shape: list[int | None] = list(node["tail"])
        shape.insert(node["dim"], None)
        return (*(None,) * levels, *shape)


@dataclass(frozen=True)
class Index:
    """Parsed from the head of a block. Immutable, thread-safe."""

    rows: int
    fields: Mapping[str, Field]
    layout: layout.Layout
    head: bytes
    _families: list[dict[str, Any]]

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def span_of(self, buffer: int) -> tuple[int, int]:
        """Offset and bytes of a buffer that a node names.

        Raises:
            CorruptBlockError: there is no such buffer.
        """
        number = buffer + self.layout.head_buffers
        if not self.layout.head_buffers <= number < len(self.layout.sizes):
            raise CorruptBlockError(f"the batch's index names buffer {buffer}, it has {len(self.layout.sizes) - self.layout.head_buffers}")
        return self.layout.offsets[number], self.layout.sizes[number]

    def owner_of(self, buffer: int) -> str:
        """What a buffer belongs to, in words."""
        names = [field.name for field in self.fields.values() if field.buffers[0] <= buffer < field.buffers[1]]
        return f"field {names[0]!r}" if names else "the row lengths"

    @cached_property
    def _known(self) -> dict[int, Family]:
        return {}

    def family(self, number: int) -> Family:
        """The lengths of a family of columns. Read from the head: no bytes of the block are needed."""
        known = self._known.get(number)
        if known is None:
            known = self._known[number] = self._read_family(number)
        return known

    def _read_family(self, number: int) -> Family:
        if not 0 <= number < len(self._families) or not self._families[number]:
            raise CorruptBlockError(f"the batch's index names the length family {number}, it has {len(self._families)}")
        node = self._families[number]
        width = int(node["width"])
        if "of" in node:
            if not 0 <= node["of"] < number:
                raise CorruptBlockError(f"length family {number} is said to be part of family {node['of']}")
            whole = self.family(node["of"])
            return Family(whole.lengths, np.zeros(self.rows, np.int64), -1) if width < 0 else whole.cut(node["first"], width)
        family = Family(self._lengths(node["lengths"]), self._lengths(node["starts"]), width, bool(node.get("told", True)))
        if width >= 0 and (family.starts + family.lengths > width).any():
            row = int(np.flatnonzero(family.starts + family.lengths > width)[0])
            raise CorruptBlockError(f"length family {number}: row {row} reaches beyond its width of {width}")
        return family

    def _lengths(self, stored: int | list[Any]) -> np.ndarray:
        if isinstance(stored, int):
            return np.full(self.rows, stored, np.int64)
        dtype, buffer = np.dtype(stored[0]), stored[1]
        if not 0 <= buffer < self.layout.head_buffers or dtype.kind != "u":
            raise CorruptBlockError(f"the batch's index names buffer {buffer} of {dtype} for row lengths")
        at, nbytes = self.layout.offsets[buffer], self.layout.sizes[buffer]
        if nbytes != self.rows * dtype.itemsize:
            raise CorruptBlockError(f"row lengths have {nbytes} bytes, expected {self.rows} of {dtype.itemsize}")
        values = np.frombuffer(self.head, dtype, self.rows, at).astype(np.int64)
        if (values < 0).any():
            raise CorruptBlockError("a row length is beyond 2**63")
        return values

    def base(self, name: str) -> Field:
        """The column that a `part` is part of."""
        node = self.fields[name].node
        of = node.get("of")
        found = self.fields.get(of)
        if found is None or found.node["kind"] == "part" or "of" in found.node:
            raise CorruptBlockError(f"field {name!r} is said to be part of {of!r}, which holds no data of its own")
        return found

    def _told(self, name: str) -> Family | None:
        """The family that says how long a column's rows are, or those that it is part of; None unless a mask or its own form tells that."""
        node = self.fields[name].node
        number = (self.base(name).node if node["kind"] == "part" else node).get("family")
        family = None if number is None else self.family(number)
        return family if family is not None and family.told else None

    def has_lengths(self, name: str) -> bool:
        """Whether a column has row lengths."""
        return self._told(name) is not None

    def lengths(self, name: str) -> np.ndarray | None:
        """Row lengths of a column, int64 (rows,); None for one that has none."""
        family, node = self._told(name), self.fields[name].node
        if family is None or node["kind"] != "part":
            return None if family is None else family.lengths
        return family.cut(node["first"], node["shape"][0]).lengths


def dump(rows: int, fields: Mapping[str, Field], families: list[dict[str, Any]], sizes: list[int]) -> bytes:
    """The index as it is stored."""
    columns = [[field.name, field.form, field.node, *field.buffers] for field in fields.values()]
    return json.dumps({"rows": rows, "fields": columns, "families": families, "buffers": sizes}, separators=(",", ":")).encode()


def parse(memory: np.ndarray) -> Index:
    """The index of the block that begins at `memory` (uint8), of which at least the head is there.

    Raises:
        CorruptBlockError: the head is damaged or of another version.
    """
    header = layout.read_header(memory)
    try:
        raw = json.loads(layout.index_of(memory, header))
        rows, sizes = raw["rows"], raw["buffers"]
        fields = {name: Field(name, form, node, (first, last)) for name, form, node, first, last in raw["fields"]}
        families = raw["families"]
        sound = (
            isinstance(rows, int)
            and rows >= 0
            and all(isinstance(n, int) and n >= 0 for n in sizes)
            and all(isinstance(f.node, dict) and f.node.get("kind") in _KINDS for f in fields.values())
            and all(isinstance(n, int) for f in fields.values() for n in f.buffers)
            and all(isinstance(node, dict) for node in families)
        )
    except (ValueError, TypeError, KeyError) as e:
        raise CorruptBlockError(f"the batch's index cannot be read: {type(e).__name__}: {e}") from None
    if not sound or header.head_buffers > len(sizes):
        raise CorruptBlockError("the batch's index is damaged: rows, buffers or kinds of columns are not what they can be")
    at = layout.layout_of(header.index_bytes, sizes, header.head_buffers, header.checksums)
    if (at.nbytes, at.head_bytes) != (header.nbytes, header.head_bytes):
        raise CorruptBlockError(f"the batch's buffers need {at.nbytes} bytes, its header says {header.nbytes}")
    return Index(rows, fields, at, memory[: header.head_bytes].tobytes(), families)
