"""What `DataProto` does with its columns: checks, selections and joins.

A column is a dense `torch.Tensor` or a `numpy.ndarray` whose first dimension is the rows of the batch, a `Ragged`, or one of them that is
still `Pending` in a store. What depends on which of them is in the functions of one column. Nothing here changes its arguments, nor loads
what is pending where that is not said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from reprlib import repr as short_repr
from typing import Any

import numpy as np
import torch

from mooncake_ray.data import lazy
from mooncake_ray.data.block import number_lists
from mooncake_ray.data.block.read import Runs
from mooncake_ray.data.equality import values_equal
from mooncake_ray.data.indices import RowIndex, row_numbers
from mooncake_ray.data.lazy import Columns, Pending
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.errors import SchemaError

Column = torch.Tensor | np.ndarray | Ragged


def as_names(keys: str | Iterable[str] | None) -> list[str]:
    """Returns field names as a list without duplicates; one string is one name, None is no name."""
    if keys is None:
        return []
    return [keys] if isinstance(keys, str) else list(dict.fromkeys(keys))


def pick(fields: Mapping[str, Any], names: Iterable[str], part: str) -> Any:
    """Returns the named fields, in the order of `names`.

    Raises:
        KeyError: A name is unknown. The message lists the known ones.
    """
    names = list(names)
    unknown = [name for name in names if name not in fields]
    if unknown:
        raise KeyError(f"{part} has no {unknown}; it has {list(fields)}")
    return fields.picked(names) if isinstance(fields, Columns) else {name: fields[name] for name in names}


def held(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns as they are, pending ones too."""
    return fields.peeks() if isinstance(fields, Columns) else fields


def own_dict(fields: Any, part: str) -> dict[str, Any]:
    """Returns a new dict of the same values, so later edits do not reach the caller's mapping.

    Anything with `items()` is taken, because a TensorDict is no `dict`.
    """
    if fields is None:
        return {}
    if not hasattr(fields, "items"):
        raise SchemaError(f"{part} is a {type(fields).__name__}, expected a dict")
    return dict(fields.items())


def own_columns(fields: Any, part: str) -> Columns:
    """As `own_dict`, with jagged tensors as the ragged columns they are."""
    if isinstance(fields, Columns):
        return Columns(fields)
    return Columns({name: as_column(value) for name, value in own_dict(fields, part).items()})


def as_column(value: Any) -> Any:
    """The value, or for a nested tensor of the layout torch.jagged a `Ragged` on the same memory."""
    jagged = isinstance(value, torch.Tensor) and value.is_nested and value.layout is torch.jagged
    return Ragged.from_jagged(value) if jagged else value


def row_count(*parts: Mapping[str, Column]) -> int | None:
    """Returns the rows of the first column found, or None where there is no column."""
    for part in parts:
        for column in held(part).values():
            return rows_in(column)
    return None


# ---------------------------------------------------------------- one column, whatever it is


def rows_in(column: Column) -> int:
    """How many rows it has."""
    if isinstance(column, Pending):
        return column.rows
    return len(column) if isinstance(column, Ragged) else int(column.shape[0])


def row_of(column: Column, row: int) -> Any:
    """One row: a view (of an object array its element, None for a null row)."""
    return column[row]


def slice_rows(column: Column, rows: slice) -> Any:
    """Those rows as a view; of a ragged column with a step other than 1 a copy."""
    return column.take(runs_of(rows, column.rows)) if isinstance(column, Pending) else column[rows]


def runs_of(index: slice | RowIndex, rows: int) -> Runs:
    """The rows an index selects.

    Raises:
        IndexError: see `row_numbers`.
    """
    if not isinstance(index, slice):
        return Runs.of(row_numbers(index, rows))
    chosen = range(*index.indices(rows))
    if chosen.step == 1:
        return Runs.span(chosen.start, max(chosen.start, chosen.stop))
    return Runs.of(np.arange(chosen.start, chosen.stop, chosen.step))


