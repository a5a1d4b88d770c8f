"""Columns that are loaded when they are first touched.

A `Handle` is one stored block, mapped; a `Stored` column is some rows of one of its fields; a `Joined` column is several columns one after
the other. Selecting rows of them moves nothing. `load` fetches many at once, each block's bytes by one vectored request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_ray.counters import count
from mooncake_ray.data import kernels
from mooncake_ray.data.bits import named_dtype
from mooncake_ray.data.block import block, layout, number_lists
from mooncake_ray.data.block.index import Field, Index, parse
from mooncake_ray.data.block.read import Read, Runs, Steps, offsets_of, run, together
from mooncake_ray.errors import CorruptBlockError

__all__ = ["Columns", "Handle", "Joined", "Pending", "Stored", "as_ragged", "join", "load", "load_columns"]

_TURNS = 4  # parts a block, beyond which reading them one by one costs more than putting them in order


class Handle:
    """A stored block. Keeps its memory while it lives. Thread-safe."""

    __slots__ = ("_memory", "index")

    def __init__(self, memory: np.ndarray) -> None:
        """Reads the head of a block.

        Args:
            memory: uint8 (bytes,): mapped, private to this process; it may be writable.

        Raises:
            CorruptBlockError: it is none.
        """
        self._memory = memory
        self.index: Index = parse(memory)
        if self.index.nbytes > memory.nbytes:
            raise CorruptBlockError(f"the batch is truncated: {memory.nbytes} of {self.index.nbytes} bytes")

    @property
    def address(self) -> int:
        return self._memory.ctypes.data

    @property
    def nbytes(self) -> int:
        return self.index.nbytes

    def fetch(self, reads: Sequence[Read]) -> list[np.ndarray]:
        """Gets bytes of the block. What is one run of bytes is a view of the mapped memory, private to this process.

        Raises:
            CorruptBlockError: a read reaches beyond its buffer.
        """
        out = []
        for read in reads:
            starts, lengths = self.place(read)
            if read.runs.one:
                out.append(self._memory[starts[0] : starts[0] + lengths[0]])
            else:
                got = kernels.empty(read.nbytes)
                kernels.gather(self.address, starts, lengths, got.ctypes.data)
                out.append(got)
        count("batch_bytes_read", sum(read.nbytes for read in reads))
        return out

    def place(self, read: Read) -> tuple[np.ndarray, np.ndarray]:
        """Where the runs of a read begin in the block, and their lengths: int64 (runs,) each.

        Raises:
            CorruptBlockError: the read reaches beyond its buffer.
        """
        at, size = self.index.span_of(read.buffer)
        starts, lengths = read.runs.starts, read.runs.lengths
        if len(starts) and ((starts < 0) | (lengths < 0) | (starts + lengths > size)).any():
            raise CorruptBlockError(
                f"buffer {read.buffer} of the batch has {size} bytes, a column is said to reach to {(starts + lengths).max()}"
            )
        return starts + at, lengths

    def verify(self) -> None:
        """Compares every byte with the checksums the block was stored with.

        Raises:
            CorruptBlockError: it is damaged, or has no checksums.
        """
        wrong = layout.damaged(self.index.layout, self._memory)
        if wrong is not None:
            what = "the index" if wrong < 0 else self.index.owner_of(wrong - self.index.layout.head_buffers)
            raise CorruptBlockError(f"{what} of the stored batch is damaged: the checksum differs")


class Pending:
    """A column that is not loaded. Immutable."""

    __slots__ = ()
    rows: int
    kind: str
    """What it is, in words: a tensor, a Ragged or an array."""
    dtype: Any
    full_row_shape: tuple[int | None, ...]
    """Shape of a row; None for a ragged dimension."""
    numbers: str | None
    """The dtype of Python lists of numbers that are to come as a ragged column: the narrowest, and so not that of others like them."""

    def value(self) -> Any:
        """Loads it."""
        return load([self])[0]

    @property
    def nbytes(self) -> int:
        """As it was put (of an array of objects: its pointers)."""
        return sum(part.nbytes for part in self.parts())

    def take(self, rows: Runs) -> Pending:
        """Some of its rows. Moves nothing."""
        raise NotImplementedError

    def parts(self) -> Iterator[Stored]:
        """The columns of blocks it is made of, in order."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Stored(Pending):
    """Rows of one column of a block; all of them without `selected`."""

    handle: Handle
    name: str
    selected: Runs | None = None
    form: str = "as-put"

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.handle.index.rows if self.selected is None else self.selected.total

    @property
    def runs(self) -> Runs:
        return Runs.span(0, self.handle.index.rows) if self.selected is None else self.selected

    def take(self, rows: Runs) -> Stored:
        return Stored(self.handle, self.name, rows if self.selected is None else self.selected.take(rows), self.form)

    def parts(self) -> Iterator[Stored]:
        yield self

    def steps(self) -> Steps[Any]:
        """The decoding of its rows."""
        return block.column(self.handle.index, self.name, self.runs, self.form)

    @property
    def field(self) -> Field:
        return self.handle.index.fields[self.name]

    @property
    def numbers(self) -> str | None:
        """The dtype of lists of numbers that are to come as a ragged column."""
        return number_lists.dtype_of(self.field.node["tree"]) if self.field.form == "objects" and self.form == "ragged" else None

    @property
    def kind(self) -> str:  # type: ignore[override]
        form = self.field.form
        unpadded = form == "tensor" and self.form == "ragged" and self.handle.index.has_lengths(self.name)
        if form == "ragged" or unpadded or self.numbers is not None:
            return "a Ragged"
        return "a tensor" if form == "tensor" else "an array"

    @property
    def dtype(self) -> Any:  # type: ignore[override]
        if self.field.form == "objects":
            return np.dtype(object) if self.numbers is None else named_dtype(self.numbers)
        name = self.field.dtype
        return np.dtype(name) if self.field.form == "array" else named_dtype(name)

    @property
    def full_row_shape(self) -> tuple[int | None, ...]:  # type: ignore[override]
        if self.numbers is not None:
            return (None,)
        shape = self.field.row_shape
        return (None, *shape[1:]) if self.kind == "a Ragged" and self.field.form == "tensor" else shape

    @property
    def nbytes(self) -> int:
        if self.field.form == "objects":
            return 8 * self.rows
        per = math.prod(n for n in self.full_row_shape if n is not None) * self.dtype.itemsize
        if self.kind != "a Ragged":
            return self.rows * per
        lengths = self.handle.index.lengths(self.name)
        return int(lengths[self.runs.positions()].sum()) * per


