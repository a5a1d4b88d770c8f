"""Lists of dataclasses, such as Miles' and slime's `Sample`, as batches: a field a column, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from mooncake_ray.errors import SchemaError

__all__ = ["batch_to_samples", "samples_to_batch"]

T = TypeVar("T")
_ABSENT = "_absent"  # the column that says which fields a row has not got, where rows differ in that


def samples_to_batch(samples: Sequence[Any]) -> dict[str, list[Any]]:
    """One list a field, with a value a sample. `put_batch` takes it, and lists of token ids become narrow columns.

    A class with `to_dict` and `from_dict` is taken at its own word, so that its enums and nested dataclasses become plain values. Of others
    the dataclass fields are taken, and attributes that were set on an instance besides.

    Raises:
        SchemaError: A sample is not a dataclass instance. Names its number.
    """
    rows = []
    for number, sample in enumerate(samples):
        if not dataclasses.is_dataclass(sample) or isinstance(sample, type):
            raise SchemaError(f"sample {number} is a {type(sample).__name__}, expected an instance of a dataclass")
        rows.append(_to_dict(sample))
    names = list(dict.fromkeys(name for row in rows for name in row))
    batch = {name: [row.get(name) for row in rows] for name in names}
    absent = [tuple(name for name in names if name not in row) for row in rows]
    if any(absent):
        batch[_ABSENT] = absent
    return batch


def batch_to_samples(batch: Any, cls: type[T]) -> list[T]:
    """Instances of `cls` from what `samples_to_batch` made, or from any dict of columns, or batch with `non_tensor_batch` columns.

    Fields that are not there get their defaults, and fields that `cls` has not got are set as attributes.

    Raises:
        SchemaError: Columns differ in length, or a field without a default is missing.
    """
    columns = dict(batch) if isinstance(batch, Mapping) else {**(batch.batch or {}), **batch.non_tensor_batch}
    counts = {name: len(column) for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise SchemaError(f"columns differ in how many rows they have: {counts}")
    absent = columns.pop(_ABSENT, None)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if absent is not None:
        rows = [{name: value for name, value in row.items() if name not in missing} for row, missing in zip(rows, absent, strict=True)]
    return [_from_dict(cls, row, number) for number, row in enumerate(rows)]


def _to_dict(sample: Any) -> dict[str, Any]:
    if _own_dicts(type(sample)):
        return dict(sample.to_dict())
    fields = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
    return {**fields, **getattr(sample, "__dict__", {})}


def _from_dict(cls: type[T], row: dict[str, Any], number: int) -> T:
    if _own_dicts(cls):
        return cls.from_dict(row)  # type: ignore[attr-defined]
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    try:
        made = cls(**{name: value for name, value in row.items() if name in fields and fields[name].init})
    except TypeError as e:
        raise SchemaError(f"row {number} makes no {cls.__name__}: {e}") from e
    for name, value in row.items():
        if name not in fields or not fields[name].init:
            object.__setattr__(made, name, value)  # a frozen class, too, had it
    return made


def _own_dicts(cls: type) -> bool:
    return hasattr(cls, "to_dict") and hasattr(cls, "from_dict")
