"""Batches that a catalog owns, and batches made of their rows. Moves no data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import ray

from mooncake_ray.data import DataProto, ops
from mooncake_ray.data.catalog import LeasedRow
from mooncake_ray.data.lazy import Columns
from mooncake_ray.objects import api
from mooncake_ray.objects.batch_ref import BatchRef, concat_batches, of_stored
from mooncake_ray.store.frameworks import as_stored

__all__ = ["Adopted", "adopt", "assemble"]


@dataclass(frozen=True)
class Adopted:
    """A batch whose objects this process owns."""

    ref: BatchRef
    kinds: Mapping[str, str]
    """What columns of one name have to have in common, so that their rows can be put together."""
    nbytes: int
    """Its rows' part of the stored batches, about."""


def adopt(ref: BatchRef) -> Adopted:
    """The same rows and columns in objects of this process, which name what is in the pool already. Their meta_info is left behind.

    Objects belong to the process that put them, and die with it: these do not die with who put `ref`.

    Raises:
        ray.exceptions.ObjectLostError, OwnerDiedError: who put it is dead already, or it was freed.
    """
    with as_stored():
        batches = ray.get([obj.ref for obj in ref._objects])
    kinds = {}
    for group in ref._groups:
        batch = batches[ref._objects.index(group.segments[0][0])]
        kinds |= {name: _kind(getattr(batch, part).peek(stored)) for name, (part, stored) in group.fields.items()}
    mine = {}
    for obj, batch in zip(ref._objects, batches, strict=True):
        again = DataProto._of(Columns(batch.batch), Columns(batch.non_tensor_batch), {})
        (group,) = of_stored(api.put(again), ref.as_put)._groups
        mine[id(obj)] = group.segments[0][0]
    groups = tuple(replace(group, segments=tuple((mine[id(obj)], runs) for obj, runs in group.segments)) for group in ref._groups)
    return Adopted(replace(ref, _groups=groups), kinds, _share(groups, batches, ref))


def _kind(column: Any) -> str:
    kind = ops.kind_of(column)
    if kind == "an array":  # numbers of different dtypes can be put together, and so can texts of different widths
        dtype = {"U": " of texts", "S": " of bytes", "O": " of objects"}.get(column.dtype.kind, "")
    else:
        dtype = f" of {str(column.dtype).removeprefix('torch.')}"
    shape = ", ".join("*" if n is None else str(n) for n in ops.row_shape(column))
    return f"{kind}{dtype} with rows [{shape}]"


def _share(groups: Sequence[Any], batches: Sequence[DataProto], ref: BatchRef) -> int:
    rows = {id(obj): len(batch) for obj, batch in zip(ref._objects, batches, strict=True)}
    parts: dict[int, float] = {}
    nbytes: dict[int, int] = {}
    for group, before in zip(groups, ref._groups, strict=True):
        for (obj, runs), (old, _) in zip(group.segments, before.segments, strict=True):
            parts[id(obj)] = max(parts.get(id(obj), 0), min(1, runs.total / (rows[id(old)] or 1)))
            nbytes[id(obj)] = obj.index.nbytes if obj.index is not None else 0
    return math.ceil(sum(parts[key] * nbytes[key] for key in parts))


def assemble(rows: Sequence[LeasedRow], fragments: Mapping[str, BatchRef]) -> BatchRef:
    """The batch of these rows, in their order: all have the same fields.

    Raises:
        SchemaError: columns of one name cannot be put together.
    """
    names_at: dict[tuple[tuple[str, int], ...], list[str]] = {}  # fields by where their rows lie
    for name in rows[0].at:
        names_at.setdefault(tuple(row.at[name] for row in rows), []).append(name)
    out: BatchRef | None = None
    for places, names in names_at.items():
        runs = ((fragment, [number for _, number in several]) for fragment, several in groupby(places, lambda place: place[0]))
        pieces = [_rows(fragments[fragment].select(names), numbers) for fragment, numbers in runs]
        columns = pieces[0] if len(pieces) == 1 else concat_batches(pieces)
        out = columns if out is None else out.append(columns)
    if out is None:
        raise ValueError("rows without fields are no batch")
    return out


def _rows(ref: BatchRef, numbers: list[int]) -> BatchRef:
    return ref if numbers == [*range(len(ref))] else ref[numbers]