@dataclass(frozen=True, slots=True)
class Joined(Pending):
    """Columns one after the other."""

    columns: tuple[Pending, ...]

    @property
    def rows(self) -> int:  # type: ignore[override]
        return sum(column.rows for column in self.columns)

    def take(self, rows: Runs) -> Pending:
        pieces = [self.columns[number].take(part) for number, part in rows.over(column.rows for column in self.columns)]
        return join(pieces) if pieces else self.columns[0].take(Runs.span(0, 0))

    def parts(self) -> Iterator[Stored]:
        for column in self.columns:
            yield from column.parts()

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.columns[0].kind

    @property
    def dtype(self) -> Any:  # type: ignore[override]
        numbers = self.numbers
        return self.columns[0].dtype if numbers is None else named_dtype(numbers)

    @property
    def numbers(self) -> str | None:
        """As of its parts, if they have one in common."""
        found = {part.numbers for part in self.parts()}
        return None if None in found else number_lists.common_dtype(found)  # type: ignore[arg-type]

    @property
    def full_row_shape(self) -> tuple[int | None, ...]:  # type: ignore[override]
        return self.columns[0].full_row_shape


def join(columns: Sequence[Pending]) -> Pending:
    """The columns one after the other; neighbours of one block become one."""
    out: list[Stored] = []
    for part in (part for column in columns for part in column.parts()):
        last = out[-1] if out else None
        if last is not None and last.handle is part.handle and (last.name, last.form) == (part.name, part.form):
            out[-1] = Stored(part.handle, part.name, last.runs.then(part.runs), part.form)
        elif part.rows or last is None:
            if last is not None and not last.rows:
                out.pop()
            out.append(part)
    return out[0] if len(out) == 1 else Joined(tuple(out))


def as_ragged(column: Pending) -> Pending:
    """The column, to be loaded without its padding."""
    return join([Stored(part.handle, part.name, part.selected, "ragged") for part in column.parts()])


