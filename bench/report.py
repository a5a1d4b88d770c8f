"""What a bench found, as lines of JSON and as tables. Pure: measures nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

__all__ = ["Result", "Target", "compare", "duration", "json_lines", "quantity", "summarize", "tables", "target_table"]


@dataclass(frozen=True)
class Result:
    """What one subject needed, or managed, in one case."""

    bench: str
    case: str
    subject: str
    value: float  # the median
    best: float
    runs: int
    extra: dict[str, Any] = field(default_factory=dict)
    unit: str = "s"  # or "bytes", "bytes/s", "samples/s", "fraction"


@dataclass(frozen=True)
class Target:
    """A ratio of medians and its limit. `ratio` is None where the cases it needs were not run."""

    name: str
    ratio: float | None
    limit: float
    at_least: bool = False
    best: float | None = None
    """The same ratio of the shortest times: where it is far better, other work on the machine is part of the median."""
    detail: str = ""

    @property
    def ok(self) -> bool | None:
        if self.ratio is None:
            return None
        return self.ratio >= self.limit if self.at_least else self.ratio <= self.limit


def summarize(bench: str, case: str, subject: str, values: Sequence[float], extra: dict[str, Any] | None = None, unit: str = "s") -> Result:
    best = max(values) if unit.endswith("/s") or unit == "fraction" else min(values)
    return Result(bench, case, subject, median(values), best, len(values), extra or {}, unit)


def compare(name: str, above: Result | None, below: Result | None, limit: float, *, at_least: bool = False) -> Target:
    """The target that one result divided by another keeps to a limit; not run if either is missing."""
    if above is None or below is None:
        return Target(name, None, limit, at_least)
    detail = f"{quantity(above.value, above.unit)} : {quantity(below.value, below.unit)}"
    return Target(name, above.value / below.value, limit, at_least, above.best / below.best, detail)


def json_lines(results: Iterable[Result]) -> Iterator[str]:
    for r in results:
        line = {"bench": r.bench, "case": r.case, "subject": r.subject, "value": float(r.value), "unit": r.unit, "runs": r.runs, **r.extra}
        yield json.dumps(line)


def tables(results: Sequence[Result], baselines: Sequence[str]) -> Iterator[str]:
    """A table a case: subjects as columns; their times, and the ratio of the medians to that of each baseline that was run."""
    for case in dict.fromkeys(r.case for r in results):
        columns = [r for r in results if r.case == case]
        rows = [["", *(r.subject for r in columns)], ["median", *(quantity(r.value, r.unit) for r in columns)]]
        for base in (r for r in columns if r.subject in baselines):
            rows.append([f"/ {base.subject}", *(_ratio(r.value / base.value) for r in columns)])
        for name in dict.fromkeys(name for r in columns for name in r.extra):
            rows.append([name, *(str(r.extra.get(name, "")) for r in columns)])
        yield f"{case}, {columns[0].runs} runs\n{_aligned(rows)}\n"


def target_table(targets: Sequence[Target]) -> str:
    rows = [["target", "limit", "measured", "", "at best", "medians"]]
    for t in targets:
        measured, best = ("-" if x is None else _ratio(x) for x in (t.ratio, t.best))
        verdict = {True: "ok", False: "miss", None: "not run"}[t.ok]
        rows.append([t.name, f"{'>=' if t.at_least else '<='} {t.limit:g}", measured, verdict, best, t.detail])
    return _aligned(rows, left=(0, 3, 5))


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale or unit == "us":
            return f"{_digits(seconds / scale)} {unit}"
    raise AssertionError


def quantity(value: float, unit: str) -> str:
    """A value for people to read."""
    if unit == "s":
        return duration(value)
    for prefix, scale in (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if abs(value) >= scale and "bytes" in unit:
            return f"{_digits(value / scale)} {unit.replace('bytes', prefix + 'B')}"
    return f"{_digits(value)} {unit}"


def _ratio(x: float) -> str:
    return f"{_digits(x)}x"


def _digits(x: float) -> str:
    """Three significant digits, and the whole integer part."""
    return f"{x:.0f}" if abs(x) >= 99.95 else f"{x:.1f}" if abs(x) >= 9.995 else f"{x:.2f}" if abs(x) >= 0.0995 else f"{x:.3f}"


def _aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