def take_runs(column: Any, rows: Runs) -> Any:
    """As `take_rows`; a view where the rows are neighbours."""
    if isinstance(column, Pending | Ragged):
        return column.take(rows)
    if rows.one:
        return column[int(rows.starts[0]) : int(rows.starts[0] + rows.lengths[0])]
    return take_rows(column, rows.positions())


def take_rows(column: Column, numbers: np.ndarray) -> Any:
    """A copy of the given rows (int64, not negative), on the same device; of a ragged column, a view where they are neighbours in order."""
    if isinstance(column, np.ndarray):
        return column[numbers]
    if isinstance(column, Ragged | Pending):
        return column.take(Runs.of(numbers))
    index = torch.from_numpy(numbers).to(column.device)
    # index_select copies whole rows, which is faster, but has no 1-D form for uint16 and the like.
    return column[index] if column.ndim == 1 else column.index_select(0, index)


def join(name: str, columns: Sequence[Any]) -> Any:
    """Joins columns along the rows, in new memory (a single ragged one as it is). Pending ones stay pending if all are.

    Arrays of numbers of different dtypes get numpy's common dtype, and strings the longest width: these dtypes often follow from the
    values (`np.array([1, 0])` next to `np.array([0.5, 1])`).

    Raises:
        SchemaError: A column's type, the shape of its rows or a tensor's dtype differs from the first one's, or numpy would turn numbers
            into strings.
    """
    first = columns[0]
    for position, column in enumerate(columns):
        _check_alike(name, position, column, first)
    if all(isinstance(column, Pending) for column in columns):
        return lazy.join(columns)
    columns = [column.value() if isinstance(column, Pending) else column for column in columns]
    first = columns[0]
    if isinstance(first, Ragged):
        return Ragged.concat(columns)
    if isinstance(first, torch.Tensor):
        return torch.cat(list(columns), dim=0)
    kinds = {column.dtype.kind for column in columns}
    if len(kinds) > 1 and "O" not in kinds and kinds - set("biufc"):
        dtypes = [str(column.dtype) for column in columns]
        raise SchemaError(f"non_tensor_batch[{name!r}] has the dtypes {dtypes}, expected {dtypes[0]} in every batch")
    return np.concatenate(columns, axis=0)


def _check_alike(name: str, position: int, column: Column, first: Column) -> None:
    where = f"{'non_tensor_batch' if kind_of(first) == 'an array' else 'batch'}[{name!r}] of batch {position}"
    if kind_of(column) != kind_of(first):
        raise SchemaError(f"{where} is {kind_of(column)}, expected {kind_of(first)} as in batch 0")
    if (
        kind_of(first) != "an array" and column.dtype != first.dtype and not _lists_alike(column, first)
    ):  # torch.cat would convert, and may round
        raise SchemaError(f"{where} is {column.dtype}, expected {first.dtype} as in batch 0")
    if row_shape(column) != row_shape(first):
        raise SchemaError(f"{where} has rows of shape {row_shape(column)}, expected {row_shape(first)} as in batch 0")


def _lists_alike(column: Column, first: Column) -> bool:
    """Whether both are Python lists of numbers, for which there is one dtype."""
    found = [c.numbers if isinstance(c, Pending) else None for c in (column, first)]
    return None not in found and number_lists.common_dtype(found) is not None  # type: ignore[arg-type]


def kind_of(column: Column) -> str:
    """What it is, in words."""
    if isinstance(column, Pending):
        return column.kind
    return "a Ragged" if isinstance(column, Ragged) else "a tensor" if isinstance(column, torch.Tensor) else "an array"


def row_shape(column: Column) -> tuple[int | None, ...]:
    """Shape of a row; None for a ragged dimension."""
    return column.full_row_shape if isinstance(column, Ragged | Pending) else tuple(column.shape[1:])


