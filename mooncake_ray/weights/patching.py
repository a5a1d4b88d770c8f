"""Applying patches to boxes of weights, in place, at a cost of what changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_ray._native import delta as _native
from mooncake_ray.errors import ChecksumError, DeltaBaseError, PlanError
from mooncake_ray.weights import patch_index
from mooncake_ray.weights.digest import layout, steps_of
from mooncake_ray.weights.patch_data import Patch
from mooncake_ray.weights.regions import Regions

__all__ = ["Change", "Part", "apply", "check", "revert"]

_CHECK, _APPLY, _REVERT = 0, 1, 2
_DONE, _BROKEN, _STALE = 0, 1, 2


@dataclass(frozen=True)
class Part:
    """A box of a tensor as somebody holds it, and the region that its changes come from. Only what both have is changed."""

    region: int
    view: Any
    """torch.Tensor on the CPU or np.ndarray, of the box's shape, with any strides; writable. Leading ones may be missing or too many."""
    lo: Sequence[int]
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

    Checksums of all that is needed are compared before anything is written. Where a part has whole segments, what they hold then is
    verified, too: if it is not what it should be, the changes are taken back. Of a part that has pieces of segments, its own holder cannot
    tell; but `Change.digest`, summed up over all who share a segment, is what that segment's row says.

    No two parts may overlap in memory. Uses several threads, and releases the GIL; others may not read or write the parts meanwhile.

    Args:
        version: What the boxes hold, where it is known.

    Returns:
        For each part.

    Raises:
        DeltaBaseError: they hold another version than the patch's base, by number or by content, or the patch is of another object.
        ChecksumError: the patch is damaged, or has not all the segments that are needed.
        PlanError: a part is no box of its region's tensor.
        MemoryError: some of it may be applied.
    """
    if version is not None and version != patch.base_version:
        raise DeltaBaseError(f"the patch to version {patch.version} is against version {patch.base_version}; here is version {version}")
    return _run(patch, regions, parts, _APPLY, _REVERT)


def check(patch: Patch, regions: Regions, parts: Sequence[Part]) -> list[Change]:
    """What `apply` would do. Writes nothing. Raises the same."""
    return _run(patch, regions, parts, _CHECK, None)


def revert(patch: Patch, regions: Regions, parts: Sequence[Part]) -> list[Change]:
    """Brings boxes from a patch's version back to its base. As `apply`; but not if segments are coded against what was there."""
    return _run(patch, regions, parts, _REVERT, _APPLY)


def _run(patch: Patch, regions: Regions, parts: Sequence[Part], mode: int, undo: int | None) -> list[Change]:
    patch.require(regions)
    boxes = _Boxes(patch, regions, parts)
    patch.verify(np.unique(boxes.segment))
    rows = patch.segments[boxes.segment]
    classed = rows["form"] == patch_index.CLASSED
    if np.any(classed):
        if mode == _REVERT:
            raise DeltaBaseError(f"the patch to version {patch.version} is coded against what was there, and cannot be taken back")
        if np.any(partial := classed & ~boxes.whole):
            raise PlanError(
                f"region {int(rows[partial][0]['region'])}: {int(partial.sum())} segments are coded against what was there, and its part does "
                f"not hold all of the one at element {int(rows[partial][0]['begin'])}"
            )
        if mode == _APPLY and (rest := np.flatnonzero(~classed)).size:  # what can be taken back is tried, as what cannot would stay
            what, _, digest = boxes.run(_CHECK, rest)
            if error := _error(patch, rows[rest], boxes.whole[rest], what, digest, _CHECK):
                raise error
    what, changed, digest = boxes.run(mode)
    if error := _error(patch, rows, boxes.whole, what, digest, mode):
        if undo is not None and not np.any(what == _STALE):
            boxes.run(undo)
        raise error
    sums = np.zeros((2, len(parts)), np.uint64)
    np.add.at(sums[0], boxes.box, changed)
    np.add.at(sums[1], boxes.box, digest)
    return [Change(int(c), int(d)) for c, d in sums.T]


