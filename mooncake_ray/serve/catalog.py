"""What there is to read: snapshots, and versions that deltas lead to. Pure, but for what is looked up on the disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mooncake_ray.weights.delta_index import Index

__all__ = ["Entry", "listing"]


@dataclass(frozen=True)
class Entry:
    """A version."""

    version: int
    whole: bool
    bases: tuple[int, ...]


def listing(snapshots: Iterable[int], index: Index) -> Sequence[Entry]:
    """All versions, rising: those that are there whole, and those that deltas lead to from one that is."""
    whole = set(snapshots)
    reached = set(whole)
    for step in sorted(index.steps, key=lambda s: s.version):  # steps only lead to newer versions
        if step.base in reached:
            reached.add(step.version)
    bases: dict[int, list[int]] = {}
    for step in index.steps:
        bases.setdefault(step.version, []).append(step.base)
    return [Entry(v, v in whole, tuple(sorted(bases.get(v, ())))) for v in sorted(reached)]
