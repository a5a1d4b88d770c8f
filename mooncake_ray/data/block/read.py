"""Which bytes of a block are wanted, apart from how they are fetched.

Decoding is written as generators of `Steps`: they yield the reads they need next and are sent the bytes. `run` drives many of them in
lockstep, so that all columns of a batch together need as many requests as the deepest of them has levels, and one if all are flat.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

__all__ = ["Fetch", "Read", "Runs", "Steps", "offsets_of", "run", "together"]

T = TypeVar("T")


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Where rows of these lengths begin that lie one after the other, and where the last one ends: int64 (rows + 1,)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@dataclass(frozen=True, slots=True)
class Runs:
    """A selection of positions, in order and possibly repeated, as runs `[starts[i], starts[i] + lengths[i])`. Two int64 arrays (runs,)."""

    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def span(cls, start: int, stop: int) -> Runs:
        """The positions start … stop - 1: one run."""
        return cls(np.array([start], np.int64), np.array([stop - start], np.int64))

    @classmethod
    def of(cls, positions: np.ndarray) -> Runs:
        """The given positions (int64), neighbours joined to runs."""
        positions = np.asarray(positions, np.int64)
        if not positions.size:
            return cls.span(0, 0)
        first = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)
        return cls(positions[first], np.diff(first, append=positions.size))

    @property
    def total(self) -> int:
        """How many positions are selected."""
        return int(self.lengths.sum())

    @property
    def one(self) -> bool:
        """Whether this is one run, and so a view suffices."""
        return len(self.starts) == 1

    def positions(self) -> np.ndarray:
        """Every position, int64 (total,)."""
        ends = np.cumsum(self.lengths)
        return np.arange(self.total) + np.repeat(self.starts - (ends - self.lengths), self.lengths)

    def take(self, rows: Runs) -> Runs:
        """Those of these positions that `rows` (positions among them) selects."""
        if self.one:
            return Runs(self.starts[0] + rows.starts, rows.lengths)
        return Runs.of(self.positions()[rows.positions()])

    def then(self, other: Runs) -> Runs:
        """These positions and then the other's."""
        if self.total and other.total and self.starts[-1] + self.lengths[-1] == other.starts[0]:
            lengths = np.concatenate((self.lengths[:-1], [self.lengths[-1] + other.lengths[0]], other.lengths[1:]))
            return Runs(np.concatenate((self.starts, other.starts[1:])), lengths)
        if not self.total or not other.total:
            return other if not self.total else self
        return Runs(np.concatenate((self.starts, other.starts)), np.concatenate((self.lengths, other.lengths)))

    def over(self, sizes: Iterable[int]) -> Iterator[tuple[int, Runs]]:
        """These positions in pieces of those sizes that lie one after the other: which piece, and where in it, as long as they stay in one."""
        ends = np.cumsum([0, *sizes])
        at = self.positions()
        piece = np.searchsorted(ends, at, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(piece)) + 1).tolist(), len(at)]
        for first, last in itertools.pairwise(cuts):
            if first < last:
                number = int(piece[first])
                yield number, Runs.of(at[first:last] - ends[number])

    def scaled(self, item: int) -> Runs:
        """Where each position is `item` positions (or bytes)."""
        return Runs(self.starts * item, self.lengths * item)


@dataclass(frozen=True, slots=True)
class Read:
    """Some bytes of one buffer, to be fetched as one array: the runs (of bytes, from the start of the buffer), one after the other."""

    buffer: int
    runs: Runs

    @classmethod
    def items(cls, buffer: int, runs: Runs, item: int) -> Read:
        """The items at those positions, of `item` bytes each."""
        return cls(buffer, runs.scaled(item))

    @property
    def nbytes(self) -> int:
        return self.runs.total


Steps = Generator[list[Read], list[np.ndarray], T]
Fetch = Callable[[Sequence[Read]], list[np.ndarray]]
"""Fetches reads as one vectored request: for each a uint8 array (nbytes,), in order. One run of bytes need not be copied; such an array may
be writable or not, private or shared, as the source decides."""


def together(parts: Iterable[Steps[Any]]) -> Steps[list[Any]]:
    """Drives several decodings at once: each round asks for what all of them want next. Returns their results, in order."""
    parts = list(parts)
    results: list[Any] = [None] * len(parts)
    answers: dict[int, list[np.ndarray] | None] = dict.fromkeys(range(len(parts)))
    while answers:
        wanted: list[Read] = []
        waiting: dict[int, int] = {}
        for number, answer in answers.items():
            try:
                reads = next(parts[number]) if answer is None else parts[number].send(answer)
            except StopIteration as end:
                results[number] = end.value
                continue
            waiting[number] = len(reads)
            wanted += reads
        if not waiting:
            break
        got = yield wanted
        answers, at = {}, 0
        for number, n in waiting.items():
            answers[number] = got[at : at + n]
            at += n
    return results


def run(steps: Steps[T], fetch: Fetch) -> T:
    """Decodes, with the bytes that `fetch` gets."""
    try:
        wanted = next(steps)
        while True:
            wanted = steps.send(fetch(wanted))
    except StopIteration as end:
        return end.value
