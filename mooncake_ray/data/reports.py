"""What a batch says about itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from mooncake_ray.data import ops
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.data.schema import FieldSchema, conform, infer
from mooncake_ray.errors import SchemaError

__all__ = ["Reports"]

_GB = 1024**3  # bytes


class Reports:
    """Part of `DataProto`."""

    batch: Any
    non_tensor_batch: Any
    meta_info: Any

    def schema(self) -> tuple[FieldSchema, ...]:
        """What each column is: those of `batch`, then those of `non_tensor_batch`."""
        return tuple(infer(name, column) for name, column in (*self.batch.items(), *self.non_tensor_batch.items()))

    def validate(self, schemas: Iterable[FieldSchema]) -> Self:
        """Checks columns against what they are declared to be. Columns that are not declared may be anything.

        Returns:
            A batch in which declared columns have the declared dtype; the others, and those that have it already, are shared.

        Raises:
            SchemaError: A declared field is missing or has another kind, shape of rows or null rows than declared, or a value that is not
                exact in the declared dtype. Names the field, the row, what was found and what was expected.
        """
        batch, arrays = dict(self.batch), dict(self.non_tensor_batch)
        for schema in schemas:
            fields = batch if schema.name in batch else arrays
            if schema.name not in fields:
                raise SchemaError(f"field {schema.name!r} is missing, expected {schema}; there are {[*batch, *arrays]}")
            fields[schema.name] = conform(fields[schema.name], schema)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=self.meta_info)  # type: ignore[call-arg]

    def print_size(self, prefix: str = "") -> None:
        """Prints how large the columns are, in GiB. Of object arrays the pointers are counted."""
        tensors = sum(column.nbytes for column in self.batch.values()) / _GB
        arrays = sum(column.nbytes for column in self.non_tensor_batch.values()) / _GB
        message = f"Size of tensordict: {tensors} GB, size of non_tensor_batch: {arrays} GB"
        print(f"{prefix}, {message}" if prefix else message)

    def get_data_info(self) -> str:
        """Lines of text: shape, dtype and device of every column, and the types in meta_info."""
        info = ["batch"]
        for name, column in self.batch.items():
            shape = str((ops.rows_in(column), *ops.row_shape(column))).replace("None", "*")
            kind = "Ragged" if isinstance(column, Ragged) else ""
            info.append(f"  {name}: {kind}{shape} ({column.dtype}) {column.device}")
        info.append("non_tensor_batch")
        info += [f"  {name}: ndarray{array.shape} ({array.dtype})" for name, array in self.non_tensor_batch.items()]
        info.append("meta_info")
        info += [f"  {key}: {_type_text(value)}" for key, value in self.meta_info.items()]
        return "\n".join(info)


def _type_text(value: Any) -> str:
    """The type of a value, and of some of what is in it."""
    if isinstance(value, list):
        kinds = dict.fromkeys(_type_text(item) for item in value[:3])
        return f"list[{'|'.join(kinds) or '...'}]"
    if isinstance(value, tuple):
        return f"tuple({', '.join(_type_text(item) for item in value)})"
    if isinstance(value, dict) and value:
        key, item = next(iter(value.items()))
        return f"dict[{_type_text(key)}: {_type_text(item)}]"
    if isinstance(value, np.ndarray):
        return f"ndarray{value.shape} ({value.dtype})"
    return type(value).__name__
