"""Applying patches to boxes of weights, in place, at a cost of what changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_ray._native import delta as _native
from mooncake_ray.errors import ChecksumError, DeltaBaseError, PlanError
from mooncake_ray.weights.digest import layout
from mooncake_ray.weights.patch import Patch, Regions, fits, verify

__all__ = ["Change", "Part", "apply", "check", "revert"]

_CHECK, _APPLY, _REVERT = 0, 1, 2


@dataclass(frozen=True)
class Part:
    """A box of a tensor as somebody holds it, and the region that its changes come from. Only what both have is changed."""

    region: int
    view: Any
    """torch.Tensor on the CPU or np.ndarray, of the box's shape, with any strides; writable. Leading ones may be missing or too many."""
    lo: tuple[int, ...]
    """Where the box begins in the whole tensor."""


@dataclass(frozen=True)
class Change:
    """What a patch does to a part."""

    changed: int
    """Elements."""
    digest: int
    """What that adds to the part's content digest, modulo 2^64."""


def apply(patch: Patch, regions: Regions, parts: Sequence[Part], *, version: int | None = None) -> list[Change]:
    """Brings boxes from a patch's base version to its version, in place. All of them, or none.

    Checksums of all that is needed are compared before anything is written. Where a part has whole segments, what they hold afterwards is verified,
    too: if it is not what it should be, the changes are taken back. Whether parts of segments are right only all who hold them know together: what
    `Change.digest` adds up to is what the segments, and the patch's table, say.

    No two parts may overlap in memory. Thread-safe for disjoint parts; releases the GIL; uses several threads.

    Args:
        version: What the boxes hold, where it is known.

    Raises:
        DeltaBaseError: they hold another version than the patch's base, by number or by content, or the patch is of another object.
        ChecksumError: the patch is damaged, or does not have the segments that are needed.
        PlanError: a part is no box of its region's tensor.
    """
    if version is not None and version != patch.base_version:
        raise DeltaBaseError(f"the patch to version {patch.version} is against version {patch.base_version}; here is version {version}")
    job = _Job(patch, regions, parts)
    if wrong := job.run(_APPLY):
        job.run(_REVERT)
        raise wrong
    return job.changes()


def check(patch: Patch, regions: Regions, parts: Sequence[Part]) -> list[Change]:
    """What `apply` would do. Writes nothing. Raises the same."""
    job = _Job(patch, regions, parts)
    if wrong := job.run(_CHECK):
        raise wrong
    return job.changes()


def revert(patch: Patch, regions: Regions, parts: Sequence[Part]) -> list[Change]:
    """Brings boxes from a patch's version back to its base. As `apply`."""
    job = _Job(patch, regions, parts)
    if wrong := job.run(_REVERT):
        job.run(_APPLY)
        raise wrong
    return job.changes()


