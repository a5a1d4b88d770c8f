"""`verl.DataProto` on its way through a pickle: a padded batch is stored without its padding, and comes back as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mooncake_ray.data import DataProto
from mooncake_ray.data.lazy import Columns, load_columns
from mooncake_ray.data.packed import pack
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.store.frameworks import stored_only
from mooncake_ray.store.packing import Packer

__all__ = ["reduce_batch"]


def reduce_batch(packer: Packer, batch: Any) -> Any:
    """A reduction of a `verl.DataProto`, or NotImplemented. A subclass that pickles in its own way keeps it."""
    from verl import DataProto as VerlDataProto

    cls = type(batch)
    if cls.__getstate__ is not VerlDataProto.__getstate__ or cls.__setstate__ is not VerlDataProto.__setstate__:
        return NotImplemented
    columns = _columns(batch.batch)
    if columns is None or not all(type(array) is np.ndarray for array in batch.non_tensor_batch.values()):
        return _by_parts(cls, batch)
    packed = pack(packer, len(batch), columns, batch.non_tensor_batch)
    if packed is None:
        return _by_parts(cls, batch)
    state = {name: value for name, value in batch.__dict__.items() if name not in ("batch", "non_tensor_batch")}
    table = None if batch.batch is None else (tuple(batch.batch.batch_size), batch.batch.device)
    return _rebuild, (cls, *packed, table, state)


def _columns(table: Any) -> dict[str, Any] | None:
    """The tensors of a TensorDict, ragged ones as `Ragged`; None where it holds anything else."""
    if table is None:
        return {}
    out: dict[str, Any] = {}
    if len(table.batch_size) != 1 or table.is_locked:
        return None
    for name, value in table.items():
        if type(value) is not torch.Tensor and not (isinstance(value, torch.Tensor) and value.is_nested):
            return None
        if value.is_nested and (value.layout is not torch.jagged or value.requires_grad):
            return None
        out[name] = Ragged.from_jagged(value) if value.is_nested else value
    return out


def _rebuild(cls: type, batch: dict[str, Any], arrays: dict[str, Any], table: Any, state: dict[str, Any]) -> Any:
    columns, others = Columns(batch), Columns(arrays)
    if stored_only():
        return DataProto._of(columns, others, state["meta_info"])
    load_columns([columns, others])
    out = cls.__new__(cls)
    out.__dict__.update(state, batch=_table(columns, *table) if table else None, non_tensor_batch=dict(others))
    return out


def _table(columns: Columns, batch_size: tuple[int, ...], device: Any) -> Any:
    from tensordict import TensorDict

    tensors = {name: column.to_jagged() if isinstance(column, Ragged) else column for name, column in columns.items()}
    return TensorDict(tensors, batch_size=batch_size, device=device)


def _by_parts(cls: type, batch: Any) -> Any:
    """Its attributes pickled one by one, so that each tensor is found."""
    return _plain, (cls, dict(batch.__dict__))


def _plain(cls: type, state: dict[str, Any]) -> Any:
    out = cls.__new__(cls)
    out.__dict__.update(state)
    return out
