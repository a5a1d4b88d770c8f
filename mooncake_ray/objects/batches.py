"""Batches into the pool, and the rows and columns that somebody wants out of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import ray

from mooncake_ray.data import DataProto, ops
from mooncake_ray.data.lazy import Columns, Pending, Stored
from mooncake_ray.data.meta import join_meta
from mooncake_ray.errors import SchemaError
from mooncake_ray.objects import api
from mooncake_ray.objects.batch_ref import BatchRef, Rows, of_stored
from mooncake_ray.store.frameworks import as_stored, class_names

__all__ = ["as_batch", "batch_ref", "get_batch", "put_batch"]

Form = Literal["as-put", "ragged", "padded"]


def put_batch(batch: Any, *, checksums: bool = False) -> BatchRef:
    """Stores a batch in the pool, typed and without padding, and returns a ref that knows its rows and columns.

    Args:
        batch: a `mooncake_ray.DataProto`, a `verl.DataProto`, a TensorDict, or a dict of columns (tensors, `Ragged`, arrays, lists with an
            element a row). It must not change while it is stored.
        checksums: store a CRC-32 for every column, for `get(…, verify=True)`.

    Raises:
        SchemaError: it is none of these, or its columns do not have equally many rows.
    """
    proto, as_put = as_batch(batch)
    ref = api.put(proto, typed=True, checksums=checksums)
    return of_stored(ref, as_put)


def as_batch(batch: Any) -> tuple[DataProto, str]:
    """A batch of any class as ours, sharing its columns; and what it was."""
    if isinstance(batch, DataProto):
        return batch, "mooncake_ray"
    kinds = class_names(type(batch))
    if "verl.protocol:DataProto" in kinds:
        return DataProto.from_verl(batch), "verl"
    if any(kind.startswith("tensordict") and kind.endswith(":TensorDictBase") for kind in kinds):
        from mooncake_ray.integrations.tensordict import flattened

        flat = flattened(batch)
        return DataProto.from_tensordict(flat), "tensordict" if flat is batch else "nested tensordict"
    if isinstance(batch, Mapping):
        return DataProto.from_columns(batch), "dict"
    raise SchemaError(f"a {type(batch).__name__} is no batch: expected a DataProto, a TensorDict or a dict of columns")


def batch_ref(ref: ray.ObjectRef) -> BatchRef:
    """The `BatchRef` of a batch that is one Ray object: a task's return, or a `ray.put`. Waits until it is there; reads none of its data.

    Raises:
        SchemaError: the object is no batch.
    """
    return of_stored(ref, "mooncake_ray")


def get_batch(
    ref: BatchRef | ray.ObjectRef,
    fields: Iterable[str] | None = None,
    rows: Rows | None = None,
    *,
    form: Form = "as-put",
    lazy: bool = False,
    verify: bool = False,
    timeout: float | None = None,
) -> Any:
    """See `mooncake_ray.get`."""
    if form not in ("as-put", "ragged", "padded"):
        raise ValueError(f"form must be 'as-put', 'ragged' or 'padded', got {form!r}")
    if not isinstance(ref, BatchRef):
        ref = batch_ref(ref)
    if fields is not None:
        ref = ref.select([fields] if isinstance(fields, str) else fields)
    if rows is not None:
        ref = ref[rows]
    with as_stored():
        got = ray.get([obj.ref for obj in ref._objects], timeout=timeout)
    batches = {obj.ref: batch for obj, batch in zip(ref._objects, got, strict=True)}
    if verify:
        for batch in got:
            for handle in {id(c.handle): c.handle for c in _stored(batch)}.values():
                handle.verify()
    parts: dict[str, dict[str, Any]] = {"batch": {}, "non_tensor_batch": {}}
    for group in ref._groups:
        for name, column in group.columns(batches, form == "ragged").items():
            column = ops.in_form(column, form)
            parts["batch" if ops.kind_of(column) == "a Ragged" else group.fields[name][0]][name] = column
    out = DataProto._of(Columns(parts["batch"]), Columns(parts["non_tensor_batch"]), _meta(ref, batches))
    out._lists = frozenset().union(*(batch._lists for batch in got))
    if lazy:
        return out
    out.load()
    return _as_put(out, ref.as_put) if form == "as-put" else out


def _stored(batch: DataProto) -> list[Stored]:
    columns = [c for part in (batch.batch, batch.non_tensor_batch) for c in part.peeks().values() if isinstance(c, Pending)]
    return [part for column in columns for part in column.parts()]


def _meta(ref: BatchRef, batches: Mapping[ray.ObjectRef, DataProto]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for group in ref._groups:
        distinct = {obj.ref: batches[obj.ref].meta_info for obj, _ in group.segments}
        out = {**join_meta(list(distinct.values())), **out}
    return out


def _as_put(batch: DataProto, kind: str) -> Any:
    if kind == "verl":
        return batch.to_verl()
    if kind == "tensordict":
        return batch.to_tensordict()
    if kind == "nested tensordict":
        return batch.to_tensordict().unflatten_keys(".")
    if kind == "dict":
        return batch.to_columns()
    return batch
