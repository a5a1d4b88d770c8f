"""What a buffer's actor sends: where rows lie, by Ray's own refs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_ray.objects.batch_ref import BatchRef, concat_batches
from mooncake_ray.rollout.group import Group, Rows
from mooncake_ray.rollout.records import Draft, Reason, rows_of

__all__ = ["GivenShare", "GivenWork", "Piece", "joined"]

Piece = tuple[BatchRef, np.ndarray]
"""A stored batch, and row numbers."""


@dataclass(frozen=True)
class GivenWork:
    """A group to make again, or further."""

    uid: str
    reason: Reason
    pieces: list[Piece]
    oldest: int


@dataclass(frozen=True)
class GivenShare:
    """What one rank learns from. Arrays and lists have an element for each of its samples."""

    step: int
    version: int
    attempt: int
    pieces: list[Piece]
    uids: list[str]
    groups: np.ndarray
    """int64: numbers of their groups."""
    ages: np.ndarray
    """int64: by how many versions the oldest token of its group is older than the weights that are trained."""
    replayed: np.ndarray
    """bool"""
    samples: int
    """Of all ranks."""

    @classmethod
    def of(cls, draft: Draft, share: Sequence[tuple[Group, np.ndarray]], pieces: Callable[[Sequence[Rows]], list[Piece]]) -> GivenShare:
        again = {group.number for group in draft.replayed}
        counts = [len(samples) for _, samples in share]
        groups = [group for group, _ in share]

        def each(values: Sequence, dtype: type) -> np.ndarray:
            return np.repeat(np.array(values, dtype), counts)

        return cls(
            draft.step,
            draft.version,
            draft.attempt,
            pieces(rows_of(share)),
            [group.uid for group, n in zip(groups, counts, strict=True) for _ in range(n)],
            each([group.number for group in groups], np.int64),
            each([draft.version - group.oldest for group in groups], np.int64),
            each([group.number in again for group in groups], np.bool_),
            draft.samples,
        )


def joined(pieces: Sequence[Piece]) -> BatchRef | None:
    """The rows of all pieces, one after the other; None if there are none. Moves no data."""
    parts = [ref if np.array_equal(rows, np.arange(len(ref))) else ref[rows] for ref, rows in pieces]
    return None if not parts else parts[0] if len(parts) == 1 else concat_batches(parts)
