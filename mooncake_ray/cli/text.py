"""Numbers and tables as text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["UNITS", "age", "bar", "count", "size", "table"]

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def size(nbytes: int, unit: str = "auto") -> str:
    """`1536` → `"1.5 KiB"`; always in `unit` unless that is `"auto"`."""
    if unit == "auto":
        unit = next((name for name, one in reversed(UNITS.items()) if abs(nbytes) >= one), "B")
    value = nbytes / UNITS[unit]
    return f"{nbytes} B" if unit == "B" else f"{value:.0f} {unit}" if value == int(value) or value >= 100 else f"{value:.1f} {unit}"


def age(seconds: float) -> str:
    """`75.2` → `"1m15s"`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    s = int(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02}s"
    return f"{s // 3600}h{s % 3600 // 60:02}m" if s < 86400 else f"{s // 86400}d{s % 86400 // 3600:02}h"


def count(n: int, noun: str, plural: str | None = None) -> str:
    """`1, "object"` → `"1 object"`; `2, "object"` → `"2 objects"`."""
    return f"{n} {noun}" if n == 1 else f"{n} {plural or noun + 's'}"


def bar(part: float, whole: float, width: int = 40) -> str:
    """`[#####…]`, with as many marks as the part is of the whole; a part that is not nothing has one."""
    share = min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
    marks = max(1, round(share * width)) if share > 0 else 0
    return f"[{'#' * marks}{'.' * (width - marks)}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Aligned lines. Columns whose index is in `right` are aligned right."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(padded).rstrip()

    return [line(head), *(line(row) for row in rows)]
