"""Miles' object store over the pool: what its rollout manager hands to its trainers.

    mooncake_ray.install()            # or miles.register() in each process, before Miles parses its arguments
    … --object-store-backend mooncake_ray

The interface is Miles' (`put`, `get`, `remove`, a box around the handle, a result that is a context manager); nothing of Miles is needed to
use it. A shard is one block. Rows that were lists of numbers travel typed, a token in 4 bytes instead of 24.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import Any

import numpy as np

import mooncake_ray
from mooncake_ray.errors import SchemaError

__all__ = ["BACKEND", "Box", "GetResult", "MooncakeRayObjectStore", "register"]

BACKEND = "mooncake_ray"
_WHOLE = "auto"  # the codec of what belongs to the batch and not to a row
_RAGGED = "typed_ragged"


class Box:
    """Holds a handle where Ray must not see it, since Ray replaces a bare ref among a task's arguments by its value."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def inner(self) -> Any:
        return self._inner


class GetResult:
    """What a `get` returned. Its memory belongs to the views in it, so leaving the context only lets go of the result's own."""

    def __init__(self, value: Any) -> None:
        self._value = value

    @property
    def value(self) -> Any:
        return self._value

    def __enter__(self) -> Any:
        return self._value

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._value = None


class MooncakeRayObjectStore:
    """Puts rollout data as blocks. Holds nothing itself: what was put lives as long as boxes that name it, or until `remove`."""

    def __init__(self, args: Any = None, *, contribute_segment: bool | None = None) -> None:
        """Takes what Miles passes to its backends; there is nothing to set up, as the node's pool serves all processes on it."""

    def put(self, value: Any, value_spec: Mapping[str, Any] | None = None) -> Box:
        """Stores a shard.

        Args:
            value: A dict. Anything else is put as it is.
            value_spec: By field, something with `codec` and `dtype`. Fields with a codec other than "auto" have a value a row.

        Raises:
            SchemaError: Fields with a value a row differ in length.
            StoreFullError: There was no room.
        """
        spec = value_spec or {}
        rowwise = [name for name in value if name in spec and spec[name].codec != _WHOLE] if isinstance(value, dict) else []
        if not rowwise:
            return _box(mooncake_ray.put(value))
        return _box(mooncake_ray.put_batch(_to_batch(value, {name: spec[name] for name in rowwise})))

    def get(self, ref: Any) -> GetResult:
        """What was put, as a new dict with its fields in their order.

        Columns are lists again. Rows of `typed_ragged` fields that were lists of ints are writable arrays, which `torch.tensor` takes at
        once; those of floats are tensors, which Miles' context-parallel slicing takes where it would not take arrays. Their dtype is the
        declared one where every value is the same in it, otherwise int64, and float32 or float64, whichever is exact. All else is as it was
        put; arrays are writable, too. What is written stays in this process.

        Raises:
            ObjectLostError: It was removed, or the process that put it is gone.
        """
        if not isinstance(ref.inner, mooncake_ray.BatchRef):
            return GetResult(mooncake_ray.get(ref.inner))
        return GetResult(_from_batch(mooncake_ray.get(ref.inner)))

    def remove(self, ref: Any) -> None:
        """Frees the memory now. Views that somebody still has stay valid."""
        mooncake_ray.free(ref.inner)


def _box(inner: Any) -> Any:
    """Miles' own box where Miles is loaded."""
    theirs = sys.modules.get("miles.utils.ray_utils")
    return (theirs.Box if theirs is not None else Box)(inner)


def _to_batch(value: dict[str, Any], spec: Mapping[str, Any]) -> Any:
    from mooncake_ray.data import DataProto

    counts = {name: len(value[name]) for name in spec}
    if len(set(counts.values())) > 1:
        raise SchemaError(f"fields with a value a row differ in how many there are: {counts}")
    ragged, plain = {}, {}
    for name, declared in spec.items():
        column = value[name]
        typed = _typed(column, declared.dtype) if declared.codec == _RAGGED else None
        if typed is not None:
            ragged[name] = typed
        else:
            plain[name] = column if isinstance(column, np.ndarray) else list(column)
    whole = {name: item for name, item in value.items() if name not in spec}
    return DataProto.from_dict(ragged, plain, {"order": list(value), "whole": whole})


def _from_batch(batch: Any) -> dict[str, Any]:
    columns: dict[str, Any] = dict(batch.meta_info["whole"])
    for name, ragged in batch.batch.items():
        columns[name] = _rows(ragged)
    for name, column in batch.non_tensor_batch.items():
        columns[name] = [_writable(row) for row in column.tolist()] if column.dtype == object else column
    return {name: columns[name] for name in batch.meta_info["order"]}


def _typed(rows: Sequence[Any], declared: str | None) -> Any:
    """The rows as one ragged column, if they are lists of numbers that it can hold exactly; None otherwise."""
    from mooncake_ray.data.ragged import Ragged

    if not all(isinstance(row, list) for row in rows):
        return None
    import torch

    for dtype in (getattr(torch, declared, None) if declared else None, None):
        try:
            typed = Ragged.from_lists(rows, dtype=dtype)
        except SchemaError:  # not exact in this dtype, or not numbers of one kind: then they stay what they are
            continue
        return typed if typed.levels == 1 else None
    return None


def _rows(ragged: Any) -> list[Any]:
    bounds = ragged.offsets.tolist()
    values = ragged.values if ragged.dtype.is_floating_point else ragged.values.numpy()
    return [values[a:b] for a, b in itertools.pairwise(bounds)]


def _writable(row: Any) -> Any:
    return row.copy() if isinstance(row, np.ndarray) and not row.flags.writeable else row


def register(module: Any = None) -> None:
    """Makes `mooncake_ray` one of Miles' backends in this process. Idempotent.

    Args:
        module: Miles' `miles.utils.object_store`; by default it is imported.
    """
    if module is None:
        import importlib

        module = importlib.import_module("miles.utils.object_store")
    if BACKEND in {backend.value for backend in module.ObjectStoreBackend}:
        return
    known = {backend.name: backend.value for backend in module.ObjectStoreBackend}
    backends = Enum(module.ObjectStoreBackend.__name__, {**known, "MOONCAKE_RAY": BACKEND}, module=module.__name__)
    module.ObjectStoreBackend = backends
    module._create_instance = _creating(module._create_instance)
    module.BaseObjectStore.register(MooncakeRayObjectStore)
    arguments = sys.modules.get("miles.utils.arguments")
    if arguments is not None:
        arguments.ObjectStoreBackend = backends


def _creating(original: Callable[..., Any]) -> Callable[..., Any]:
    def _create_instance(args: Any, **kwargs: Any) -> Any:
        return MooncakeRayObjectStore(args, **kwargs) if args.object_store_backend == BACKEND else original(args, **kwargs)

    return _create_instance
