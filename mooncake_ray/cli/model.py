"""What can be concluded from a snapshot: who owns, who pins, how old. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mooncake_ray.snapshot import ObjectRow, Snapshot

__all__ = ["AGES", "Total", "by_age", "by_owner", "owner", "pinned", "pinners", "totals"]

AGES = (("< 10 s", 10.0), ("< 1 min", 60.0), ("< 10 min", 600.0), ("< 1 h", 3600.0), ("older", float("inf")))
NOBODY = "nobody"


@dataclass(frozen=True, slots=True)
class Total:
    """Objects that have something in common."""

    name: str
    objects: int
    bytes: int


def session_name(snapshot: Snapshot, session: int) -> str:
    """`label (pid N)` of a session."""
    for s in snapshot.sessions:
        if s.session == session:
            return f"{s.label} (pid {s.pid})"
    return f"session {session}"


def owner(snapshot: Snapshot, row: ObjectRow) -> str:
    """Whose an object is: of the process that answers for it; while it is being written, of its maker; else nobody's."""
    for claim in row.claims:
        if claim.owner:
            return session_name(snapshot, claim.owner)
    if row.state == "leased":
        return f"{row.creator_label} (pid {row.creator_pid})"
    return NOBODY


def totals(rows: Iterable[ObjectRow], name_of: Callable[[ObjectRow], str]) -> list[Total]:
    """Sums by name, the largest first."""
    sums: dict[str, tuple[int, int]] = {}
    for row in rows:
        name = name_of(row)
        objects, nbytes = sums.get(name, (0, 0))
        sums[name] = (objects + 1, nbytes + row.size)
    return sorted((Total(name, *both) for name, both in sums.items()), key=lambda t: (-t.bytes, t.name))


def by_owner(snapshot: Snapshot) -> list[Total]:
    return totals(snapshot.object_rows, lambda row: owner(snapshot, row))


def by_age(snapshot: Snapshot) -> list[Total]:
    """A total for each of AGES, in that order, empty ones too."""
    found = {t.name: t for t in totals(snapshot.object_rows, lambda row: next(name for name, limit in AGES if row.age_s < limit))}
    return [found.get(name, Total(name, 0, 0)) for name, _ in AGES]


def pinned(snapshot: Snapshot) -> list[ObjectRow]:
    """Objects that somebody has mapped, the largest first."""
    return sorted((row for row in snapshot.object_rows if row.pins), key=lambda row: (-row.size, row.id))


def pinners(snapshot: Snapshot, row: ObjectRow) -> str:
    """`a.py (pid 1), b.py (pid 2) x3`"""
    return ", ".join(session_name(snapshot, p.session) + (f" x{p.count}" if p.count > 1 else "") for p in row.pins)
