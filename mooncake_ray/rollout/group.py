"""`Parcel`: what a producer brings at once. `Group`: the samples of one prompt, which may have come in several parcels."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from mooncake_ray.errors import SchemaError

__all__ = ["Group", "Parcel", "Rows"]

Rows = tuple[str, np.ndarray]
"""Of a stored batch: the name of the parcel it came in, and row numbers (int64)."""


@dataclass(frozen=True)
class Parcel:
    """Samples, one a row of a stored batch. What is known of them without reading it."""

    id: str
    uids: Sequence[str]
    """Of the prompt of each."""
    tokens: np.ndarray
    """int64 [samples]: what each costs to learn from."""
    oldest: np.ndarray
    """int64 [samples]: the version of the weights that made its oldest token."""
    nbytes: int
    priority: np.ndarray | None = None
    """float64 [samples]; a group has the highest of its samples."""
    tags: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further columns [samples], for filters: rewards, say."""

    def __post_init__(self) -> None:
        """Raises SchemaError: the columns are of different lengths, there are no rows, or a number is negative."""
        count = len(self.uids)
        if not count:
            raise SchemaError("a parcel has at least one sample")
        for name, column in (("tokens", self.tokens), ("oldest", self.oldest), ("priority", self.priority), *self.tags.items()):
            if column is not None and np.shape(column)[:1] != (count,):
                raise SchemaError(f"{name} has shape {np.shape(column)}, and there are {count} samples")
        for name, column in (("tokens", self.tokens), ("versions", self.oldest)):
            if column.dtype.kind not in "iu" or column.min() < 0:
                raise SchemaError(f"{name} must be integers that are not negative, got {column.dtype} from {column.min()} on")
        if self.priority is not None and not np.isfinite(self.priority).all():
            raise SchemaError("priorities must be finite")
        if bad := [uid for uid in self.uids if not isinstance(uid, str) or not uid]:
            raise SchemaError(f"a uid is a text, got {bad[0]!r}")

    def by_uid(self) -> Iterator[tuple[str, np.ndarray]]:
        """The rows of each prompt."""
        found: dict[str, list[np.ndarray]] = {}
        end = 0
        for uid, rows in groupby(self.uids):
            begin, end = end, end + sum(1 for _ in rows)
            found.setdefault(uid, []).append(np.arange(begin, end, dtype=np.int64))
        return ((uid, rows[0] if len(rows) == 1 else np.concatenate(rows)) for uid, rows in found.items())


@dataclass(slots=True)
class Group:
    """Samples of one prompt: all of them, or those that have come."""

    uid: str
    number: int
    """Groups are numbered as they come."""
    rows: list[Rows] = field(default_factory=list)
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64 [samples], in the order of `rows`."""
    oldest: int = 0
    """The version that made the oldest token of all."""
    priority: float = 0.0
    nbytes: int = 0
    """Its part of the stored batches, about."""
    tags: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.tokens)

    def add(self, parcel: Parcel, rows: np.ndarray) -> None:
        """Raises SchemaError: those that came before have other tags."""
        if self.rows and self.tags.keys() != parcel.tags.keys():
            raise SchemaError(f"samples of {self.uid!r} have tags {sorted(parcel.tags)}, and others of them {sorted(self.tags)}")
        oldest = int(parcel.oldest[rows].min())
        priority = 0.0 if parcel.priority is None else float(parcel.priority[rows].max())
        self.oldest, self.priority = (min(self.oldest, oldest), max(self.priority, priority)) if self.rows else (oldest, priority)
        for name, column in parcel.tags.items():
            self.tags[name] = np.concatenate([self.tags[name], column[rows]]) if self.rows else column[rows]
        self.rows.append((parcel.id, rows))
        self.tokens = np.concatenate([self.tokens, parcel.tokens[rows]])
        self.nbytes += -(-parcel.nbytes * len(rows) // len(parcel.uids))

    def copy(self) -> Group:
        """To which samples can be added."""
        return Group(self.uid, self.number, self.rows.copy(), self.tokens, self.oldest, self.priority, self.nbytes, self.tags.copy())

    def uses(self, parcels: Collection[str]) -> bool:
        """Whether samples lie in one of them."""
        return any(parcel in parcels for parcel, _ in self.rows)
