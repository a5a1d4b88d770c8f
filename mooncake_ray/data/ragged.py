"""`Ragged`: a column whose rows differ in length, without padding: all rows one after the other, and where each begins."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from mooncake_ray.data import ragged_rows
from mooncake_ray.data.bits import dtype_name, flat_bytes, owned
from mooncake_ray.data.block.read import Runs
from mooncake_ray.data.indices import RowIndex, row_numbers
from mooncake_ray.errors import SchemaError

__all__ = ["Ragged"]

Side = Literal["left", "right"]


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Ragged:
    """Row i is `values[offsets[i]:offsets[i + 1]]`, or None where `valid[i]` is False.

    Rows, slices and conversions share memory with what they are made of wherever their doc says "view"; the fields are not to be written
    to. The payload may be on any device, `offsets` and `valid` are on the CPU. Reading from several threads is safe.

    Attributes:
        values: The items of all rows, (items, *row_shape), any dtype. Or another `Ragged`: then a row is a list of that one's rows.
        offsets: int64 (rows + 1,), not falling, within `values`. A slice of rows keeps its offsets, so it need not begin at 0.
        valid: bool (rows,), or None where no row is null. A null row has length 0.
        ragged_dim: Which dimension of a row is the one that differs. Rows of shape (3, n) have 1; `values` is (items, 3) nevertheless.
    """

    values: torch.Tensor | Ragged
    offsets: torch.Tensor
    valid: torch.Tensor | None = None
    ragged_dim: int = 0

    def __post_init__(self) -> None:
        """Checks, and copies nothing but offsets and marks that are on another device.

        Raises:
            SchemaError: A type, a dtype, an offset or a mark is wrong. Names the row and the numbers.
        """
        for name in ("offsets", "valid"):
            tensor = getattr(self, name)
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
                object.__setattr__(self, name, tensor.cpu())
        if not isinstance(self.values, Ragged):
            ragged_rows.check_items(self.values, self.ragged_dim)
        elif self.ragged_dim != 0:
            raise SchemaError(f"ragged_dim is {self.ragged_dim}, expected 0 as rows are lists of rows")
        ragged_rows.check_rows(len(self.values), self.offsets, self.valid)

    @classmethod
    def _of(cls, values: Any, offsets: torch.Tensor, valid: torch.Tensor | None, ragged_dim: int) -> Ragged:
        """What is known to be right, unchecked."""
        made = object.__new__(cls)
        for name, value in (("values", values), ("offsets", offsets), ("valid", valid), ("ragged_dim", ragged_dim)):
            object.__setattr__(made, name, value)
        return made

    # ---------------------------------------------------------------- facts

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def dtype(self) -> torch.dtype:
        """Of the items."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Of the items."""
        return self.values.device

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one item: a row without its ragged dimensions."""
        return self.values.row_shape if isinstance(self.values, Ragged) else tuple(self.values.shape[1:])

    @property
    def levels(self) -> int:
        """Ragged dimensions: 1, or 2 where rows are lists of rows, and so on."""
        return 1 + (self.values.levels if isinstance(self.values, Ragged) else 0)

    @property
    def null_count(self) -> int:
        """How many rows are null."""
        return 0 if self.valid is None else len(self) - int(self.valid.sum())

    @property
    def span(self) -> tuple[int, int]:
        """The part of `values` that the rows cover: first item, and the one after the last."""
        return int(self.offsets[0]), int(self.offsets[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the items that the rows cover."""
        start, stop = self.span
        if isinstance(self.values, Ragged):
            return self.values[start:stop].nbytes
        return (stop - start) * ragged_rows.item_bytes(self.values)

    def lengths(self) -> torch.Tensor:
        """Items of each row, int64 (rows,); 0 for a null row. New memory."""
        return self.offsets.diff()

    def __repr__(self) -> str:
        start, stop = self.span
        nulls = f", nulls={self.null_count}" if self.null_count else ""
        return f"{type(self).__name__}(rows={len(self)}, items={stop - start}, {self.describe()}{nulls})"

    def describe(self) -> str:
        """Dtype and shape of a row, as `int64[*, 3]`: `*` stands for a ragged dimension."""
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join('*' if n is None else str(n) for n in self.full_row_shape)}]"

    @property
    def full_row_shape(self) -> tuple[int | None, ...]:
        """Shape of a row, with None for each ragged dimension."""
        if isinstance(self.values, Ragged):
            return None, *self.values.full_row_shape
        shape: list[int | None] = list(self.values.shape[1:])
        shape.insert(self.ragged_dim, None)
        return tuple(shape)

    def equals(self, other: object) -> bool:
        """Whether rows, nulls, dtype, shapes and every bit are the same. Where the rows lie in memory does not matter."""
        return isinstance(other, Ragged) and self.same_form(other) and ragged_rows.same_bits(self.compact().values, other.compact().values)

    def same_form(self, other: Ragged) -> bool:
        """Whether everything but the items is the same: dtype, shapes, nulls and lengths of the rows."""
        return (
            (self.dtype, self.full_row_shape, len(self)) == (other.dtype, other.full_row_shape, len(other))
            and torch.equal(self.lengths(), other.lengths())
            and torch.equal(ragged_rows.marks(self), ragged_rows.marks(other))
        )

    # ---------------------------------------------------------------- rows

    def __getitem__(self, item: Any) -> Any:
        """An int gives a row: a tensor view, a `Ragged` of the rows it is a list of, or None. Anything else selects rows.

        A slice of step 1 touches no payload. Other slices and lists, arrays and tensors of numbers or booleans: see `select_idxs`.
        """
        if isinstance(item, builtins.slice):
            start, stop, step = item.indices(len(self))
            if step != 1:
                return self.take(Runs.of(np.arange(start, stop, step)))
            stop = max(start, stop)
            valid = None if self.valid is None else self.valid[start:stop]
            return self._of(self.values, self.offsets[start : stop + 1], valid, self.ragged_dim)
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            if not -len(self) <= item < len(self):
                raise IndexError(f"row {item} is out of range for {len(self)} rows")
            row = int(item) % len(self)
            if self.valid is not None and not self.valid[row]:
                return None
            return self._row(*self.offsets[row : row + 2].tolist())
        return self.select_idxs(item)

    def __iter__(self) -> Iterator[Any]:
        """The rows, as `self[i]` gives them."""
        bounds = self.offsets.tolist()
        marks = ragged_rows.marks(self).tolist()
        for start, stop, mark in zip(bounds[:-1], bounds[1:], marks, strict=True):
            yield self._row(start, stop) if mark else None

    def _row(self, start: int, stop: int) -> Any:
        row = self.values[start:stop]
        return row.movedim(0, self.ragged_dim) if self.ragged_dim else row

    def select_idxs(self, idxs: RowIndex) -> Ragged:
        """Rows by number (negative ones count from the end) or by mask, in that order and as often as given.

        Returns:
            A copy of those rows; where they are neighbours in order, a view as of a slice.

        Raises:
            IndexError: A number is out of range, or the index has a wrong shape, length or dtype.
        """
        return self.take(Runs.of(row_numbers(idxs, len(self))))

    def take(self, runs: Runs) -> Ragged:
        """The rows at those positions, which are not checked; as `select_idxs`."""
        if runs.one:
            return self[int(runs.starts[0]) : int(runs.starts[0] + runs.lengths[0])]
        bounds, numbers = self.offsets.numpy(), runs.positions()
        offsets = ragged_rows.offsets_of(bounds[numbers + 1] - bounds[numbers])
        first = bounds[runs.starts]
        items = Runs(first, bounds[runs.starts + runs.lengths] - first)
        valid = None if self.valid is None else self.valid[torch.from_numpy(numbers)]
        return self._of(ragged_rows.take_items(self.values, items), offsets, valid, self.ragged_dim)

    def chunk(self, chunks: int) -> list[Ragged]:
        """Cuts the rows into `chunks` equal parts, which are views. ValueError where they cannot be divided evenly."""
        if chunks < 1:
            raise ValueError(f"chunks must be at least 1, got {chunks}")
        size, rest = divmod(len(self), chunks)
        if rest:
            raise ValueError(f"{len(self)} rows cannot be divided into {chunks} equal chunks")
        return [self[i * size : (i + 1) * size] for i in range(chunks)]

    def split(self, split_size: int) -> list[Ragged]:
        """Cuts the rows into views of `split_size` rows; the last one may have fewer."""
        if split_size < 1:
            raise ValueError(f"split_size must be at least 1, got {split_size}")
        return [self[i : i + split_size] for i in range(0, len(self), split_size)]

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Ragged:
        """Every row so many times: 0, 0, 1, 1 or, not interleaved, 0, 1, 0, 1. A copy, but for once a view."""
        if repeat_times < 0:
            raise ValueError(f"repeat_times must be at least 0, got {repeat_times}")
        numbers = np.arange(len(self))
        return self.take(Runs.of(np.repeat(numbers, repeat_times) if interleave else np.tile(numbers, repeat_times)))

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """Joins along the rows: a copy, but for one part, which comes back as it is.

        Raises:
            ValueError: There is no part.
            SchemaError: A part is no `Ragged`, or differs from the first in dtype or in the shape of its rows. Names the part.
        """
        ragged_rows.check_parts(parts, Ragged)
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        covered = [part.values[slice(*part.span)] for part in parts]
        values = Ragged.concat(covered) if isinstance(first.values, Ragged) else ragged_rows.join_items(covered)
        offsets = ragged_rows.offsets_of(torch.cat([part.lengths() for part in parts]).numpy())
        nullable = any(part.valid is not None for part in parts)
        return first._of(values, offsets, torch.cat([ragged_rows.marks(part) for part in parts]) if nullable else None, first.ragged_dim)

    def compact(self) -> Ragged:
        """The same rows, with contiguous values that are just theirs and offsets from 0; at every level. Copies no contiguous payload."""
        start, stop = self.span
        covered = self.values if (start, stop) == (0, len(self.values)) else self.values[start:stop]
        values = covered.compact() if isinstance(covered, Ragged) else covered.contiguous()
        if values is self.values:
            return self
        return self._of(values, self.offsets - start if start else self.offsets, self.valid, self.ragged_dim)

    def to(self, device: torch.device | str | int) -> Ragged:
        """The same rows with the items they cover on a device; this column if they are there already."""
        if self.device == torch.device(device):
            return self
        part = self.compact()
        return self._of(part.values.to(device), part.offsets, part.valid, part.ragged_dim)

    def __reduce__(self) -> Any:
        # Only what the rows cover, never the storage around it. As bytes: torch cannot pickle all of its dtypes.
        part = self.compact()
        values: Any = part.values
        if isinstance(values, torch.Tensor):
            values = owned(flat_bytes(values)), dtype_name(self.dtype), tuple(values.shape)
        return _unpickled, (type(self), values, owned(part.offsets), None if part.valid is None else owned(part.valid), part.ragged_dim)

    # ---------------------------------------------------------------- from and to other forms

    @staticmethod
    def from_tensors(rows: Sequence[Any], dtype: torch.dtype | None = None, ragged_dim: int = 0) -> Ragged:
        """Joins a list of tensors, and None for null rows. A copy. A row that is a list of tensors makes rows of rows.

        Args:
            rows: Tensors of one dtype, whose shapes differ in the dimension `ragged_dim` only.
            dtype: Of the items; each row is converted, exactly. Needed where no row is a tensor.
            ragged_dim: See the class.

        Raises:
            SchemaError: A row has another type, dtype or shape, or a value that is not exact in `dtype`. Names the row.
        """
        from mooncake_ray.data import ragged_lists

        return ragged_lists.from_tensors(rows, dtype, ragged_dim)

    def to_list(self) -> list[Any]:
        """The rows as tensor views, None for a null row; lists of them for rows of rows. The reverse of `from_tensors`."""
        from mooncake_ray.data import ragged_lists

        return ragged_lists.to_list(self)

    @staticmethod
    def from_lists(rows: Sequence[Any], dtype: torch.dtype | None = None, levels: int | None = None) -> Ragged:
        """Converts lists of Python numbers, and None for null rows. Lists of lists of numbers make rows of rows.

        Args:
            rows: One list (or tuple) of bools, ints or floats a row; exactly these types.
            dtype: Of the items. None: bool, int64, or float32 where that is exact for all of them and else float64; int64 for no items at all.
            levels: How deep the lists are. None: as deep as the first ones that have items, at most 2.

        Raises:
            SchemaError: A number is not exact in the dtype, or of another type than the others while no dtype is given. Names row and value.
        """
        from mooncake_ray.data import ragged_lists

        return ragged_lists.from_lists(rows, dtype, levels)

    def to_lists(self) -> list[Any]:
        """The rows as lists of Python numbers (of lists, where items have a shape), None for a null row."""
        from mooncake_ray.data import ragged_lists

        return ragged_lists.to_lists(self)

    @staticmethod
    def from_padded(padded: torch.Tensor, *, lengths: Any = None, mask: Any = None, side: Side = "right", ragged_dim: int = 0) -> Ragged:
        """Takes the rows out of a padded tensor. What they were padded with is not looked at. A copy.

        Args:
            padded: (rows, width, ...); the width is dimension 1 + `ragged_dim`.
            lengths: Items of each row, integers (rows,).
            mask: Instead of lengths: (rows, width), 1 where a row has an item and 0 where it is padded, bool or numbers.
            side: Where the padding is.
            ragged_dim: See the class.

        Raises:
            SchemaError: A length is beyond the width, or a mask's row is anything but ones with zeros to that side. Names the row.
        """
        from mooncake_ray.data import ragged_padded

        return ragged_padded.from_padded(padded, lengths, mask, side, ragged_dim)

    def to_padded(self, width: int | None = None, side: Side = "right", pad: Any = 0) -> torch.Tensor:
        """A new dense tensor (rows, width, *row_shape), the width at dimension 1 + `ragged_dim`. A null row is all padding.

        Args:
            width: None for the longest row's length.
            side: Where the padding goes.
            pad: What it is, a Python number or a scalar of the column's dtype.

        Raises:
            SchemaError: A row is longer than the width, `pad` is not exact in the dtype, or rows are lists of rows.
        """
        from mooncake_ray.data import ragged_padded

        return ragged_padded.to_padded(self, width, side, pad)

    def mask(self, width: int | None = None, side: Side = "right", dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """(rows, width): 1 where `to_padded` of the same arguments has an item, 0 where it is padded. Made anew by each call."""
        from mooncake_ray.data import ragged_padded

        return ragged_padded.mask(self, width, side, dtype)

    @staticmethod
    def from_jagged(nested: torch.Tensor) -> Ragged:
        """Wraps a nested tensor of the layout torch.jagged, whichever its ragged dimension. A view, unless it has holes between rows."""
        from mooncake_ray.data import ragged_padded

        return ragged_padded.from_jagged(nested)

    def to_jagged(self) -> torch.Tensor:
        """A nested tensor of the layout torch.jagged that knows its shortest and longest row. A view where the items are contiguous in it.

        Raises:
            SchemaError: A row is null, or rows are lists of rows.
        """
        from mooncake_ray.data import ragged_padded

        return ragged_padded.to_jagged(self)

    @staticmethod
    def from_arrow(array: Any) -> Ragged:
        """Wraps an Arrow list or large_list of numbers or booleans. Fixed-size lists in it are the items' shape, lists in it rows of rows.

        Returns:
            A column that shares Arrow's memory, which must not be written to. Offsets, booleans, chunks and items behind nulls are copied.

        Raises:
            SchemaError: It is something else, or has a null elsewhere than for a whole row.
        """
        from mooncake_ray.data import ragged_arrow

        return ragged_arrow.from_arrow(array)

    def to_arrow(self) -> Any:
        """A `pyarrow.LargeListArray` that shares the memory of items and offsets; booleans are copied.

        Raises:
            SchemaError: Arrow has no such type (bfloat16, float8, complex), or the ragged dimension is not the first.
        """
        from mooncake_ray.data import ragged_arrow

        return ragged_arrow.to_arrow(self)


def _unpickled(cls: type[Ragged], values: Any, offsets: torch.Tensor, valid: torch.Tensor | None, ragged_dim: int) -> Ragged:
    if isinstance(values, tuple):
        raw, dtype, shape = values
        values = raw.view(getattr(torch, dtype)).view(shape)
    return cls(values, offsets, valid, ragged_dim)
