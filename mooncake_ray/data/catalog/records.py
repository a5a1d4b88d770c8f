"""What a ledger answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mooncake_ray.data.catalog.where import Tag

__all__ = ["Lease", "LeasedRow", "Listed", "NoRoom", "Place", "Published"]

Place = tuple[str, int]  # a fragment, and the row in it


@dataclass(frozen=True, slots=True)
class Published:
    """What a publication did."""

    new: int
    """Rows that were not there before."""
    known: int
    """Rows that got further fields, or tags."""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Why new rows have to wait: numbers before they come."""

    rows: int
    rows_used: int
    capacity_rows: int | None
    nbytes: int
    bytes_used: int
    capacity_bytes: int | None

    def __str__(self) -> str:
        parts = []
        if self.capacity_rows is not None:
            parts.append(f"{self.rows_used} of {self.capacity_rows} rows are used, and {self.rows} more wanted")
        if self.capacity_bytes is not None:
            parts.append(f"{self.bytes_used} of {self.capacity_bytes} bytes are used, and {self.nbytes} more wanted")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class LeasedRow:
    """A row as it was when it was taken."""

    partition: str
    key: str
    at: Mapping[str, Place]
    """Where each of the fields is that were asked for."""
    tags: Mapping[str, Tag]


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows that one consumer of a group has until it acknowledges or releases them, or the deadline passes. Without rows: no more come."""

    id: int
    """0 for a lease without rows, which needs no acknowledgement."""
    group: str
    consumer: str
    deadline: float
    """Of the clock that `now` is told by."""
    rows: tuple[LeasedRow, ...]


@dataclass(frozen=True, slots=True)
class Listed:
    """A row, to look at."""

    partition: str
    key: str
    tags: Mapping[str, Tag]
    fields: tuple[str, ...]
    states: Mapping[str, str]
    """By group: `free`, `leased` or `acknowledged`."""
