"""What gives batches of other numbers of rows: padding, repeating, cutting rows into several, mini-batches."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader

from mooncake_ray.data import ops
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.errors import SchemaError

__all__ = ["AUTO_PADDING", "DataProtoConfig", "Reshaping", "chunk_bounds"]

AUTO_PADDING = "_verl_auto_padding"
"""The key of meta_info that marks a batch as one that may be padded, as in verl."""


class _Switch(type):
    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        return cls._enabled or os.environ.get("VERL_AUTO_PADDING", "").upper() in ("TRUE", "1")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"auto_padding is a {type(enabled).__name__}, expected a bool")
        cls._enabled = enabled


class DataProtoConfig(metaclass=_Switch):
    """`DataProtoConfig.auto_padding = True` has every batch of this process padded where needed, as `VERL_AUTO_PADDING=1` does."""

    auto_padding_key = AUTO_PADDING


def chunk_bounds(rows: int, chunks: int, unequal: bool, by_tensors: bool) -> list[int]:
    """Where chunks begin, and where the last one ends. See `DataProto.chunk`."""
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}")
    size, rest = divmod(rows, chunks)
    if not rest:
        return [i * size for i in range(chunks + 1)]
    if not unequal:
        raise ValueError(f"{rows} rows cannot be divided into {chunks} equal chunks")
    if not by_tensors:
        return [i * size + min(i, rest) for i in range(chunks + 1)]
    if (size + 1) * (chunks - 1) >= rows:
        raise ValueError(f"{rows} rows cannot be divided into {chunks} chunks of {size + 1}, the last one smaller but not empty")
    return [min(i * (size + 1), rows) for i in range(chunks + 1)]


class Reshaping:
    """Part of `DataProto`."""

    batch: Any
    non_tensor_batch: Any
    meta_info: Any

    def is_padding_enabled(self) -> bool:
        """Whether `chunk` may cut unequally: for this batch (`auto_padding` of `from_dict`) or for all (`DataProtoConfig`)."""
        return bool(self.meta_info.get(AUTO_PADDING, False)) or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "last") -> None:
        """Appends one row so many times, in place.

        Args:
            padding_size: How often; at least 0.
            padding_candidate: Which: "first" or "last" ("", verl's default, is the last).

        Raises:
            ValueError: An argument is wrong, or there is no row.
        """
        if padding_candidate not in ("first", "last", ""):
            raise ValueError(f"padding_candidate is {padding_candidate!r}, expected 'first' or 'last'")
        if padding_size < 0:
            raise ValueError(f"padding_size must be at least 0, got {padding_size}")
        if padding_size == 0:
            return
        rows = len(self)  # type: ignore[arg-type]
        if not rows:
            raise ValueError(f"there is no row to pad with {padding_size} times")
        row = 0 if padding_candidate == "first" else rows - 1
        padded = self._take(np.append(np.arange(rows), np.full(padding_size, row)))  # type: ignore[attr-defined]
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> Self:
        """Repeats each row as often as its own number says, next to each other.

        Raises:
            ValueError: There is not one number a row, or it is no integer of at least 0. Names the row.
        """
        if not isinstance(repeat_times, list | tuple | np.ndarray | torch.Tensor):
            raise TypeError(f"repeat_times is a {type(repeat_times).__name__}, expected a list, tuple, numpy.ndarray or torch.Tensor")
        times = torch.as_tensor(repeat_times).detach().cpu()
        rows = len(self)  # type: ignore[arg-type]
        if tuple(times.shape) != (rows,):
            raise ValueError(f"repeat_times has the shape {tuple(times.shape)}, expected one number for each of {rows} rows")
        if rows and (times.is_floating_point() or times.dtype == torch.bool):
            raise ValueError(f"repeat_times is {times.dtype}, expected integers")
        numbers = times.numpy().astype(np.int64)
        if (numbers < 0).any():
            row = int(np.argmax(numbers < 0))
            raise ValueError(f"row {row} is to be repeated {numbers[row]} times, expected at least 0")
        return self._take(np.repeat(np.arange(rows), numbers))  # type: ignore[attr-defined]

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Cuts each row of some columns into `n_split` equal rows, along the dimension after the rows'; other columns repeat their rows.

        Args:
            n_split: Rows that become of one.
            split_keys: Columns to cut. None: none.

        Returns:
            A batch of rows * n_split rows. What is cut shares storage with this one where that is contiguous.

        Raises:
            KeyError: A name is unknown.
            SchemaError: A column or a row cannot be divided evenly. Names it.
        """
        if n_split < 1:
            raise ValueError(f"n_split must be at least 1, got {n_split}")
        split = set(ops.as_names(split_keys))
        ops.pick({**self.batch, **self.non_tensor_batch}, split, "the batch")
        numbers = np.repeat(np.arange(len(self)), n_split)  # type: ignore[arg-type]

        def unfold(fields: Any) -> dict[str, Any]:
            return {
                name: _cut_rows(name, column, n_split) if name in split else ops.take_rows(column, numbers)
                for name, column in ops.held(fields).items()
            }

        return type(self)(batch=unfold(self.batch), non_tensor_batch=unfold(self.non_tensor_batch), meta_info=self.meta_info)  # type: ignore[call-arg]

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Iterates over mini-batches.

        Args:
            mini_batch_size: Rows of a mini-batch; must divide the rows of this batch.
            epochs: How often to go over all rows.
            seed: Seeds the order. It has an effect only if `dataloader_kwargs` asks for shuffling.
            dataloader_kwargs: More arguments of `torch.utils.data.DataLoader`, as `shuffle=True`.

        Returns:
            An iterator of rows * epochs / mini_batch_size batches of copied rows.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"mini_batch_size must be positive and divide the {len(self)} rows, got {mini_batch_size}")
        # A loader of row numbers draws the same order as one of rows, and needs no joining of rows.
        loader: Iterable[list[int]] = DataLoader(
            range(len(self)),  # type: ignore[arg-type]
            batch_size=mini_batch_size,
            collate_fn=list,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
            **(dataloader_kwargs or {}),
        )
        return (self.select_idxs(rows) for _ in range(epochs) for rows in loader)


def _cut_rows(name: str, column: Any, n: int) -> Any:
    if not isinstance(column, Ragged):
        if column.ndim < 2 or column.shape[1] % n:
            raise SchemaError(f"{name!r} has rows of shape {tuple(column.shape[1:])}, which cannot be divided into {n}")
        return column.reshape(column.shape[0] * n, column.shape[1] // n, *column.shape[2:])
    if column.ragged_dim:
        raise SchemaError(f"{name!r} has rows {column.describe()}, expected the ragged dimension first")
    lengths = column.lengths()
    if (lengths % n).any():
        row = int((lengths % n).nonzero()[0])
        raise SchemaError(f"row {row} of {name!r} has {int(lengths[row])} items, which cannot be divided into {n}")
    starts = column.offsets[:-1, None] + (lengths // n)[:, None] * torch.arange(n)
    valid = None if column.valid is None else column.valid.repeat_interleave(n)
    return Ragged(column.values, torch.cat([starts.reshape(-1), column.offsets[-1:]]), valid)
