"""What a column is declared to be, and whether it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from mooncake_ray.data.bits import dtype_name, named_dtype
from mooncake_ray.data.exact import as_dtype, converted
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.errors import SchemaError

__all__ = ["FieldSchema", "conform", "from_declared", "infer"]


@dataclass(frozen=True)
class FieldSchema:
    """What one column is.

    Attributes:
        name: Of the field.
        kind: "dense" for a tensor or an array of numbers or strings, "ragged" for a `Ragged`, "object" for an array of Python objects.
        dtype: torch's name of it (NumPy's, for an array: `<U3`), None for any and for objects.
        row_shape: Shape of a row. None in it is a ragged dimension, and in a dense column's a dimension of any size. None alone: any shape.
        nullable: Whether rows may be null: of ragged columns, and None among objects. Dense ones have no null.
        levels: Ragged dimensions; 0 unless ragged.
    """

    name: str
    kind: Literal["dense", "ragged", "object"]
    dtype: str | None = None
    row_shape: tuple[int | None, ...] | None = None
    nullable: bool = False
    levels: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("dense", "ragged", "object"):
            raise SchemaError(f"field {self.name!r} is declared {self.kind!r}, expected 'dense', 'ragged' or 'object'")
        if self.dtype is not None and named_dtype(self.dtype) is None and (self.kind != "dense" or not _is_numpy(self.dtype)):
            raise SchemaError(f"field {self.name!r} is declared with the dtype {self.dtype!r}, which there is not")
        ragged = self.kind == "ragged"
        if self.levels is None:
            known = self.row_shape.count(None) if ragged and self.row_shape is not None else int(ragged)
            object.__setattr__(self, "levels", known)
        if (self.levels > 0) is not ragged or (ragged and self.row_shape is not None and self.row_shape.count(None) != self.levels):
            raise SchemaError(f"field {self.name!r} is declared {self.kind} with {self.levels} levels and rows {self.row_shape}")

    def __str__(self) -> str:
        shape = "" if self.row_shape is None else f"[{', '.join('*' if n is None else str(n) for n in self.row_shape)}]"
        return f"{self.kind} {self.dtype or 'of any dtype'}{shape}{' nullable' if self.nullable else ''}"


def _is_numpy(name: str) -> bool:
    try:
        np.dtype(name)
    except TypeError:
        return False
    return True


def infer(name: str, column: Any) -> FieldSchema:
    """What a column is."""
    if isinstance(column, Ragged):
        return FieldSchema(name, "ragged", dtype_name(column.dtype), column.full_row_shape, column.null_count > 0, column.levels)
    if isinstance(column, np.ndarray) and column.dtype == object:
        return FieldSchema(name, "object", None, tuple(column.shape[1:]), _first_none(column) is not None, 0)
    return FieldSchema(name, "dense", dtype_name(column.dtype), tuple(column.shape[1:]), False, 0)


def _first_none(column: Any) -> int | None:
    """The first null row."""
    if isinstance(column, Ragged):
        return None if not column.null_count else int((~column.valid).nonzero()[0])
    return next((row for row, element in enumerate(column.reshape(len(column), -1)) if any(x is None for x in element)), None)


def conform(column: Any, schema: FieldSchema) -> Any:
    """The column with the declared dtype, itself where it has it.

    Raises:
        SchemaError: It is something else than declared, or a value is not exact in the declared dtype.
    """
    found = infer(schema.name, column)
    if found.kind != schema.kind or (found.kind == "ragged" and found.levels != schema.levels) or not _shape_fits(found, schema):
        raise SchemaError(f"field {schema.name!r} is {found}, expected {schema}")
    if found.nullable and not schema.nullable:
        raise SchemaError(f"field {schema.name!r}, row {_first_none(column)} is null, expected {schema}")
    if schema.dtype is None or schema.dtype == found.dtype:
        return column
    what = f"field {schema.name!r}"
    dtype = named_dtype(schema.dtype)
    if isinstance(column, np.ndarray):
        return _array_as(column, schema, dtype)
    if dtype is None:
        raise SchemaError(f"{what} is {found}, expected {schema}")
    return _ragged_as(column, dtype, what) if isinstance(column, Ragged) else as_dtype(column, dtype, what)


def _shape_fits(found: FieldSchema, schema: FieldSchema) -> bool:
    if schema.row_shape is None:
        return True
    if len(found.row_shape) != len(schema.row_shape):
        return False
    anything = schema.kind != "ragged"
    return all(n == m or (m is None and anything) for n, m in zip(found.row_shape, schema.row_shape, strict=True))


def _array_as(column: np.ndarray, schema: FieldSchema, dtype: torch.dtype | None) -> np.ndarray:
    if dtype is None or column.dtype.kind not in "biufc" or not _is_numpy(schema.dtype) or not column.dtype.isnative:
        raise SchemaError(f"field {schema.name!r} is an array of {column.dtype}, expected {schema}")
    return as_dtype(torch.from_numpy(np.ascontiguousarray(column)), dtype, f"field {schema.name!r}").numpy()


def _ragged_as(column: Ragged, dtype: torch.dtype, what: str) -> Ragged:
    """Exactly that dtype at the deepest level; an error names the row of the column, not of what is in it."""
    part, levels = column.compact(), []
    values: Any = part
    while isinstance(values, Ragged):
        levels.append(values)
        values = values.values
    result, bad = converted(values, dtype)
    if bad is not None:
        place = bad // max(1, values.shape[1:].numel())
        for level in reversed(levels):
            place = int(np.searchsorted(level.offsets.numpy(), place, side="right")) - 1
        value = values.detach().reshape(-1)[bad].item()
        raise SchemaError(f"{what}, row {place}: {value!r} ({dtype_name(column.dtype)}) is not exact as {dtype_name(dtype)}")
    for level in reversed(levels):
        result = Ragged(result, level.offsets, level.valid, level.ragged_dim)
    return result


def from_declared(fields: Mapping[str, Any], schemas: Iterable[FieldSchema]) -> dict[str, Any]:
    """The fields, with lists of those declared ragged as columns.

    Raises:
        SchemaError: A number in a list is not exact in the declared dtype.
    """
    made = dict(fields)
    for schema in schemas:
        value = made.get(schema.name)
        if schema.kind != "ragged" or not isinstance(value, list | tuple):
            continue
        dtype = None if schema.dtype is None else named_dtype(schema.dtype)
        try:
            if any(isinstance(row, torch.Tensor) for row in value):
                made[schema.name] = Ragged.from_tensors(value, dtype)
            else:
                made[schema.name] = Ragged.from_lists(value, dtype, schema.levels)
        except SchemaError as error:
            raise SchemaError(f"field {schema.name!r}, {error}") from None
    return made
