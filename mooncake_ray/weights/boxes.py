"""Boxes of tensors, many at a time: which are the same, which meet. Arrays with a row a box; no loop over boxes.

A box is a tensor's number and `[lo, hi)` for each of `d` dimensions, as in `Placement`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Ragged", "busiest", "distinct", "divided", "firsts", "meetings", "same_members", "spread"]

_STEP = 1 << 21  # pairs that are looked at together: bounds the memory that looking takes


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of unequal length, end to end."""

    start: np.ndarray
    """int64 (rows + 1)."""
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.start) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.start[row] : self.start[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.start)

    def take(self, rows: np.ndarray) -> Ragged:
        """The rows of those numbers, in that order."""
        lengths = self.lengths[rows]
        return Ragged(_starts(lengths), self.values[spread(self.start[rows], lengths)])

    @classmethod
    def of(cls, row: np.ndarray, values: np.ndarray, rows: int) -> Ragged:
        """From values and which row each is of; `row` must rise."""
        return cls(firsts(row, rows), values)


def firsts(sorted_numbers: np.ndarray, n: int) -> np.ndarray:
    """int64 (n + 1): where each number from 0 to `n` begins."""
    return np.searchsorted(sorted_numbers, np.arange(n + 1)).astype(np.int64)


def distinct(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The different rows of a table of integers.

    Returns:
        (first, row): int64 (m): for each different row the lowest index that has it, in the order of the rows' values (first column first); and
        int64 (n): which of them each row is.
    """
    n = len(columns[0])
    if not n:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    for seed in range(1, 64):
        key = _hashed(columns, seed)
        order = np.argsort(key)
        key = key[order]
        starts = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
        group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, n)))
        first = np.minimum.reduceat(order, starts)
        if all(np.array_equal(c[order], c[first][group]) for c in columns):  # else two different rows have one hash
            break
    else:
        raise RuntimeError("no hash tells the rows apart")
    by_value = np.lexsort([c[first] for c in reversed(columns)])
    place = np.empty_like(by_value)
    place[by_value] = np.arange(len(by_value))
    row = np.empty(n, np.int64)
    row[order] = place[group]
    return first[by_value], row


def same_members(row: np.ndarray, member: np.ndarray, rows: int) -> tuple[Ragged, np.ndarray]:
    """The different sets among those that `row` (n) and `member` (n) name: member i belongs to the set of row `row[i]`, maybe more than once.

    Returns:
        (sets, which): the different sets, as rising int32, in no order that means anything; and int64 (rows): which each row has.
    """
    most = int(member.max(initial=0)) + 1
    both = np.sort(row.astype(np.int64) * most + member)
    both = both[np.concatenate([[True], both[1:] != both[:-1]])] if len(both) else both
    of = Ragged.of(both // most, (both % most).astype(np.int32), rows)
    for seed in range(1, 64):
        hashes = np.concatenate([[np.uint64(0)], np.cumsum(_hashed([of.values], seed), dtype=np.uint64)])
        key = hashes[of.start[1:]] - hashes[of.start[:-1]]  # a sum, which has no order to get wrong
        first, which = distinct([of.lengths, key.view(np.int64)])
        sets = of.take(first)
        if np.array_equal(sets.take(which).values, of.values):
            break
    else:
        raise RuntimeError("no hash tells the sets apart")
    return sets, which


def divided(lo: np.ndarray, hi: np.ndarray, itemsize: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts boxes of more than `most` bytes along their outermost dimension, into parts of about equal size, at most a row larger; and along the
    next one where even a row is more.

    Returns:
        (of, lo, hi): rising int64: which box each part is of; and the parts' edges. How a box is cut depends on nothing but it and `most`.
    """
    of = np.arange(len(lo))
    for dim in range(lo.shape[1]):
        extent = hi - lo
        parts = -(-(np.prod(extent, axis=1) * itemsize[of]) // most)
        parts = np.where(
            np.all(extent[:, :dim] == 1, axis=1), np.clip(parts, 1, np.maximum(extent[:, dim], 1)), 1
        )  # or they would be strided
        if parts.max(initial=1) == 1:
            continue
        i = np.repeat(np.arange(len(of)), parts)
        n = np.arange(len(i)) - np.repeat(np.cumsum(parts) - parts, parts)
        begin, length = lo[i, dim], extent[i, dim]
        of, lo, hi, parts = of[i], lo[i], hi[i], parts[i]
        lo[:, dim], hi[:, dim] = begin + n * length // parts, begin + (n + 1) * length // parts
    return of, lo, hi


def busiest(tensor: np.ndarray, lo: np.ndarray, tensors: int) -> np.ndarray:
    """int64 (tensors): the dimension of each in which its boxes begin at the most different places."""
    counts = np.zeros((tensors, max(1, lo.shape[1])), np.int64)
    for dim in range(lo.shape[1]):
        first, _ = distinct([tensor, lo[:, dim]])
        counts[:, dim] = np.bincount(tensor[first], minlength=tensors)
    return counts.argmax(axis=1)


def meetings(
    a: tuple[np.ndarray, np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray, np.ndarray], dim: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs (index in a, index in b), int64, of boxes that have elements in common; some pairs at a time, in the order of a's boxes.

    Args:
        a, b: (tensor, lo, hi). Not empty boxes.
        dim: for each tensor the dimension that the boxes are sorted in; any is right, the one they are cut most in is fast.
    """
    (tensor, lo, hi), (b_tensor, b_lo, b_hi) = a, b
    if not len(tensor) or not len(b_tensor):
        return
    if not lo.shape[1]:
        lo = b_lo = np.zeros((1, 1), np.int64).repeat(max(len(tensor), len(b_tensor)), 0)
        hi = b_hi = lo + 1
        lo, hi, b_lo, b_hi = lo[: len(tensor)], hi[: len(tensor)], b_lo[: len(b_tensor)], b_hi[: len(b_tensor)]
    here, there = _along(lo, dim[tensor]), _along(b_lo, dim[b_tensor])
    here_end, there_end = _along(hi, dim[tensor]), _along(b_hi, dim[b_tensor])
    # One line for all tensors: each has a stretch of its own, longer than any place in it.
    length = np.zeros(len(dim), np.int64)
    np.maximum.at(length, tensor, here_end)
    np.maximum.at(length, b_tensor, there_end)
    base = np.concatenate([[0], np.cumsum(length + 1)[:-1]])
    order = np.argsort(base[b_tensor] + there, kind="stable")
    begins = (base[b_tensor] + there)[order]
    reach = np.maximum.accumulate((base[b_tensor] + there_end)[order])  # rises, so what ends before a box can be skipped as one
    start = np.searchsorted(reach, base[tensor] + here, side="right")
    end = np.searchsorted(begins, base[tensor] + here_end, side="left")
    many = np.maximum(end - start, 0)
    done = np.concatenate([[0], np.cumsum(many)])
    at = 0
    while at < len(many):
        to = max(at + 1, int(np.searchsorted(done, done[at] + _STEP, side="right")) - 1)
        i = np.repeat(np.arange(at, to), many[at:to])
        j = order[spread(start[at:to], many[at:to])]
        keep = np.flatnonzero(tensor[i] == b_tensor[j])
        i, j = i[keep], j[keep]
        for d in range(lo.shape[1]):
            keep = np.flatnonzero((lo[i, d] < b_hi[j, d]) & (b_lo[j, d] < hi[i, d]))
            i, j = i[keep], j[keep]
        yield i, j
        at = to


def _along(places: np.ndarray, dim: np.ndarray) -> np.ndarray:
    return places[np.arange(len(places)), dim]


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def spread(start: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start[0], start[0] + 1, … for each length."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(start - (ends - lengths), lengths)


def _hashed(columns: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """uint64 (n): a mix of each row."""
    out = np.full(len(columns[0]), 0x9E3779B97F4A7C15 * seed & 0xFFFFFFFFFFFFFFFF, np.uint64)
    for column in columns:
        out ^= column.astype(np.int64).view(np.uint64)
        out *= np.uint64(0xBF58476D1CE4E5B9)
        out ^= out >> np.uint64(31)
        out *= np.uint64(0x94D049BB133111EB)
        out ^= out >> np.uint64(29)
    return out