def to_device(column: Any, device: torch.device | str | int) -> Any:
    """A tensor or a ragged column on a device."""
    return column.to(device)


def describe(column: Column) -> str:
    """Dtype and shape, as `torch.int64[8, *]`; a `*` for a ragged dimension."""
    shape = (rows_in(column), *row_shape(column))
    return f"{column.dtype}[{', '.join('*' if n is None else str(n) for n in shape)}]"


# ---------------------------------------------------------------- all columns of a batch


def check_columns(batch: Mapping[str, Any], non_tensor_batch: Mapping[str, Any]) -> None:
    """Checks that all columns have their part's type and the same number of rows.

    Raises:
        SchemaError: A column has the wrong type, no row dimension, a row count that differs from
            the first column's, or a name that both parts use.
    """
    batch, non_tensor_batch = held(batch), held(non_tensor_batch)
    for name, value in batch.items():
        if isinstance(value, Ragged) or (isinstance(value, Pending) and value.kind != "an array"):
            continue
        if not isinstance(value, torch.Tensor):
            raise SchemaError(f"batch[{name!r}] is a {type(value).__name__}, expected a torch.Tensor or a Ragged")
        if value.is_nested or value.layout is not torch.strided:
            kind = "nested" if value.is_nested else "sparse"
            raise SchemaError(f"batch[{name!r}] is a {kind} tensor ({value.layout}), expected a dense or a jagged one")
    for name, value in non_tensor_batch.items():
        if not isinstance(value, np.ndarray) and not (isinstance(value, Pending) and value.kind == "an array"):
            raise SchemaError(f"non_tensor_batch[{name!r}] is a {type(value).__name__}, expected a numpy.ndarray")
        if name in batch:
            raise SchemaError(f"field {name!r} is in both batch and non_tensor_batch")

    first: tuple[str, int] | None = None
    for part, columns in (("batch", batch), ("non_tensor_batch", non_tensor_batch)):
        for name, column in columns.items():
            if not isinstance(name, str):
                raise SchemaError(f"{part} has the field name {name!r}, expected a str")
            if not isinstance(column, Ragged | Pending) and column.ndim == 0:
                raise SchemaError(f"{part}[{name!r}] is a scalar, expected rows in its first dimension")
            rows = rows_in(column)
            if first is None:
                first = name, rows
            elif rows != first[1]:
                raise SchemaError(f"{part}[{name!r}] has {rows} rows, expected {first[1]} as in {first[0]!r}")


def describe_columns(batch: Mapping[str, Column], non_tensor_batch: Mapping[str, np.ndarray]) -> str:
    """Returns dtype and shape of every column, and their bytes (of object arrays: of the pointers)."""
    batch, non_tensor_batch = held(batch), held(non_tensor_batch)
    columns: list[Column] = [*batch.values(), *non_tensor_batch.values()]
    parts = [f"bytes={sum(column.nbytes for column in columns)}"]
    for part, fields in (("batch", batch), ("non_tensor_batch", non_tensor_batch)):
        entries = [f"{name}: {describe(column).removeprefix('torch.')}" for name, column in fields.items()]
        parts.append(f"{part}={{{', '.join(entries)}}}")
    return ", ".join(parts)


