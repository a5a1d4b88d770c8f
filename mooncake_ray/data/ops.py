"""What `DataProto` is made of: checks, row indices and joins of columns.

A column is a dense `torch.Tensor` or a `numpy.ndarray` whose first dimension is the rows of the
batch. Nothing here changes its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from reprlib import repr as short_repr
from typing import Any

import numpy as np
import torch

from mooncake_ray.data.equality import values_equal
from mooncake_ray.errors import SchemaError

Column = torch.Tensor | np.ndarray


def as_names(keys: str | Iterable[str] | None) -> list[str]:
    """Returns field names as a list without duplicates; one string is one name, None is no name."""
    if keys is None:
        return []
    return [keys] if isinstance(keys, str) else list(dict.fromkeys(keys))


def pick(fields: Mapping[str, Any], names: Iterable[str], part: str) -> dict[str, Any]:
    """Returns the named fields, in the order of `names`.

    Raises:
        KeyError: A name is unknown. The message lists the known ones.
    """
    names = list(names)
    unknown = [name for name in names if name not in fields]
    if unknown:
        raise KeyError(f"{part} has no {unknown}; it has {list(fields)}")
    return {name: fields[name] for name in names}


def own_dict(fields: Any, part: str) -> dict[str, Any]:
    """Returns a new dict of the same values, so later edits do not reach the caller's mapping.

    Anything with `items()` is taken, because a TensorDict is no `dict`.
    """
    if fields is None:
        return {}
    if not hasattr(fields, "items"):
        raise SchemaError(f"{part} is a {type(fields).__name__}, expected a dict")
    return dict(fields.items())


def row_count(*parts: Mapping[str, Column]) -> int | None:
    """Returns the rows of the first column found, or None where there is no column."""
    for part in parts:
        for column in part.values():
            return int(column.shape[0])
    return None


def check_columns(batch: Mapping[str, Any], non_tensor_batch: Mapping[str, Any]) -> None:
    """Checks that all columns have their part's type and the same number of rows.

    Raises:
        SchemaError: A column has the wrong type, no row dimension, a row count that differs from
            the first column's, or a name that both parts use.
    """
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            raise SchemaError(f"batch[{name!r}] is a {type(value).__name__}, expected a torch.Tensor")
        if value.is_nested or value.layout is not torch.strided:
            kind = "nested" if value.is_nested else "sparse"
            raise SchemaError(f"batch[{name!r}] is a {kind} tensor ({value.layout}), expected a dense one")
    for name, value in non_tensor_batch.items():
        if not isinstance(value, np.ndarray):
            raise SchemaError(f"non_tensor_batch[{name!r}] is a {type(value).__name__}, expected a numpy.ndarray")
        if name in batch:
            raise SchemaError(f"field {name!r} is in both batch and non_tensor_batch")

    first: tuple[str, int] | None = None
    for part, columns in (("batch", batch), ("non_tensor_batch", non_tensor_batch)):
        for name, column in columns.items():
            if not isinstance(name, str):
                raise SchemaError(f"{part} has the field name {name!r}, expected a str")
            if column.ndim == 0:
                raise SchemaError(f"{part}[{name!r}] is a scalar, expected rows in its first dimension")
            rows = int(column.shape[0])
            if first is None:
                first = name, rows
            elif rows != first[1]:
                raise SchemaError(f"{part}[{name!r}] has {rows} rows, expected {first[1]} as in {first[0]!r}")


def describe_columns(batch: Mapping[str, torch.Tensor], non_tensor_batch: Mapping[str, np.ndarray]) -> str:
    """Returns dtype and shape of every column, and their bytes (of object arrays: of the pointers)."""
    columns: list[Column] = [*batch.values(), *non_tensor_batch.values()]
    parts = [f"bytes={sum(column.nbytes for column in columns)}"]
    for part, fields in (("batch", batch), ("non_tensor_batch", non_tensor_batch)):
        entries = [f"{name}: {str(column.dtype).removeprefix('torch.')}{list(column.shape)}" for name, column in fields.items()]
        parts.append(f"{part}={{{', '.join(entries)}}}")
    return ", ".join(parts)


def split_by_type(
    data: Mapping[str, Any],
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """Returns the tensors and the arrays of a dict that holds both.

    Raises:
        SchemaError: A value is neither a tensor nor an array.
    """
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, np.ndarray):
            arrays[name] = value
        else:
            raise SchemaError(f"field {name!r} is a {type(value).__name__}, expected a torch.Tensor or numpy.ndarray")
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
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def take_rows(tensor: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
    """Returns a copy of the given rows, on the tensor's device."""
    index = torch.from_numpy(numbers).to(tensor.device)
    # index_select copies whole rows, which is faster, but has no 1-D form for uint16 and the like.
    return tensor[index] if tensor.ndim == 1 else tensor.index_select(0, index)


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
    return dict(zip(names, fields.values(), strict=True))


