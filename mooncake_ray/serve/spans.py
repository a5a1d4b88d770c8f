"""`Content`: what is given out as one file, though it lies in pieces: in memory, in stretches of other files, or put together when asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

__all__ = ["Content", "FileSpan", "Gathered", "Held", "Span"]


@dataclass(frozen=True)
class Held:
    """Bytes in memory."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def cut(self, begin: int, end: int) -> Held:
        return Held(self.data[begin:end])


@dataclass(frozen=True)
class FileSpan:
    """A stretch of a file on the disk."""

    path: str
    offset: int
    nbytes: int

    def cut(self, begin: int, end: int) -> FileSpan:
        return replace(self, offset=self.offset + begin, nbytes=end - begin)


@dataclass(frozen=True, eq=False)
class Gathered:
    """Bytes that lie too scattered to be sent from where they are.

    Attributes:
        read: Gives [begin, end) of the whole in parts that follow each other, each small enough for memory, and good until the next.
    """

    read: Callable[[int, int], Iterator[memoryview]]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def cut(self, begin: int, end: int) -> Gathered:
        return replace(self, begin=self.begin + begin, end=self.begin + end)

    def parts(self) -> Iterator[memoryview]:
        return self.read(self.begin, self.end)


Span = Held | FileSpan | Gathered


class Content:
    """Immutable; reads nothing. What its spans name must stay as it is for as long as it is used.

    Attributes:
        nbytes: Of all of it.
        media_type, etag: As HTTP has them; the tag with its quotes. The same tag means the same bytes.
    """

    def __init__(self, spans: Iterable[Span], *, media_type: str, etag: str) -> None:
        self._spans = tuple(_joined(spans))
        self._ends = list(accumulate(s.nbytes for s in self._spans))
        self.nbytes = self._ends[-1] if self._ends else 0
        self.media_type, self.etag = media_type, etag

    def cut(self, begin: int, end: int) -> list[Span]:
        """The spans of bytes [begin, end), which must be in it."""
        if not 0 <= begin <= end <= self.nbytes:
            raise ValueError(f"bytes {begin} to {end} of {self.nbytes}")
        out: list[Span] = []
        at = bisect_right(self._ends, begin)
        while begin < end:
            span, upto = self._spans[at], self._ends[at]
            first, last = span.nbytes - (upto - begin), span.nbytes - max(0, upto - end)
            out.append(span if (first, last) == (0, span.nbytes) else span.cut(first, last))
            begin, at = upto, at + 1
        return out


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Without empty ones; stretches of a file that follow each other are one."""
    last: Span | None = None
    for span in spans:
        if not span.nbytes:
            continue
        if isinstance(last, FileSpan) and isinstance(span, FileSpan) and (last.path, last.offset + last.nbytes) == (span.path, span.offset):
            last = replace(last, nbytes=last.nbytes + span.nbytes)
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last
