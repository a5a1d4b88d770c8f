"""`verl.DataProto` on its way through a pickle: a padded batch is stored without its padding, and comes back as it was."""

from __future__ import annotations

from typing import Any

import numpy as np

from mooncake_ray.data import DataProto
from mooncake_ray.data.lazy import Columns, load_columns
from mooncake_ray.data.packed import pack
from mooncake_ray.integrations.tensordict import is_plain, put_together, taken_apart
from mooncake_ray.store.frameworks import stored_only
from mooncake_ray.store.packing import Packer

__all__ = ["reduce_batch"]


def reduce_batch(packer: Packer, batch: Any) -> Any:
    """A reduction of a `verl.DataProto`, or NotImplemented. A subclass that pickles in its own way keeps it."""
    from verl import DataProto as VerlDataProto

    cls = type(batch)
    if cls.__getstate__ is not VerlDataProto.__getstate__ or cls.__setstate__ is not VerlDataProto.__setstate__:
        return NotImplemented
    packed = None
    if _is_plain(batch):
        table, columns, others = (None, {}, {}) if batch.batch is None else taken_apart(batch.batch)
        packed = None if others else pack(packer, len(batch), columns, batch.non_tensor_batch)
    if packed is None:  # its attributes one by one, so that each tensor is found
        return _plain, (cls, dict(batch.__dict__))
    state = {name: value for name, value in batch.__dict__.items() if name not in ("batch", "non_tensor_batch")}
    return _rebuild, (cls, *packed, table, state)


def _is_plain(batch: Any) -> bool:
    td = batch.batch
    table = td is None or (len(td.batch_size) == 1 and is_plain(td))
    return table and all(type(array) is np.ndarray for array in batch.non_tensor_batch.values())


def _rebuild(cls: type, batch: dict[str, Any], arrays: dict[str, Any], table: Any, state: dict[str, Any]) -> Any:
    columns, others = Columns(batch), Columns(arrays)
    if stored_only():
        return DataProto._of(columns, others, state["meta_info"])
    load_columns([columns, others])
    td = None if table is None else put_together(table, columns)
    return _plain(cls, {**state, "batch": td, "non_tensor_batch": dict(others)})


def _plain(cls: type, state: dict[str, Any]) -> Any:
    out = cls.__new__(cls)
    out.__dict__.update(state)
    return out
