"""Rows to workers, so that each gets about the same number of tokens."""

from __future__ import annotations

import heapq

import numpy as np

__all__ = ["partition"]


def partition(lengths: np.ndarray, parts: int, *, equal_rows: bool = True) -> list[np.ndarray]:
    """Splits rows into `parts` groups of about equal total length.

    Longest-processing-time-first (Graham 1969). With `equal_rows` in rounds of one row a group: the longest of a round goes to the group that
    has least so far.

    Args:
        lengths: what each row costs, (rows,), not negative.
        parts: at least 1.
        equal_rows: the groups have equally many rows (one more for some where the rows cannot be divided evenly).

    Returns:
        For each group its row numbers, int64, rising. Every row is in one group. Deterministic.

    Raises:
        ValueError: `parts` is not positive, or more than there are rows.
    """
    lengths = np.asarray(lengths)
    if not 1 <= parts <= max(1, len(lengths)):
        raise ValueError(f"parts must be between 1 and the {len(lengths)} rows, got {parts}")
    order = np.argsort(-lengths, kind="stable").tolist()
    groups: list[list[int]] = [[] for _ in range(parts)]
    if parts == 1:
        return [np.arange(len(lengths), dtype=np.int64)]
    if equal_rows:
        costs, totals = lengths.tolist(), [0] * parts  # plain numbers: one by one they are faster than an array's
        for first in range(0, len(order), parts):
            rows = order[first : first + parts]
            for row, group in zip(rows, sorted(range(parts), key=totals.__getitem__), strict=False):
                groups[group].append(row)
                totals[group] += costs[row]
    else:
        heap = [(0, group) for group in range(parts)]
        for row in order:
            total, group = heapq.heappop(heap)
            groups[group].append(row)
            heapq.heappush(heap, (total + int(lengths[row]), group))
    return [np.array(sorted(group), np.int64) for group in groups]
