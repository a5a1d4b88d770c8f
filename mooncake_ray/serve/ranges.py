"""Ranges and preconditions of HTTP (RFC 9110, 13 and 14): what of a file a request is answered with. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Answer", "answer"]

_ONE = re.compile(r"(\d*)-(\d*)$")
_MOST_DIGITS = 19


@dataclass(frozen=True)
class Answer:
    """How a GET or HEAD is answered: status 200, 206, 304, 412 or 416, with bytes [begin, end)."""

    status: int
    begin: int = 0
    end: int = 0


def answer(method: str, headers: Mapping[str, str], nbytes: int, etag: str) -> Answer:
    """
    Args:
        method: Of the request; only of a GET a range is looked at.
        headers: Of the request, by names in lower case.
        nbytes: Of the whole file.
        etag: A strong one, with its quotes.
    """
    if (match := headers.get("if-match")) is not None and not _among(etag, match, weak=False):
        return Answer(412)
    if (none := headers.get("if-none-match")) is not None and _among(etag, none, weak=True):
        return Answer(304)
    wanted = headers.get("range")
    if wanted is None or method != "GET" or ("if-range" in headers and headers["if-range"].strip() != etag):
        return Answer(200, 0, nbytes)
    return _ranged(wanted, nbytes)


def _ranged(wanted: str, nbytes: int) -> Answer:
    """One range. Several, and what is no range of bytes, are answered with all, as RFC 9110 allows."""
    unit, _, text = wanted.partition("=")
    found = _ONE.match(text.strip())
    if unit.strip().lower() != "bytes" or found is None or max(map(len, found.groups())) > _MOST_DIGITS:
        return Answer(200, 0, nbytes)
    first, last = found.groups()
    if not first and not last:
        return Answer(200, 0, nbytes)
    if not first:  # so many of the last bytes
        begin, end = max(0, nbytes - int(last)), nbytes
    else:
        begin, end = int(first), nbytes
        if last:
            if int(last) < begin:
                return Answer(200, 0, nbytes)
            end = min(nbytes, int(last) + 1)
    return Answer(206, begin, end) if begin < end else Answer(416)


def _among(etag: str, tags: str, *, weak: bool) -> bool:
    """Whether a list of tags has this one, by weak comparison or by strong."""
    listed = [tag.strip() for tag in tags.split(",")]
    return "*" in listed or etag in listed or (weak and f"W/{etag}" in listed)
