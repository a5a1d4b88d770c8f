"""`Index`: which anchors and patches a directory of deltas has, and the ways from one version to another."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_ray.errors import CorruptBlockError, SnapshotNotFoundError
from mooncake_ray.weights.file_source import Directory
from mooncake_ray.weights.manifest import sealed, unsealed

__all__ = ["INDEX", "Anchor", "Index", "PatchFile", "Step"]

INDEX = "deltas.json"
_FORMAT = 1


@dataclass(frozen=True)
class PatchFile:
    """What changed in what one rank writes."""

    rank: str
    file: str
    nbytes: int
    changed: int
    """Elements."""


@dataclass(frozen=True)
class Step:
    """From one version to another."""

    base: int
    version: int
    publication: str
    """Digest."""
    files: tuple[PatchFile, ...]

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.files)


@dataclass(frozen=True)
class Anchor:
    """A version that is there as a snapshot."""

    version: int
    publication: str
    nbytes: int


@dataclass(frozen=True)
class Index:
    """Immutable. The file of it is replaced as the last step of every change."""

    anchors: tuple[Anchor, ...] = ()
    """Rising."""
    steps: tuple[Step, ...] = ()
    """Rising by version."""

    @property
    def newest(self) -> int | None:
        """None: there is nothing yet."""
        return max((*(a.version for a in self.anchors), *(s.version for s in self.steps)), default=None)

    def way(self, base: int, version: int) -> Sequence[Step] | None:
        """The steps of fewest bytes from one version to another; None if there is no way."""
        best = {base: 0}
        came: dict[int, Step] = {}
        queue = [(0, base)]
        while queue:
            cost, at = heapq.heappop(queue)
            if at == version:
                steps: list[Step] = []
                while at != base:
                    steps.append(came[at])
                    at = came[at].base
                return steps[::-1]
            for step in self.steps:
                if step.base == at and cost + step.nbytes < best.get(step.version, cost + step.nbytes + 1):
                    best[step.version] = cost + step.nbytes
                    came[step.version] = step
                    heapq.heappush(queue, (best[step.version], step.version))
        return None

    def from_anchor(self, version: int) -> tuple[Anchor, Sequence[Step]] | None:
        """The anchor, and the steps from there, that get to a version with the fewest bytes."""
        ways = [(anchor, way) for anchor in self.anchors if (way := self.way(anchor.version, version)) is not None]
        return min(ways, key=lambda w: w[0].nbytes + sum(s.nbytes for s in w[1]), default=None)

    def pruned(self, keep: int, baseline: int | None) -> Index:
        """Without what is older than the newest `keep` anchors. But what leads from an anchor to the newest version stays, and to the baseline
        that patches to come are against."""
        first = [a.version for a in self.anchors[-keep:]][:1]
        for version in {self.newest, baseline} - {None}:
            first += [a.version for a in self.anchors if self.way(a.version, version) is not None][-1:]
        if not first:
            return self
        return Index(tuple(a for a in self.anchors if a.version >= min(first)), tuple(s for s in self.steps if s.base >= min(first)))

    def to_bytes(self) -> bytes:
        steps = [[s.base, s.version, s.publication, [[f.rank, f.file, f.nbytes, f.changed] for f in s.files]] for s in self.steps]
        return sealed({"format": _FORMAT, "anchors": [[a.version, a.publication, a.nbytes] for a in self.anchors], "steps": steps})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Index:
        """Raises CorruptBlockError, ChecksumError: it is not one, or not as it was written."""
        found: dict[str, Any] = unsealed(data, where)
        if found.get("format") != _FORMAT:
            raise CorruptBlockError(f"{where} is of format {found.get('format')}, not {_FORMAT}")
        steps = tuple(Step(base, v, p, tuple(PatchFile(*f) for f in files)) for base, v, p, files in found["steps"])
        return cls(tuple(Anchor(*a) for a in found["anchors"]), steps)

    @classmethod
    def of(cls, directory: Directory) -> Index:
        """What a directory says; an empty one where nothing was ever written."""
        try:
            return cls.from_bytes(directory.read(INDEX), directory.where(INDEX))
        except SnapshotNotFoundError:
            return cls()
