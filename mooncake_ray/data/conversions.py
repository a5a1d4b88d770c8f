"""Batches from and to verl's DataProto, TensorDicts and files."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from mooncake_ray.data import ops
from mooncake_ray.data.bits import dtype_name, flat_bytes, is_plain, named_tensor
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.errors import SchemaError

__all__ = ["Conversions"]


class Conversions:
    """Part of `DataProto`. Everything but files shares the columns' storage; of ragged ones too, as jagged tensors."""

    batch: Any
    non_tensor_batch: Any
    meta_info: Any
    _lists: frozenset[str] = frozenset()  # arrays of objects that were lists

    def to_verl(self) -> Any:
        """Returns a `verl.DataProto` that shares the columns. Needs verl.

        Raises:
            SchemaError: A ragged column has null rows, or rows of rows, which jagged tensors have not.
        """
        from verl import DataProto as VerlDataProto

        return VerlDataProto.from_dict(
            tensors=_as_tensors(self.batch), non_tensors=dict(self.non_tensor_batch), meta_info=dict(self.meta_info)
        )

    @classmethod
    def from_verl(cls, data: Any) -> Self:
        """Returns a batch that shares the columns of a `verl.DataProto`. Needs verl.

        Raises:
            SchemaError: `data` is something else, or has a nested tensor that is not jagged.
        """
        from verl import DataProto as VerlDataProto

        if not isinstance(data, VerlDataProto):
            raise SchemaError(f"got a {type(data).__name__}, expected a verl.DataProto")
        return cls(batch=data.batch, non_tensor_batch=data.non_tensor_batch, meta_info=data.meta_info)  # type: ignore[call-arg]

    def to_tensordict(self) -> Any:
        """Returns a `TensorDict` that shares the tensors: arrays as NonTensorStack of their elements, meta_info as NonTensorData.

        Raises:
            SchemaError: A key of meta_info is a column's name, or a ragged column has null rows or rows of rows.
        """
        from tensordict import NonTensorData, NonTensorStack, TensorDict

        fields = _as_tensors(self.batch)
        for name, array in self.non_tensor_batch.items():
            fields[name] = NonTensorStack.from_list([NonTensorData(element) for element in array])
        for name, value in self.meta_info.items():
            if name in fields:
                raise SchemaError(f"meta_info[{name!r}] has the name of a column, which a TensorDict cannot hold apart")
            fields[name] = NonTensorData(value)
        columns = len(self.batch) + len(self.non_tensor_batch)
        return TensorDict(fields, batch_size=[len(self)] if columns else [])  # type: ignore[arg-type]

    @classmethod
    def from_tensordict(cls, tensor_dict: Any, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1) -> Self:
        """The reverse of `to_tensordict`; arrays come back as object arrays of shape (rows,).

        Args:
            tensor_dict: A TensorDict, whose values are tensors, NonTensorStack or NonTensorData.
            meta_info: More of it; what is in the TensorDict goes first.
            num_batch_dims: 1; no other number works in verl either.

        Raises:
            SchemaError: A value is something else, as a nested TensorDict.
        """
        from tensordict import NonTensorData, NonTensorStack

        if num_batch_dims != 1:
            raise ValueError(f"num_batch_dims must be 1, got {num_batch_dims}")
        batch, arrays, meta = {}, {}, dict(meta_info or {})
        for name, value in tensor_dict.items():
            if isinstance(value, torch.Tensor):
                batch[name] = value
            elif isinstance(value, NonTensorStack):
                arrays[name] = ops.object_column(name, [element.data for element in value])
            elif isinstance(value, NonTensorData):
                meta[name] = value.data
            else:
                raise SchemaError(f"field {name!r} is a {type(value).__name__}, expected a tensor, a NonTensorStack or NonTensorData")
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta)  # type: ignore[call-arg]

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> Self:
        """Returns a batch of a dict of columns: tensors (jagged ones too) and `Ragged`, arrays, and lists with an element a row.

        Raises:
            SchemaError: A value is none of these, or the columns do not have equally many rows.
        """
        lists = [name for name, value in columns.items() if isinstance(value, list)]
        whole = {name: ops.object_column(name, value) if isinstance(value, list) else value for name, value in columns.items()}
        tensors, arrays = ops.split_by_type(whole)
        made = cls(batch=tensors, non_tensor_batch=arrays, meta_info=meta_info)  # type: ignore[call-arg]
        made._lists = frozenset(lists)
        return made

    def to_columns(self) -> dict[str, Any]:
        """The reverse of `from_columns`: a dict of all columns, tensors first; what was a list is one again."""
        lists = self._lists
        return {**self.batch, **{name: array.tolist() if name in lists else array for name, array in self.non_tensor_batch.items()}}

    def save_to_disk(self, filepath: str | Path) -> None:
        """Pickles the batch into a file. Of columns that are parts of larger ones, the file has the part only."""
        with open(filepath, "wb") as file:
            _Pickler(file, protocol=5).dump(self)

    @staticmethod
    def load_from_disk(filepath: str | Path) -> Any:
        """The batch that `save_to_disk` wrote. As with any pickle, a file from someone else can run code.

        Raises:
            SchemaError: The file has something else.
        """
        with open(filepath, "rb") as file:
            data = pickle.load(file)
        if not isinstance(data, Conversions):
            raise SchemaError(f"{str(filepath)!r} has a {type(data).__name__}, expected a DataProto")
        return data


def _as_tensors(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, column in batch.items():
        try:
            tensors[name] = column.to_jagged() if isinstance(column, Ragged) else column
        except SchemaError as error:
            raise SchemaError(f"batch[{name!r}]: {error}") from None
    return tensors


class _Pickler(pickle.Pickler):
    """Tensors as bytes: torch's own way takes the whole storage around a part, and cannot read back some of its dtypes."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and is_plain(obj) and obj.device.type == "cpu" and not obj.requires_grad:
            return named_tensor, (flat_bytes(obj).numpy(), dtype_name(obj.dtype), tuple(obj.shape))
        return NotImplemented
