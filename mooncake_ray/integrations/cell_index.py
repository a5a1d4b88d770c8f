"""Which block holds a row's field. Pure bookkeeping: blocks are opaque here.

A table of rows (numbers given by somebody else) and fields is written a rectangle at a time: some rows, some fields, one block that holds
them. Later rectangles replace the cells they cover. A block is let go of with the last cell that it is needed for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CellIndex", "Missing", "Piece"]


@dataclass(slots=True)
class Piece:
    """What one block contributes to a read: these fields of these of its rows, which go to these places of the result."""

    block: Any
    fields: tuple[str, ...]
    rows: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Missing:
    """The first cell asked for that nobody wrote, or that was cleared."""

    row: int
    field: str


@dataclass(frozen=True, slots=True)
class _Span:
    """The cells of one row that one block holds."""

    number: int  # of the block
    row: int  # in the block
    fields: frozenset[str]


class CellIndex:
    """Not thread-safe: it lives in an actor that does one thing at a time."""

    def __init__(self) -> None:
        self._spans: dict[int, tuple[_Span, ...]] = {}  # by row; the fields of a row's spans are disjoint
        self._blocks: dict[int, Any] = {}
        self._needed: dict[int, int] = {}  # block → in how many rows' spans it is
        self._next = 0

    def put(self, rows: Sequence[int], fields: Iterable[str], block: Any) -> None:
        """Notes that row `rows[i]` of the table is, in these fields, row i of the block."""
        written = frozenset(fields)
        if not rows or not written:
            return
        number, self._next = self._next, self._next + 1
        self._blocks[number], self._needed[number] = block, 0
        for at, row in enumerate(rows):
            self._replace(row, (*self._without(row, written), _Span(number, at, written)))

    def locate(self, rows: Sequence[int], fields: Sequence[str]) -> list[Piece] | Missing:
        """What to read from which block. Places are positions in `rows`; every place and field is in exactly one piece."""
        wanted = frozenset(fields)
        pieces: dict[tuple[int, frozenset[str]], Piece] = {}
        for place, row in enumerate(rows):
            left = wanted
            for span in self._spans.get(row, ()):
                if taken := span.fields & left:
                    left -= taken
                    piece = pieces.get((span.number, taken))
                    if piece is None:
                        ordered = tuple(name for name in fields if name in taken)
                        piece = pieces[span.number, taken] = Piece(self._blocks[span.number], ordered)
                    piece.rows.append(span.row)
                    piece.places.append(place)
            if left:
                return Missing(row, min(left))
        return list(pieces.values())

    def clear(self, rows: Iterable[int]) -> None:
        """Forgets all fields of these rows. Unknown rows are none."""
        for row in rows:
            self._replace(row, ())

    def dump(self) -> tuple[dict[int, tuple[tuple[int, int, frozenset[str]], ...]], dict[int, Any]]:
        """Everything: for each row which block has which of its fields, as `(number of the block, row in it, fields)`; and the blocks."""
        spans = {row: tuple((s.number, s.row, s.fields) for s in spans) for row, spans in self._spans.items()}
        return spans, dict(self._blocks)

    def restore(self, spans: dict[int, tuple[tuple[int, int, frozenset[str]], ...]], blocks: dict[int, Any]) -> None:
        """Takes what `dump` gave in place of what is there."""
        self.__init__()  # type: ignore[misc]
        self._blocks, self._needed = dict(blocks), dict.fromkeys(blocks, 0)
        self._next = max(blocks, default=-1) + 1
        for row, of in spans.items():
            self._replace(row, tuple(_Span(*span) for span in of))

    def stats(self) -> dict[str, int]:
        """`rows` that have a field, and `blocks` that they need."""
        return {"rows": len(self._spans), "blocks": len(self._blocks)}

    def _without(self, row: int, fields: frozenset[str]) -> Iterable[_Span]:
        for span in self._spans.get(row, ()):
            if rest := span.fields - fields:
                yield span if len(rest) == len(span.fields) else _Span(span.number, span.row, rest)

    def _replace(self, row: int, spans: tuple[_Span, ...]) -> None:
        before = self._spans.pop(row, ())
        for span in spans:
            self._needed[span.number] += 1
        for span in before:
            self._needed[span.number] -= 1
            if not self._needed[span.number]:
                del self._needed[span.number], self._blocks[span.number]
        if spans:
            self._spans[row] = spans
