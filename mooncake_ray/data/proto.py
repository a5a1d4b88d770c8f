"""`DataProto`: a batch of rows with the method names and semantics of `verl.DataProto`."""

from __future__ import annotations

import builtins
import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from mooncake_ray.data import ops
from mooncake_ray.data.conversions import Conversions
from mooncake_ray.data.equality import values_equal
from mooncake_ray.data.indices import RowIndex, row_numbers
from mooncake_ray.data.item import DataProtoItem
from mooncake_ray.data.lazy import Columns, load_columns
from mooncake_ray.data.meta import join_meta
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.data.reports import Reports
from mooncake_ray.data.reshaping import AUTO_PADDING, Reshaping, chunk_bounds
from mooncake_ray.data.schema import FieldSchema, from_declared
from mooncake_ray.errors import SchemaError


class DataProto(Reshaping, Conversions, Reports):
    """A batch of rows: tensor columns, array columns, and facts about the batch as a whole.

    The three dicts are the batch's own (shallow copies of what the constructor got); the columns
    in them share storage with the caller's. A field name is used by one of the two column parts
    only. A batch without any column has no rows.

    Methods have verl's names and results. They are stricter: what verl checks by assert or not at all raises a typed error before anything
    is changed, `concat` never converts a tensor, and numbers of rows are checked. `all_gather_data_proto` is left out.

    Attributes:
        batch: Dense tensors of shape (rows, ...), of any dtype, and ragged columns. A jagged tensor becomes a ragged column. A mapping, as
            `non_tensor_batch`: columns that came out of a store are loaded when they are first touched.
        non_tensor_batch: Arrays of shape (rows, ...), of any dtype, often object.
        meta_info: Values that belong to no row.
    """

    def __init__(
        self,
        batch: Mapping[str, torch.Tensor | Ragged] | None = None,
        non_tensor_batch: Mapping[str, np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Wraps columns without copying them.

        A subclass must accept these three keyword arguments: results are built with them.

        Raises:
            SchemaError: See `check_consistency`.
        """
        self.batch: Columns = ops.own_columns(batch, "batch")
        self.non_tensor_batch: Columns = ops.own_columns(non_tensor_batch, "non_tensor_batch")
        self.meta_info: dict[str, Any] = ops.own_dict(meta_info, "meta_info")
        self.check_consistency()

    @classmethod
    def _of(cls, batch: Columns, non_tensor_batch: Columns, meta_info: dict[str, Any]) -> Self:
        """What is known to be consistent, unchecked."""
        out = cls.__new__(cls)
        out.batch, out.non_tensor_batch, out.meta_info = batch, non_tensor_batch, meta_info
        return out

    def load(self, names: Iterable[str] | None = None) -> Self:
        """Loads columns that are still in the store, their bytes by one vectored request, and returns this batch.

        A pending column is otherwise loaded when it is first touched. Rows of pending columns are selected, and batches of them joined and
        passed on, without loading them.

        Args:
            names: which columns; None for all.

        Raises:
            CorruptBlockError: the stored bytes are damaged.
        """
        names = None if names is None else set(ops.as_names(names))
        load_columns([self.batch, self.non_tensor_batch], names)
        return self

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any] | None = None,
        non_tensors: Mapping[str, np.ndarray | Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
        schema: Iterable[FieldSchema] | None = None,
    ) -> Self:
        """Builds a batch from separate dicts.

        Args:
            tensors: Tensors of shape (rows, ...), jagged tensors or ragged columns. A list, where the schema says that the field is ragged.
            non_tensors: Arrays of shape (rows, ...), or sequences with one element per row, which
                become object arrays of shape (rows,).
            meta_info: Values that belong to no row.
            num_batch_dims: 1; no other number works in verl either.
            auto_padding: Marks the batch, in its meta_info, as one that `chunk` may cut unequally.
            schema: What fields have to be, see `validate`.

        Returns:
            A batch that shares the storage of tensors and arrays.

        Raises:
            SchemaError: Columns disagree with each other or with the schema.
        """
        if num_batch_dims != 1:
            raise ValueError(f"num_batch_dims must be 1, got {num_batch_dims}")
        schema = None if schema is None else list(schema)
        columns = {
            name: value if isinstance(value, np.ndarray) else ops.object_column(name, value)
            for name, value in ops.own_dict(non_tensors, "non_tensors").items()
        }
        meta = ops.own_dict(meta_info, "meta_info") | ({AUTO_PADDING: True} if auto_padding else {})
        batch = from_declared(ops.own_dict(tensors, "tensors"), schema or ())
        made = cls(batch=batch, non_tensor_batch=columns, meta_info=meta)
        return made if schema is None else made.validate(schema)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, torch.Tensor | Ragged | np.ndarray], meta_info: Mapping[str, Any] | None = None, auto_padding: bool = False
    ) -> Self:
        """Builds a batch from one dict: tensors and ragged columns go to `batch`, arrays to `non_tensor_batch`.

        Returns:
            A batch that shares the storage of the columns.

        Raises:
            SchemaError: A value is none of them.
        """
        tensors, arrays = ops.split_by_type(ops.own_dict(data, "data"))
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    def check_consistency(self) -> None:
        """Checks the columns, for use after editing the dicts directly.

        Raises:
            SchemaError: Types, row counts or names of the columns are wrong.
        """
        ops.check_columns(self.batch, self.non_tensor_batch)

    def __len__(self) -> int:
        return ops.row_count(self.batch, self.non_tensor_batch) or 0

    def __repr__(self) -> str:
        columns = ops.describe_columns(self.batch, self.non_tensor_batch)
        return f"{type(self).__name__}(rows={len(self)}, {columns}, meta_info={list(self.meta_info)})"

    def equals(self, other: object) -> bool:
        """Compares bit by bit: the same fields, dtypes, shapes and bits, and the same meta_info.

        NaNs are equal where their bits are, and 0.0 differs from -0.0. The order of the fields,
        strides and devices do not matter.
        """
        if not isinstance(other, DataProto):
            return False
        mine = (dict(self.batch), dict(self.non_tensor_batch), self.meta_info)
        theirs = (dict(other.batch), dict(other.non_tensor_batch), other.meta_info)
        return values_equal(mine, theirs, exact=True)

    def __getitem__(self, item: Any) -> Any:
        """Selects rows.

        Args:
            item: An int, a slice, or a list, array or tensor of row numbers or of booleans.

        Returns:
            For an int a `DataProtoItem`, whose rows are views. For a slice see `slice`, otherwise
            see `select_idxs`.
        """
        if isinstance(item, builtins.slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | np.ndarray | torch.Tensor):
            return self.select_idxs(item)
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            rows = len(self)
            if not -rows <= item < rows:
                raise IndexError(f"row {item} is out of range for {rows} rows")
            tensors = {name: ops.row_of(column, item) for name, column in self.batch.items()}
            elements = {name: ops.row_of(array, item) for name, array in self.non_tensor_batch.items()}
            return DataProtoItem(tensors, elements, dict(self.meta_info))
        raise TypeError(f"rows cannot be indexed with {type(item).__name__}, expected an int, slice, list, numpy.ndarray or torch.Tensor")

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Selects a range of rows, like `data[start:end:step]`.

        Returns:
            A batch whose columns are views of this one's; ragged ones are copies where there is a step.

        Raises:
            ValueError: `step` is not positive; torch has no views with negative strides.
        """
        if step is not None and step < 1:
            raise ValueError(f"step must be at least 1, got {step}")
        rows = builtins.slice(start, end, step)
        tensors = {name: ops.slice_rows(column, rows) for name, column in self.batch.peeks().items()}
        arrays = {name: ops.slice_rows(array, rows) for name, array in self.non_tensor_batch.peeks().items()}
        return type(self)(batch=tensors, non_tensor_batch=arrays, meta_info=self.meta_info)

    def select_idxs(self, idxs: RowIndex) -> Self:
        """Selects rows by number or by mask, in the given order and as often as given.

        Args:
            idxs: 1-D row numbers (negative ones count from the end), or booleans of length rows.

        Returns:
            A batch of copies of the selected rows. Ragged columns are views where the rows are neighbours in order.

        Raises:
            IndexError: A number is out of range, or the index has a wrong shape, length or dtype.
        """
        return self._take(row_numbers(idxs, len(self)))

    def _take(self, numbers: np.ndarray) -> Self:
        tensors = {name: ops.take_rows(column, numbers) for name, column in self.batch.peeks().items()}
        arrays = {name: ops.take_rows(array, numbers) for name, array in self.non_tensor_batch.peeks().items()}
        return type(self)(batch=tensors, non_tensor_batch=arrays, meta_info=self.meta_info)

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Selects fields; None keeps all fields of that part.

        Args:
            batch_keys: Names of tensor columns.
            non_tensor_batch_keys: Names of array columns.
            meta_info_keys: Keys of meta_info.
            deepcopy: Copy array columns and meta_info. Tensors are shared in any case.

        Returns:
            A batch that shares its columns with this one.

        Raises:
            KeyError: A name is unknown.
        """
        tensors, arrays, meta = self.batch, self.non_tensor_batch, self.meta_info
        if batch_keys is not None:
            tensors = ops.pick(tensors, ops.as_names(batch_keys), "batch")
        if non_tensor_batch_keys is not None:
            arrays = ops.pick(arrays, ops.as_names(non_tensor_batch_keys), "non_tensor_batch")
        if meta_info_keys is not None:
            meta = ops.pick(meta, ops.as_names(meta_info_keys), "meta_info")
        if deepcopy:
            arrays, meta = copy.deepcopy(arrays), copy.deepcopy(meta)
        return type(self)(batch=tensors, non_tensor_batch=arrays, meta_info=meta)

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Takes fields out of this batch; None takes none of that part.

        Returns:
            A batch of the fields taken out, nothing copied.

        Raises:
            KeyError: A name is unknown. Nothing has been taken out then.
        """
        tensors = ops.pick(self.batch, ops.as_names(batch_keys), "batch")
        arrays = ops.pick(self.non_tensor_batch, ops.as_names(non_tensor_batch_keys), "non_tensor_batch")
        meta = ops.pick(self.meta_info, ops.as_names(meta_info_keys), "meta_info")
        popped = type(self)(batch=tensors, non_tensor_batch=arrays, meta_info=meta)
        parts = ((self.batch, tensors), (self.non_tensor_batch, arrays), (self.meta_info, meta))
        for fields, taken in parts:
            for name in taken:
                del fields[name]
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Renames tensor columns in place, and returns this batch.

        Args:
            old_keys: One name or a list of names in `batch`.
            new_keys: As many new names. Two columns may swap their names.

        Raises:
            KeyError: An old name is unknown.
            ValueError: The lists differ in length, or a new name would be used twice.
        """
        self.batch = ops.renamed(self.batch, old_keys, new_keys, others=self.non_tensor_batch)
        return self

    def union(self, other: DataProto) -> Self:
        """Adds the fields of another batch of the same rows in place, and returns this batch.

        Args:
            other: It is not changed; its columns are shared, not copied.

        Raises:
            SchemaError: The row counts differ, or both have a field with unequal values, dtypes or
                shapes (NaN equals NaN). Nothing has been added then.
        """
        if not isinstance(other, DataProto):
            raise SchemaError(f"union with a {type(other).__name__}, expected a DataProto")
        batch = ops.merged(self.batch, other.batch, "batch")
        arrays = ops.merged(self.non_tensor_batch, other.non_tensor_batch, "non_tensor_batch")
        meta = ops.merged(self.meta_info, other.meta_info, "meta_info")
        ops.check_columns(batch, arrays)
        self.batch, self.non_tensor_batch, self.meta_info = batch, arrays, meta
        return self

    def chunk(self, chunks: int) -> list[Self]:
        """Cuts the rows into `chunks` batches of equal size.

        Where `is_padding_enabled`, sizes may differ as verl's do: the last one is smaller, and without tensor columns they differ by one.

        Returns:
            Batches whose columns are views of this one's.

        Raises:
            ValueError: The rows cannot be divided evenly, or not into so many batches that have rows.
        """
        bounds = chunk_bounds(len(self), chunks, self.is_padding_enabled(), by_tensors=bool(self.batch))
        return [self.slice(start, stop) for start, stop in itertools.pairwise(bounds)]

    def split(self, split_size: int) -> list[Self]:
        """Cuts the rows into batches of `split_size`; the last one may be smaller.

        Returns:
            Batches whose columns are views of this one's.
        """
        if split_size < 1:
            raise ValueError(f"split_size must be at least 1, got {split_size}")
        return [self.slice(i, i + split_size) for i in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Joins batches along the rows.

        Args:
            data: At least one batch, all with the same fields, tensor dtypes and row shapes.

        Returns:
            A batch of the first one's type with new storage (ragged columns of a single batch excepted). In meta_info, `metrics` becomes a dict
            of lists over the batches; every other key keeps its value.

        Raises:
            ValueError: `data` is empty.
            SchemaError: Fields, dtypes, row shapes or meta_info disagree.
        """
        if not data:
            raise ValueError("cannot concat an empty list, expected at least one batch")
        for item in data:
            if not isinstance(item, DataProto):
                raise SchemaError(f"concat of a {type(item).__name__}, expected a DataProto")
        batches = [item.batch for item in data]
        arrays = [item.non_tensor_batch for item in data]
        return type(data[0])(
            batch=ops.join_fields(batches, "batch"),
            non_tensor_batch=ops.join_fields(arrays, "non_tensor_batch"),
            meta_info=join_meta([item.meta_info for item in data]),
        )

    def reorder(self, indices: RowIndex) -> None:
        """Replaces the rows by `select_idxs(indices)`, in place. The old storage is not written to."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeats every row.

        Args:
            repeat_times: How often; at least 0.
            interleave: True gives rows 0, 0, 1, 1; False gives 0, 1, 0, 1.

        Returns:
            A batch of rows * repeat_times copies.
        """
        if repeat_times < 0:
            raise ValueError(f"repeat_times must be at least 0, got {repeat_times}")
        rows = np.arange(len(self))
        return self._take(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def to(self, device: torch.device | str | int) -> Self:
        """Moves the tensor columns to a device, in place, and returns this batch."""
        self.batch = Columns({name: ops.to_device(column, device) for name, column in self.batch.items()})
        return self
