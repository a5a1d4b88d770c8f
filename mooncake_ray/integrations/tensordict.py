"""`TensorDict` on its way through a pickle: its columns go to a block, and it comes back as it was.

Columns are dense tensors, jagged nested ones, and stacks of non-tensor rows; those of TensorDicts inside are named by their path, with dots.
What is none of these stays in the pickle as the value it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mooncake_ray.data import DataProto
from mooncake_ray.data.lazy import Columns, load_columns
from mooncake_ray.data.packed import pack
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.errors import SchemaError
from mooncake_ray.store.frameworks import stored_only
from mooncake_ray.store.packing import Packer

__all__ = ["flattened", "is_plain", "put_together", "reduce_tensordict", "taken_apart"]


@dataclass(frozen=True, slots=True)
class _Column:
    """Stands in a `_Table` for a column of the block."""

    name: str


@dataclass(frozen=True, slots=True)
class _Table:
    """A TensorDict without its columns."""

    batch_size: tuple[int, ...]
    device: Any
    locked: bool
    entries: tuple[tuple[str, Any], ...]  # a `_Column`, a `_Table`, or the value itself


@dataclass(slots=True)
class _Parts:
    batch: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def table(self, td: Any, path: str = "") -> _Table:
        """Takes the columns out of a TensorDict."""
        from tensordict import TensorDict

        entries: list[tuple[str, Any]] = []
        for key, value in td.items():
            name = f"{path}{key}"
            column = None
            if type(value) is TensorDict and is_plain(value):
                value = self.table(value, f"{name}.")
            elif name not in self.batch and name not in self.arrays:  # as "a.b" may be, next to the b in a
                column = _column(value)
            if column is not None:
                (self.arrays if isinstance(column, np.ndarray) else self.batch)[name] = column
            entries.append((key, value if column is None else _Column(name)))
        return _Table(tuple(td.batch_size), td.device, td.is_locked, tuple(entries))


def reduce_tensordict(packer: Packer, td: Any) -> Any:
    """A reduction of a TensorDict, or NotImplemented for one that is small, has no rows, names its dimensions or lies in a file."""
    from tensordict import TensorDict

    if type(td) is not TensorDict or not td.batch_size or not is_plain(td):
        return NotImplemented
    table, batch, arrays = taken_apart(td)
    packed = pack(packer, td.batch_size[0], batch, arrays)
    return NotImplemented if packed is None else (_rebuild, (*packed, table))


def taken_apart(td: Any) -> tuple[_Table, dict[str, Any], dict[str, np.ndarray]]:
    """What `put_together` makes the TensorDict of again: the rest of it, its tensors (ragged ones as `Ragged`) and its arrays."""
    parts = _Parts()
    return parts.table(td), parts.batch, parts.arrays


def flattened(td: Any) -> Any:
    """The TensorDict itself, or one with what is in its inner TensorDicts under dotted names, which `unflatten_keys(".")` puts back.

    Inner ones without entries are left out, and inner batch dimensions beyond the outer ones' forgotten.

    Raises:
        SchemaError: A key with a dot in it could not be told from a path.
    """
    from tensordict import NonTensorStack
    from tensordict.base import TensorDictBase

    tables = [td]
    for table in tables:
        tables += [v for _, v in table.items() if isinstance(v, TensorDictBase) and not isinstance(v, NonTensorStack)]
    if len(tables) == 1:
        return td
    for table in tables:
        if dotted := [key for key in table.keys() if "." in key]:  # noqa: SIM118 - it iterates over rows
            raise SchemaError(f"field {dotted[0]!r} has a dot in its name, as the paths of fields of inner TensorDicts have")
    return td.flatten_keys(".")


def is_plain(td: Any) -> bool:
    """Whether it is in memory, and its dimensions have no names."""
    return not td.is_memmap() and not td._has_names()


def _column(value: Any) -> torch.Tensor | Ragged | np.ndarray | None:
    from tensordict import NonTensorData, NonTensorStack

    if type(value) is torch.Tensor:
        return value
    if isinstance(value, torch.Tensor) and value.is_nested and value.layout is torch.jagged and not value.requires_grad:
        return Ragged.from_jagged(value)
    if type(value) is NonTensorStack and value.stack_dim == 0:
        rows = value.tensordicts
        if all(type(row) is NonTensorData and not row.batch_size for row in rows):
            return np.fromiter((row.data for row in rows), object, len(rows))
    return None


def _rebuild(batch: dict[str, Any], arrays: dict[str, Any], table: _Table) -> Any:
    columns, others = Columns(batch), Columns(arrays)
    if stored_only():
        return DataProto._of(columns, others, dict(_constants(table)))
    load_columns([columns, others])
    return put_together(table, {**columns, **others})


def _constants(table: _Table) -> Iterator[tuple[str, Any]]:
    from tensordict import NonTensorData

    for key, value in table.entries:
        if type(value) is NonTensorData:
            yield key, value.data


def put_together(table: _Table, columns: Mapping[str, Any]) -> Any:
    """A TensorDict of its columns and the rest of it."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    entries = {}
    for key, value in table.entries:
        if isinstance(value, _Table):
            value = put_together(value, columns)
        elif isinstance(value, _Column):
            value = columns[value.name]
            if isinstance(value, Ragged):
                value = value.to_jagged()
            elif isinstance(value, np.ndarray):
                value = NonTensorStack.from_list([NonTensorData(row) for row in value])
        entries[key] = value
    out = TensorDict(entries, batch_size=table.batch_size, device=table.device)
    return out.lock_() if table.locked else out