def merged(mine: Mapping[str, Any], theirs: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Returns the fields of both; a field in both must be equal, NaN counting as equal to NaN.

    Raises:
        SchemaError: A field is in both with different values, dtypes or shapes.
    """
    fields = dict(mine)
    for name, value in theirs.items():
        if name not in fields:
            fields[name] = value
        elif not values_equal(fields[name], value):
            raise SchemaError(f"{part}[{name!r}] is in both batches, {_difference(value, fields[name])}")
    return fields


def _difference(value: Any, expected: Any) -> str:
    columns = isinstance(value, Column) and isinstance(expected, Column)
    if not columns:
        return f"got {short_repr(value)}, expected {short_repr(expected)}"
    if value.dtype != expected.dtype or value.shape != expected.shape:
        return f"got {value.dtype}{list(value.shape)}, expected {expected.dtype}{list(expected.shape)}"
    unequal = (row for row in range(len(value)) if not values_equal(value[row : row + 1], expected[row : row + 1]))
    row = next(unequal, 0)
    return f"row {row} is {short_repr(value[row])}, expected {short_repr(expected[row])}"


def join_fields(batches: Sequence[Mapping[str, Any]], part: str, join: Callable[[str, list[Any]], Any]) -> dict[str, Any]:
    """Joins the columns of batches, each with `join(name, parts)`.

    Raises:
        SchemaError: A batch lacks a field of the first one, or has another.
    """
    expected = batches[0].keys()
    for position, fields in enumerate(batches):
        if fields.keys() != expected:
            missing = [name for name in expected if name not in fields]
            extra = [name for name in fields if name not in expected]
            raise SchemaError(f"{part} of batch {position} differs from batch 0: missing fields {missing}, unexpected fields {extra}")
    return {name: join(name, [fields[name] for fields in batches]) for name in expected}


def join_tensors(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Joins tensors along the rows into a new tensor.

    Raises:
        SchemaError: A dtype or a row shape differs from the first part's.
    """
    first = parts[0]
    for position, part in enumerate(parts):
        if part.dtype != first.dtype:  # torch.cat would convert, and may round
            raise SchemaError(f"batch[{name!r}] of batch {position} is {part.dtype}, expected {first.dtype} as in batch 0")
        _check_row_shape("batch", name, position, part.shape, first.shape)
    return torch.cat(parts, dim=0)


def join_arrays(name: str, parts: list[np.ndarray]) -> np.ndarray:
    """Joins arrays along the rows into a new array.

    Numbers of different dtypes get numpy's common dtype, and strings the longest width: these
    dtypes often follow from the values (`np.array([1, 0])` next to `np.array([0.5, 1])`).

    Raises:
        SchemaError: A row shape differs from the first part's, or numpy would turn numbers into
            strings.
    """
    for position, part in enumerate(parts):
        _check_row_shape("non_tensor_batch", name, position, part.shape, parts[0].shape)
    kinds = {part.dtype.kind for part in parts}
    if len(kinds) > 1 and "O" not in kinds and kinds - set("biufc"):
        dtypes = [str(part.dtype) for part in parts]
        raise SchemaError(f"non_tensor_batch[{name!r}] has the dtypes {dtypes}, expected {dtypes[0]} in every batch")
    return np.concatenate(parts, axis=0)


def _check_row_shape(part: str, name: str, position: int, shape: Sequence[int], first: Sequence[int]) -> None:
    if tuple(shape[1:]) != tuple(first[1:]):
        raise SchemaError(
            f"{part}[{name!r}] of batch {position} has rows of shape {tuple(shape[1:])}, expected {tuple(first[1:])} as in batch 0"
        )


def join_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins the meta_info of batches.

    Args:
        metas: One meta_info per batch. The key `metrics` may hold a dict, a list of dicts, or None.

    Returns:
        A new dict of all keys. `metrics` becomes one dict with a list of values per metric, in the
        order of the batches, and is left out where no batch has any.

    Raises:
        SchemaError: Batches disagree on another key, or have a metric the first one does not have.
    """
    joined: dict[str, Any] = {}
    metrics: list[Any] = []
    for position, meta in enumerate(metas):
        for key, value in meta.items():
            if key == "metrics":
                if isinstance(value, list):
                    metrics.extend(value)
                elif value is not None:
                    metrics.append(value)
            elif key not in joined:
                joined[key] = value
            elif not values_equal(joined[key], value):
                raise SchemaError(
                    f"meta_info[{key!r}] of batch {position} is {short_repr(value)}, "
                    f"expected {short_repr(joined[key])} as in the batches before"
                )
    if metrics:
        joined["metrics"] = _metric_lists(metrics)
    return joined


def _metric_lists(metrics: Sequence[Any]) -> dict[str, list[Any]]:
    for entry in metrics:
        if not isinstance(entry, Mapping):
            raise SchemaError(f"meta_info['metrics'] holds a {type(entry).__name__}, expected dicts")
    lists: dict[str, list[Any]] = {name: [] for name in metrics[0]}
    for entry in metrics:
        for name, value in entry.items():
            if name not in lists:
                raise SchemaError(f"meta_info['metrics'] has {name!r} in a later batch only, expected one of {list(lists)}")
            lists[name].append(value)
    return lists
