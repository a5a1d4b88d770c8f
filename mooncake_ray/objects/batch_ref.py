"""`BatchRef`: a batch that is stored, by its rows and columns. Selecting and joining them moves no data.

A stored batch is one Ray object. A `BatchRef` says which of its rows and columns are meant, and may put together several: rows of many
workers one after the other, columns that came later beside the first ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import ray

from mooncake_ray.data import DataProto, ops
from mooncake_ray.data.balance import partition
from mooncake_ray.data.block.index import Index, parse
from mooncake_ray.data.block.read import Runs
from mooncake_ray.data.lazy import Stored
from mooncake_ray.errors import SchemaError
from mooncake_ray.store.frameworks import as_stored

__all__ = ["BatchRef", "concat_batches", "of_stored"]

_HEAD_BYTES = 64 << 10  # of an index that travels with a ref
Rows = slice | Sequence[int] | Sequence[bool] | np.ndarray


class _Object:
    """One stored batch: Ray's ref, and what is known of it without looking."""

    __slots__ = ("_index", "head", "ref")

    def __init__(self, ref: ray.ObjectRef, head: bytes | None, index: Index | None = None) -> None:
        self.ref, self.head, self._index = ref, head, index

    @property
    def index(self) -> Index | None:
        """None for a batch that is too small for the pool."""
        if self._index is None and self.head is not None:
            self._index = parse(np.frombuffer(self.head, np.uint8))
        if self._index is None:
            with as_stored():
                self._index = _index_of(ray.get(self.ref))
        return self._index

    def __reduce__(self) -> Any:
        return _Object, (self.ref, self.head)


@dataclass(frozen=True)
class _Group:
    """Columns that are stored together: for each its part of the batch and its name in the objects. Their rows: runs of each object."""

    fields: Mapping[str, tuple[str, str]]
    segments: tuple[tuple[_Object, Runs], ...]

    def take(self, rows: Runs) -> _Group:
        out: list[tuple[_Object, Runs]] = []
        for number, part in rows.over(runs.total for _, runs in self.segments):
            obj, runs = self.segments[number]
            _append(out, obj, runs.take(part))
        return _Group(self.fields, tuple(out) or ((self.segments[0][0], Runs.span(0, 0)),))

    def columns(self, batches: Mapping[ray.ObjectRef, DataProto], ragged: bool) -> dict[str, Any]:
        """The selected rows of the columns, pending wherever they are stored; without padding if `ragged`."""
        out = {}
        for name, (part, stored) in self.fields.items():
            pieces = []
            for obj, runs in self.segments:
                piece = ops.take_runs(getattr(batches[obj.ref], part).peek(stored), runs)
                pieces.append(ops.in_form(piece, "ragged") if ragged else piece)
            out[name] = pieces[0] if len(pieces) == 1 else ops.join(name, pieces)
        return out


def _append(segments: list[tuple[_Object, Runs]], obj: _Object, runs: Runs) -> None:
    if segments and segments[-1][0].ref == obj.ref:
        segments[-1] = (obj, segments[-1][1].then(runs))
    elif runs.total:
        segments.append((obj, runs))


