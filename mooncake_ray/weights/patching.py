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
    """Brings boxes from a patch's version back to its base. As `apply`."""
    return _run(patch, regions, parts, _REVERT, _APPLY)


def _run(patch: Patch, regions: Regions, parts: Sequence[Part], mode: int, undo: int | None) -> list[Change]:
    patch.require(regions)
    boxes = _Boxes(patch, regions, parts)
    patch.verify(np.unique(boxes.segment))
    rows = patch.segments[boxes.segment]
    good, changed, digest = boxes.run(mode)
    expected = rows["digest"] if mode != _REVERT else np.uint64(0) - rows["digest"]
    wrong = boxes.whole & good & (digest != expected)
    if not np.all(good) or np.any(wrong):
        if undo is not None:
            boxes.run(undo)
        if not np.all(good):
            row = rows[~good][0]
            raise ChecksumError(f"region {int(row['region'])}: the segment at element {int(row['begin'])} cannot be decoded")
        row = rows[wrong][0]
        was, then = (patch.version, patch.base_version) if mode == _REVERT else (patch.base_version, patch.version)
        raise DeltaBaseError(
            f"region {int(row['region'])} does not hold version {was}: {int(wrong.sum())} segments would not hold version {then} "
            f"afterwards, the first at element {int(row['begin'])}"
        )
    sums = np.zeros((2, len(parts)), np.uint64)
    np.add.at(sums[0], boxes.box, changed)
    np.add.at(sums[1], boxes.box, digest)
    return [Change(int(c), int(d)) for c, d in sums.T]


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

    def run(self, mode: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each segment: whether it can be decoded, how many elements it changes, what that adds to their digest."""
        rows = patch_index.raw(self.patch.segments[self.segment])
        return _native.apply(self.patch.at[self.segment], rows, self.box, mode, *self.boxes)


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