def load(columns: Sequence[Pending]) -> list[Any]:
    """Loads columns, all their bytes of one block by as few requests as its deepest column has levels."""
    plans = [_Plan.of(list(column.parts())) for column in columns]
    by_handle: dict[int, list[Stored]] = {}
    for part in (part for plan in plans for part in plan.parts):
        by_handle.setdefault(id(part.handle), []).append(part)
    values: dict[int, Any] = {}
    for group in by_handle.values():
        got = run(together([part.steps() for part in group]), group[0].handle.fetch)
        values.update(zip(map(id, group), got, strict=True))
    return [plan.put_together([values[id(part)] for part in plan.parts]) for plan in plans]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the parts of a column are read: where few blocks have them in many turns, each block's at once, and in order afterwards."""

    parts: list[Stored]
    order: np.ndarray | None = None

    @classmethod
    def of(cls, parts: list[Stored]) -> _Plan:
        groups: dict[tuple[int, str], list[int]] = {}
        for number, part in enumerate(parts):
            groups.setdefault((id(part.handle), part.name), []).append(number)
        if len(parts) <= _TURNS * len(groups):
            return cls(parts)
        first = offsets_of(np.array([part.rows for part in parts]))
        order = [np.arange(first[number], first[number + 1]) for numbers in groups.values() for number in numbers]
        merged = []
        for numbers in groups.values():
            rows = np.concatenate([parts[number].runs.positions() for number in numbers])
            merged.append(Stored(parts[numbers[0]].handle, parts[numbers[0]].name, Runs.of(rows), parts[numbers[0]].form))
        return cls(merged, np.argsort(np.concatenate(order)))

    def put_together(self, values: list[Any]) -> Any:
        from mooncake_ray.data import ops  # knows of pending columns itself

        if self.parts[0].numbers is not None:
            values = number_lists.alike(values)
        value = values[0] if len(values) == 1 else ops.join_values(values)
        return value if self.order is None else ops.take_rows(value, self.order)


class Columns(MutableMapping[str, Any]):
    """Columns by name, in order. A pending one is loaded when its value is first asked for, once for all copies of the mapping."""

    __slots__ = ("_cells",)

    def __init__(self, columns: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        if isinstance(columns, Columns):
            self._cells: dict[str, _Cell] = dict(columns._cells)
        else:
            self._cells = {name: _Cell(value) for name, value in dict(columns).items()}

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].value()

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name] = _Cell(value)

    def __delitem__(self, name: str) -> None:
        del self._cells[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def __contains__(self, name: object) -> bool:
        return name in self._cells

    def peek(self, name: str) -> Any:
        """The column as it is: maybe still pending."""
        return self._cells[name].held

    def peeks(self) -> dict[str, Any]:
        """All columns as they are."""
        return {name: cell.held for name, cell in self._cells.items()}

    def picked(self, names: Iterable[str]) -> Columns:
        """Some of the columns; what one of the two mappings loads the other has."""
        out = Columns()
        out._cells = {name: self._cells[name] for name in names}
        return out

    def renamed(self, names: Mapping[str, str]) -> Columns:
        """The same columns, some under new names."""
        out = Columns()
        out._cells = {names.get(name, name): cell for name, cell in self._cells.items()}
        return out

    def union(self, other: Mapping[str, Any]) -> Columns:
        """These columns, and those of the other that have other names."""
        out = Columns(self)
        for name, cell in Columns(other)._cells.items():
            out._cells.setdefault(name, cell)
        return out

    def __repr__(self) -> str:
        return repr({name: f"<{value.kind} in the store>" if isinstance(value, Pending) else value for name, value in self.peeks().items()})

    def __reduce__(self) -> Any:
        return Columns, (dict(self),)


class _Cell:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def value(self) -> Any:
        held = self.held
        if isinstance(held, Pending):
            self.held = held = held.value()
        return held


def load_columns(mappings: Sequence[Columns], names: Set[str] | None = None) -> None:
    """Loads the pending columns of some mappings together."""
    chosen = [cell for columns in mappings for name, cell in columns._cells.items() if names is None or name in names]
    cells = list({id(cell): cell for cell in chosen if isinstance(cell.held, Pending)}.values())
    for cell, value in zip(cells, load([cell.held for cell in cells]), strict=True):
        cell.held = value