class _Job:
    """All segments of a patch that some parts need, with the parts as boxes."""

    def __init__(self, patch: Patch, regions: Regions, parts: Sequence[Part]) -> None:
        fits(patch, regions)
        self.patch, self.parts = patch, parts
        n, d = len(parts), regions.lo.shape[1]
        which = np.array([p.region for p in parts], np.int64)
        if n and not (0 <= which.min() and which.max() < len(regions)):
            raise PlanError(f"there are regions 0 … {len(regions) - 1}, not {which.tolist()}")
        at, lo, extents, strides = np.zeros(n, np.uint64), np.zeros((n, d), np.int64), np.ones((n, d), np.int64), np.zeros((n, d), np.int64)
        self.views = [p.view for p in parts]
        for i, part in enumerate(parts):
            at[i], item, shape, stride = layout(part.view)
            if item != regions.itemsize[part.region]:
                raise PlanError(f"region {part.region} has elements of {regions.itemsize[part.region]} bytes, its part {item}")
            while len(shape) > d and shape[0] == 1:
                shape, stride = shape[1:], stride[1:]
            start = list(part.lo)[-len(shape) :] if shape else []
            if len(shape) > d or len(start) != len(shape):
                raise PlanError(f"region {part.region}: a part of shape {tuple(shape)} at {part.lo}; its tensor has {d} dimensions")
            if shape:
                extents[i, d - len(shape) :], strides[i, d - len(shape) :], lo[i, d - len(shape) :] = shape, stride, start
        bad = np.any((lo < 0) | (lo + extents > regions.shape[which]), axis=1)
        if np.any(bad):
            i = int(np.flatnonzero(bad)[0])
            raise PlanError(
                f"region {which[i]}: a part of {extents[i].tolist()} at {lo[i].tolist()} is not in a tensor of shape {regions.shape[which[i]].tolist()}"
            )
        # What the region and the part both have, in the region's coordinates; and where that begins in the part's memory.
        first = np.maximum(lo, regions.lo[which])
        last = np.maximum(np.minimum(lo + extents, regions.hi[which]), first)
        at = at + np.sum((first - lo) * strides, axis=1).astype(np.uint64)
        self.boxes = (
            at,
            regions.itemsize[which].astype(np.int32),
            regions.index[which],
            np.ascontiguousarray(regions.extents[which]),
            np.ascontiguousarray(regions.steps[which]),
            np.ascontiguousarray(first - regions.lo[which]),
            np.ascontiguousarray(last - regions.lo[which]),
            strides,
        )
        some = np.all(first < last, axis=1)
        needed = [patch.needed(regions, int(which[i]), first[i].tolist(), last[i].tolist()) if some[i] else _NONE for i in range(n)]
        self.segments = np.concatenate(needed) if needed else _NONE
        self.box = np.repeat(np.arange(n), [len(x) for x in needed])
        self.whole = _holds_whole(regions, which, first, last, patch.segments[self.segments], self.box)
        verify(patch, np.unique(self.segments))

    def run(self, mode: int) -> Exception | None:
        """Returns what is wrong with it, which leaves boxes changed."""
        rows = self.patch.segments[self.segments]
        raw = rows.view(np.uint8).reshape(len(rows), -1)
        good, self.changed, self.digest = _native.apply(self.patch.at[self.segments], raw, self.box, mode, *self.boxes)
        if mode == _REVERT:
            self.digest = np.uint64(0) - self.digest
        if not np.all(good):
            row = rows[int(np.flatnonzero(~good)[0])]
            return ChecksumError(f"region {int(row['region'])}: the segment at element {int(row['begin'])} cannot be decoded")
        wrong = self.whole & (self.digest != rows["digest"])
        if np.any(wrong):
            row = rows[int(np.flatnonzero(wrong)[0])]
            return DeltaBaseError(
                f"region {int(row['region'])} does not hold version {self.patch.base_version}: {int(np.sum(wrong))} segments would not hold version "
                f"{self.patch.version} afterwards, the first at element {int(row['begin'])}"
            )
        return None

    def changes(self) -> list[Change]:
        n = len(self.parts)
        changed, digest = np.zeros(n, np.uint64), np.zeros(n, np.uint64)
        np.add.at(changed, self.box, self.changed)
        np.add.at(digest, self.box, self.digest)
        return [Change(int(c), int(d)) for c, d in zip(changed, digest, strict=True)]


_NONE = np.zeros(0, np.int64)


def _holds_whole(regions: Regions, which: np.ndarray, first: np.ndarray, last: np.ndarray, rows: np.ndarray, box: np.ndarray) -> np.ndarray:
    """bool: for each of the segments, whether all of it is in its box."""
    lo, hi, extents = first - regions.lo[which], last - regions.lo[which], regions.extents[which]
    # A box that is whole in all but one dimension, with single elements before that one, is a span of positions.
    full = (lo == 0) & (hi == extents)
    d = extents.shape[1]
    steps = np.ones_like(extents)
    for k in range(d - 2, -1, -1):
        steps[:, k] = steps[:, k + 1] * extents[:, k + 1]
    begin, end = np.sum(lo * steps, axis=1), np.sum((hi - 1) * steps, axis=1) + 1
    is_span = end - begin == np.prod(hi - lo, axis=1)
    del full
    at = rows["begin"].astype(np.int64)
    return is_span[box] & (at >= begin[box]) & (at + rows["elements"] <= end[box])