def _error(patch: Patch, rows: np.ndarray, whole: np.ndarray, what: np.ndarray, digest: np.ndarray, mode: int) -> Exception | None:
    """What was wrong with segments: rows of the index, whether parts hold all of each, and what became of it."""
    if np.any(broken := what == _BROKEN):
        row = rows[broken][0]
        return ChecksumError(f"region {int(row['region'])}: the segment at element {int(row['begin'])} cannot be decoded")
    expected = rows["digest"] if mode != _REVERT else np.uint64(0) - rows["digest"]
    wrong = (what == _STALE) | (whole & (what == _DONE) & (digest != expected))
    if not np.any(wrong):
        return None
    row = rows[wrong][0]
    was, then = (patch.version, patch.base_version) if mode == _REVERT else (patch.base_version, patch.version)
    return DeltaBaseError(
        f"region {int(row['region'])} does not hold version {was}: {int(wrong.sum())} segments would not hold version {then} "
        f"afterwards, the first at element {int(row['begin'])}"
    )


class _Boxes:
    """The segments of a patch that some parts need, and the parts that need them as boxes of regions."""

    def __init__(self, patch: Patch, regions: Regions, parts: Sequence[Part]) -> None:
        self.patch = patch
        n, d = len(parts), regions.lo.shape[1]
        which = np.array([p.region for p in parts], np.int64)
        if n and not (which.min() >= 0 and which.max() < len(regions)):
            raise PlanError(f"there are regions 0 … {len(regions) - 1}, and parts of {which.min()} … {which.max()}")
        at, lo = np.zeros(n, np.uint64), np.zeros((n, d), np.int64)
        extents, strides = np.ones((n, d), np.int64), np.zeros((n, d), np.int64)
        touched = patch.touched[which]
        for i in np.flatnonzero(touched):
            at[i], extents[i], strides[i], lo[i] = _placed(parts[i], d, int(regions.itemsize[which[i]]))
        bad = touched & np.any((lo < 0) | (lo + extents > regions.shape[which]), axis=1)
        if np.any(bad):
            i = int(np.flatnonzero(bad)[0])
            shape = regions.shape[which[i]].tolist()
            raise PlanError(f"region {which[i]}: a part of {extents[i].tolist()} at {lo[i].tolist()} is not in a tensor of {shape}")
        self.segment, self.box = patch.needed(regions, which, lo, lo + extents)
        # What region and part both have, in the region's coordinates; and where that begins in the part's memory.
        first = np.maximum(lo, regions.lo[which])
        last = np.maximum(np.minimum(lo + extents, regions.hi[which]), first)
        at += np.sum((first - lo) * strides, axis=1).astype(np.uint64)
        first, last = first - regions.lo[which], last - regions.lo[which]
        index, whole = regions.index[which], regions.extents[which]
        self.boxes = (at, regions.itemsize[which], index, whole, regions.steps[which], first, last, strides)
        # Whose positions in the region are adjacent may have whole segments.
        steps = steps_of(whole)
        begin, end = np.sum(first * steps, axis=1), np.sum((last - 1) * steps, axis=1) + 1
        adjacent = end - begin == np.prod(last - first, axis=1)
        start = patch.segments["begin"][self.segment].astype(np.int64)
        stop = start + patch.segments["elements"][self.segment]
        self.whole = adjacent[self.box] & (start >= begin[self.box]) & (stop <= end[self.box])

    def run(self, mode: int, which: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each segment, or for some: what became of it, how many elements it changes, what that adds to their digest."""
        which = np.arange(len(self.segment)) if which is None else which
        segment = self.segment[which]
        return _native.apply(self.patch.at[segment], patch_index.raw(self.patch.segments[segment]), self.box[which], mode, *self.boxes)


def _placed(part: Part, d: int, itemsize: int) -> tuple[int, list[int], list[int], list[int]]:
    """Address, extents, strides and lo of a part, with d dimensions.

    Raises:
        PlanError: its elements, or its dimensions, are not its tensor's.
    """
    at, item, extents, strides = layout(part.view)
    if item != itemsize:
        raise PlanError(f"region {part.region} has elements of {itemsize} bytes, its part of {item}")
    lo = list(part.lo)
    while len(extents) > d and extents[0] == 1:
        extents, strides = extents[1:], strides[1:]
    while len(lo) > len(extents) and lo[0] == 0:
        lo = lo[1:]
    if len(extents) > d or len(lo) > len(extents):
        raise PlanError(f"region {part.region}: a part of {extents} at {list(part.lo)}, of a tensor of {d} dimensions")
    missing = d - len(extents)
    return at, [1] * missing + extents, [0] * missing + strides, [0] * (d - len(lo)) + lo
