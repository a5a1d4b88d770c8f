"""Rows of a partition, and in which order they are to be had."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from mooncake_ray.data.catalog.records import Place
from mooncake_ray.data.catalog.where import Tag

__all__ = ["ACKNOWLEDGED", "GONE", "Partition", "Row"]

ACKNOWLEDGED, GONE = -1, -2  # instead of a lease's number
_MANY = 32  # a view is rebuilt if more than one of so many rows leave it at once

_number = attrgetter("number")


class Row:
    """One row: where its fields are, and which lease it is in, by group."""

    __slots__ = ("at", "held", "key", "number", "partition", "tags")

    def __init__(self, number: int, partition: str, key: str, groups: int) -> None:
        self.number, self.partition, self.key = number, partition, key
        self.at: dict[str, Place] = {}
        self.tags: dict[str, Tag] = {}
        self.held: list[int | None] = [None] * groups  # None: free; a lease; ACKNOWLEDGED; GONE


class Partition:
    """The rows of one partition. For each group and choice of fields that was ever asked for: the free rows that have these, in order."""

    __slots__ = ("_views", "rows")

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self._views: dict[tuple[int, frozenset[str]], list[Row]] = {}

    def view(self, group: int, fields: frozenset[str]) -> list[Row]:
        """Free rows of a group that have the fields, in the order of their publication."""
        found = self._views.get((group, fields))
        if found is None:
            found = self._views[group, fields] = [row for row in self.rows.values() if row.held[group] is None and fields <= row.at.keys()]
        return found

    def _views_of(self, group: int | None) -> Iterator[tuple[int, frozenset[str], list[Row]]]:
        return ((g, fields, view) for (g, fields), view in self._views.items() if group in (None, g))

    def offer(self, row: Row, group: int | None = None) -> None:
        """Notes that a row got fields, or is free again in a group."""
        for g, fields, view in self._views_of(group):
            if row.held[g] is None and fields <= row.at.keys():
                at = bisect_left(view, row.number, key=_number)
                if at == len(view) or view[at] is not row:
                    insort(view, row, key=_number)

    def withdraw(self, rows: list[Row], group: int) -> None:
        """Notes that rows, in their order, are not free any more in a group."""
        for _, _, view in self._views_of(group):
            first = bisect_left(view, rows[0].number, key=_number)
            if view[first : first + len(rows)] == rows:  # neighbours, as mostly
                del view[first : first + len(rows)]
                continue
            if len(rows) * _MANY > len(view):
                leaving = {row.number for row in rows}
                view[:] = [row for row in view if row.number not in leaving]
                continue
            for row in rows:
                at = bisect_left(view, row.number, key=_number)
                if at < len(view) and view[at] is row:
                    del view[at]