@dataclass(frozen=True)
class BatchRef:
    """Rows and columns of stored batches. Immutable; pickles through any Ray call, and keeps what it names alive as Ray's own refs do.

    It holds no data: its size grows with the number of batches and of runs of rows, not with their bytes. It contains Ray's refs, so it is for
    Ray to pickle: `cloudpickle.dumps` of it, outside of a call or a put, keeps the batches for as long as their owner lives.
    """

    _groups: tuple[_Group, ...]
    as_put: str = "mooncake_ray"
    """What class `get` gives back: `mooncake_ray`, `verl`, `tensordict`, `nested tensordict` or `dict`."""

    def __len__(self) -> int:
        return sum(runs.total for _, runs in self._groups[0].segments)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the columns, tensors first."""
        return tuple(name for group in self._groups for name in group.fields)

    @property
    def refs(self) -> list[ray.ObjectRef]:
        """Ray's refs of the stored batches, for `ray.wait` and `free`."""
        return [obj.ref for obj in self._objects]

    @cached_property
    def _objects(self) -> list[_Object]:
        return list({obj.ref: obj for group in self._groups for obj, _ in group.segments}.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the stored batches it refers to, all their rows and columns."""
        return sum(obj.index.nbytes for obj in self._objects if obj.index is not None)

    def __repr__(self) -> str:
        return f"BatchRef(rows={len(self)}, fields={list(self.fields)}, objects={len(self._objects)})"

    # ---- rows

    def __getitem__(self, rows: Rows) -> BatchRef:
        """Selects rows: a slice, row numbers (negative ones count from the end; in any order, repeated), or a mask.

        Raises:
            IndexError: a row is out of range, or the mask has another length.
        """
        return self._take(ops.runs_of(rows, len(self)))

    def _take(self, rows: Runs) -> BatchRef:
        return replace(self, _groups=tuple(group.take(rows) for group in self._groups))

    def chunk(self, chunks: int, *, balance: Literal["rows", "tokens"] = "rows", tokens_of: str | None = None) -> list[BatchRef]:
        """Cuts the rows into `chunks` of equally many rows.

        Args:
            balance: `rows`: neighbours stay together, in order. `tokens`: each chunk has about as many tokens as the others, its rows in
                rising order (see `partition` for which they are).
            tokens_of: The column whose row lengths are balanced. Default: the one with the most.

        Raises:
            ValueError: the rows cannot be divided evenly.
            SchemaError: no column has row lengths.
        """
        if chunks < 1 or len(self) % chunks:
            raise ValueError(f"{len(self)} rows cannot be divided into {chunks} equal chunks")
        if balance == "tokens":
            return [self._take(Runs.of(rows)) for rows in self.partition(chunks, tokens_of=tokens_of)]
        if balance != "rows":
            raise ValueError(f"balance must be 'rows' or 'tokens', got {balance!r}")
        size = len(self) // chunks
        return [self._take(Runs.span(number * size, (number + 1) * size)) for number in range(chunks)]

    def split(self, split_size: int) -> list[BatchRef]:
        """Cuts the rows into batches of `split_size`; the last one may be smaller."""
        if split_size < 1:
            raise ValueError(f"split_size must be at least 1, got {split_size}")
        return [self._take(Runs.span(at, min(at + split_size, len(self)))) for at in range(0, len(self), split_size)]

    def partition(self, parts: int, *, tokens_of: str | None = None, equal_rows: bool = True) -> list[np.ndarray]:
        """Row numbers for `parts` workers, so that each has about as many tokens: see `mooncake_ray.data.balance.partition`."""
        return partition(self.lengths(tokens_of), parts, equal_rows=equal_rows)

    def lengths(self, field: str | None = None) -> np.ndarray:
        """Tokens of each row, int64 (rows,), told from the index: nothing of the data is read.

        Args:
            field: A column with row lengths. Default: the one with the most.

        Raises:
            SchemaError: there is no such column, or it has none.
        """
        found: dict[str, np.ndarray] = {}
        for group in self._groups:
            for name, (_, stored) in group.fields.items():
                if field in (None, name) and (lengths := _lengths(group, stored)) is not None:
                    found[name] = lengths
        if not found:
            what = f"field {field!r}" if field is not None else "none of the columns"
            raise SchemaError(f"{what} has row lengths; the fields are {list(self.fields)}")
        return max(found.values(), key=lambda lengths: int(lengths.sum()))

    # ---- columns

    def select(self, fields: Iterable[str]) -> BatchRef:
        """Selects columns.

        Raises:
            SchemaError: a name is unknown.
        """
        names = list(dict.fromkeys(fields))
        self._check(names)
        groups = (_Group({n: at for n, at in group.fields.items() if n in names}, group.segments) for group in self._groups)
        chosen = tuple(group for group in groups if group.fields)
        return replace(self, _groups=chosen or (_Group({}, self._groups[0].segments),))

    def _check(self, names: Iterable[str]) -> None:
        unknown = [name for name in names if name not in self.fields]
        if unknown:
            raise SchemaError(f"there is no field {unknown[0]!r}; the fields are {list(self.fields)}")

    def append(self, batch: Any, *, overwrite: bool = False) -> BatchRef:
        """Stores further columns of the same rows, and returns the batch of all columns. This ref stays as it is.

        Args:
            batch: a batch, or a `BatchRef` of one that another worker has stored.
            overwrite: replace columns that are there already, if they have the same dtype.

        Raises:
            SchemaError: the rows are not as many, a field is there already, or would change its dtype.
        """
        from mooncake_ray.objects.batches import as_batch, put_batch

        columns = batch if isinstance(batch, BatchRef) else as_batch(batch)[0]
        rows, names = len(columns), columns.fields if isinstance(columns, BatchRef) else [*columns.batch, *columns.non_tensor_batch]
        if rows != len(self):
            raise SchemaError(f"cannot append columns of {rows} rows to a batch of {len(self)} rows")
        twice = [name for name in names if name in self.fields]
        if twice and not overwrite:
            raise SchemaError(f"field {twice[0]!r} is in the batch already; pass overwrite=True to replace it")
        more = batch if isinstance(batch, BatchRef) else put_batch(batch)
        for name in twice:
            before, after = self.dtype(name), more.dtype(name)
            if before != after:
                raise SchemaError(f"field {name!r} is {before} in the batch, and {after} in what is to replace it")
        kept = self.select([name for name in self.fields if name not in twice]) if twice else self
        return replace(self, _groups=tuple(group for group in kept._groups if group.fields or not more._groups) + more._groups)

    def dtype(self, field: str) -> str:
        """The dtype of a column's numbers, `object` for other values.

        Raises:
            SchemaError: a name is unknown.
        """
        self._check([field])
        group = next(group for group in self._groups if field in group.fields)
        index, stored = group.segments[0][0].index, group.fields[field][1]
        found = index.fields.get(stored) if index is not None else None
        return found.dtype if found is not None else "object"

    def get(self, fields: Iterable[str] | None = None, rows: Rows | None = None, **options: Any) -> Any:
        """See `mooncake_ray.get`."""
        from mooncake_ray.objects.batches import get_batch

        return get_batch(self, fields, rows, **options)


def _lengths(group: _Group, stored: str) -> np.ndarray | None:
    out = []
    for obj, runs in group.segments:
        index = obj.index
        lengths = index.lengths(stored) if index is not None and stored in index.fields else None
        if lengths is None:
            return None
        out.append(lengths[runs.positions()])
    return np.concatenate(out)


def of_stored(ref: ray.ObjectRef, as_put: str) -> BatchRef:
    """The `BatchRef` of a whole stored batch. Waits until it is there; reads none of its data.

    Raises:
        SchemaError: the object is no batch.
    """
    with as_stored():
        stored = ray.get(ref)
    if not isinstance(stored, DataProto):
        raise SchemaError(f"the object is a {type(stored).__name__}, expected a batch")
    index = _index_of(stored)
    head = index.head if index is not None and len(index.head) <= _HEAD_BYTES else None
    fields = {name: (part, name) for part in ("batch", "non_tensor_batch") for name in getattr(stored, part)}
    return BatchRef((_Group(fields, ((_Object(ref, head, index), Runs.span(0, len(stored))),)),), as_put)


def _index_of(batch: DataProto) -> Index | None:
    """Of the block that all its pending columns are in."""
    for part in (batch.batch, batch.non_tensor_batch):
        for column in part.peeks().values():
            if isinstance(column, Stored) and column.selected is None:
                return column.handle.index
    return None


def concat_batches(refs: Sequence[BatchRef]) -> BatchRef:
    """The rows of all, one after the other. Moves no data.

    Raises:
        ValueError: there are none.
        SchemaError: one lacks a field of the first, or has another.
    """
    if not refs:
        raise ValueError("cannot concat no refs, expected at least one")
    first = refs[0]
    for number, ref in enumerate(refs):
        if set(ref.fields) != set(first.fields):
            missing, extra = set(first.fields) - set(ref.fields), set(ref.fields) - set(first.fields)
            raise SchemaError(f"batch {number} differs from batch 0: missing fields {sorted(missing)}, unexpected fields {sorted(extra)}")
    together: dict[tuple[int, ...], dict[str, tuple[str, str]]] = {}  # fields by which group of each ref has them
    for name in first.fields:
        at = tuple(next(n for n, group in enumerate(ref._groups) if name in group.fields) for ref in refs)
        stored = {ref._groups[n].fields[name] for ref, n in zip(refs, at, strict=True)}
        if len(stored) > 1:
            raise SchemaError(f"field {name!r} is stored as {sorted(stored)} in the batches, expected one part and one name")
        together.setdefault(at, {})[name] = stored.pop()
    groups = []
    for at, fields in together.items():
        segments: list[tuple[_Object, Runs]] = []
        for ref, number in zip(refs, at, strict=True):
            for obj, runs in ref._groups[number].segments:
                _append(segments, obj, runs)
        groups.append(_Group(fields, tuple(segments) or refs[0]._groups[at[0]].segments[:1]))
    return replace(first, _groups=tuple(groups))
