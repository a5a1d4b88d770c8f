"""Batches that a catalog owns, and batches made of their rows. Moves no data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import ray

from mooncake_ray.data import DataProto, ops
from mooncake_ray.data.block.index import Index
from mooncake_ray.data.catalog import LeasedRow
from mooncake_ray.data.lazy import Columns
from mooncake_ray.objects import api
from mooncake_ray.objects.batch_ref import BatchRef, _Group, _index_of, _Object, concat_batches
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
        batches = dict(zip(ref.refs, ray.get(ref.refs), strict=True))
    kinds = {}
    for group in ref._groups:
        batch = batches[group.segments[0][0].ref]
        kinds |= {name: _kind(getattr(batch, part).peek(stored)) for name, (part, stored) in group.fields.items()}
    mine = {}
    for obj in {obj.ref: obj for group in ref._groups for obj, _ in group.segments}.values():
        batch = batches[obj.ref]
        again = api.put(DataProto._of(Columns(batch.batch), Columns(batch.non_tensor_batch), {}))
        mine[obj.ref] = _Object(again, obj.head, obj.index or _index_of(batch))
    groups = tuple(replace(group, segments=tuple((mine[obj.ref], runs) for obj, runs in group.segments)) for group in ref._groups)
    return Adopted(replace(ref, _groups=groups), kinds, _nbytes(groups))


def _kind(column: Any) -> str:
    kind = ops.kind_of(column)
    if kind == "an array":  # numbers of different dtypes can be put together, and so can texts of different widths
        dtype = {"U": " of texts", "S": " of bytes", "O": " of objects"}.get(column.dtype.kind, "")
    else:
        dtype = f" of {str(column.dtype).removeprefix('torch.')}"
    width = ["*"] * bool(ops.row_shape(column))  # padding: rows of several widths can be read without it
    shape = ", ".join([*width, *("*" if n is None else str(n) for n in ops.row_shape(column)[1:])])
    return f"{kind}{dtype} with rows [{shape}]"


def _nbytes(groups: Sequence[_Group]) -> int:
    """Bytes of stored batches, of each the part of its rows that is meant."""
    parts: dict[ray.ObjectRef, float] = {}
    indexes: dict[ray.ObjectRef, Index] = {}
    for group in groups:
        rows: Counter[ray.ObjectRef] = Counter()
        for obj, runs in group.segments:
            if obj.index is not None and obj.index.rows:
                indexes[obj.ref] = obj.index
                rows[obj.ref] += runs.total
        for ref, several in rows.items():
            parts[ref] = min(1.0, max(parts.get(ref, 0.0), several / indexes[ref].rows))
    return sum(math.ceil(part * indexes[ref].nbytes) for ref, part in parts.items())


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