def split_by_type(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the tensors and ragged columns, and the arrays, of a dict that holds both.

    Raises:
        SchemaError: A value is none of them.
    """
    tensors: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, value in data.items():
        if isinstance(value, torch.Tensor | Ragged):
            tensors[name] = value
        elif isinstance(value, np.ndarray):
            arrays[name] = value
        else:
            raise SchemaError(f"field {name!r} is a {type(value).__name__}, expected a torch.Tensor, a Ragged or a numpy.ndarray")
    return tensors, arrays


def object_column(name: str, values: Any) -> np.ndarray:
    """Returns a 1-D object array with one element per row.

    `np.array(values, dtype=object)` would turn rows that happen to have equal lengths into a 2-D
    array, so the shape would depend on the data and two such columns could not be joined.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise SchemaError(
            f"non_tensor_batch[{name!r}] is a {type(values).__name__}, expected a numpy.ndarray or a sequence with one element per row"
        )
    return np.fromiter(values, object, len(values))


def renamed(fields: Mapping[str, Any], old: str | Sequence[str], new: str | Sequence[str], others: Iterable[str]) -> dict[str, Any]:
    """Returns the fields under new names, in the same order. Two fields may swap names.

    Args:
        fields: The fields of `batch`.
        old: One name or several, of some of the fields.
        new: As many new names.
        others: Names that the new ones must not collide with.

    Raises:
        KeyError: An old name is unknown.
        ValueError: The lists differ in length, or a name would be used twice.
    """
    old = [old] if isinstance(old, str) else list(old)
    new = [new] if isinstance(new, str) else list(new)
    if len(old) != len(new):
        raise ValueError(f"got {len(new)} new names for {len(old)} old ones, expected as many")
    pick(fields, old, "batch")
    new_names = dict(zip(old, new, strict=True))
    names = [new_names.get(name, name) for name in fields]
    taken = [*names, *others]
    twice = sorted({name for name in taken if taken.count(name) > 1})
    if twice or len(new_names) != len(old):
        raise ValueError(f"cannot rename {old} to {new}: {twice or old} used twice")
    return fields.renamed(new_names) if isinstance(fields, Columns) else dict(zip(names, fields.values(), strict=True))


def merged(mine: Mapping[str, Any], theirs: Mapping[str, Any], part: str) -> Any:
    """Returns the fields of both, mine first; a field in both is loaded and must be equal, NaN counting as equal to NaN.

    Raises:
        SchemaError: A field is in both with different values, dtypes or shapes.
    """
    for name in theirs:
        if name in mine and not values_equal(mine[name], theirs[name]):
            raise SchemaError(f"{part}[{name!r}] is in both batches, {_difference(theirs[name], mine[name])}")
    return (
        mine.union(theirs) if isinstance(mine, Columns) else {**mine, **{name: value for name, value in theirs.items() if name not in mine}}
    )


def _difference(value: Any, expected: Any) -> str:
    columns = isinstance(value, Column) and isinstance(expected, Column)
    if not columns:
        return f"got {short_repr(value)}, expected {short_repr(expected)}"
    if describe(value) != describe(expected):
        return f"got {describe(value)}, expected {describe(expected)}"
    unequal = (row for row in range(len(value)) if not values_equal(value[row : row + 1], expected[row : row + 1]))
    row = next(unequal, 0)
    return f"row {row} is {short_repr(value[row])}, expected {short_repr(expected[row])}"


def join_values(values: Sequence[Any]) -> Any:
    """Joins the loaded parts of one column."""
    return join("", values)


def in_form(column: Any, form: str) -> Any:
    """A column as a `Ragged` where it has row lengths (`ragged`), or padded on the right (`padded`). What is pending stays so if it can."""
    if form == "as-put":
        return column
    if form == "ragged":
        return lazy.as_ragged(column) if isinstance(column, Pending) else column
    value = column.value() if isinstance(column, Pending) and column.kind == "a Ragged" else column
    return value.to_padded() if isinstance(value, Ragged) else value


def join_fields(batches: Sequence[Mapping[str, Any]], part: str) -> dict[str, Any]:
    """Joins the columns of batches along the rows, see `join`.

    Raises:
        SchemaError: A batch lacks a field of the first one, or has another.
    """
    batches = [held(fields) for fields in batches]
    expected = batches[0].keys()
    for position, fields in enumerate(batches):
        if fields.keys() != expected:
            missing = [name for name in expected if name not in fields]
            extra = [name for name in fields if name not in expected]
            raise SchemaError(f"{part} of batch {position} differs from batch 0: missing fields {missing}, unexpected fields {extra}")
    return {name: join(name, [fields[name] for fields in batches]) for name in expected}
