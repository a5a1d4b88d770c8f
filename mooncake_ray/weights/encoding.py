"""Patches from two versions of an object, and from several patches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_ray._native import delta as _native
from mooncake_ray.errors import ChecksumError, DeltaBaseError
from mooncake_ray.weights import patch_index
from mooncake_ray.weights.patch_data import Patch
from mooncake_ray.weights.patch_index import REGION, SEGMENT
from mooncake_ray.weights.regions import Regions, bytes_of

__all__ = ["Classing", "encode", "merge"]


@dataclass(frozen=True, eq=False)
class Classing:
    """That changes may be coded against what was there. The smaller an element is, the more often a step changes it, and by more; so there are
    frequencies for each size of elements. That saves a twentieth of the bytes, or, with distances `apart`, three tenths.

    Such a segment can only be applied by who holds all of it, it cannot be taken back, and to merge it takes the base.
    """

    mantissa: np.ndarray
    """int32 (m): for each region, bits of an element below its exponent (bfloat16 7, float16 10, float32 23); -1 for a region that is not to be
    coded so."""
    apart: bool = False
    """Whether distances are by size, too. Then applying takes a look at every element of a segment that changed, and not only at the changes."""


def encode(
    old: Any,
    new: Any,
    regions: Regions,
    *,
    base_version: int,
    version: int,
    epoch: int = 0,
    object: bytes = bytes(32),
    before: np.ndarray | None = None,
    classing: Classing | None = None,
) -> Patch:
    """What changed from one version of an object to another. Uses several threads, and releases the GIL. Nobody may write the objects meanwhile.

    Args:
        old: The object's bytes at the base version; buffer protocol.
        new: The same, at the new version.
        regions: What is where in both.
        object: 32 bytes by which receivers recognize what the patch is of.
        before: uint64 (m): content digests of the regions at the base version, if they are known. Otherwise those of changed regions
            are computed, which reads them once more.
        classing: For fewer bytes, where receivers hold whole segments.

    Raises:
        ValueError: an object is shorter than its regions, or versions do not grow.
    """
    if version <= base_version:
        raise ValueError(f"a patch from version {base_version} to {version}")
    was, now = bytes_of(old), bytes_of(new)
    where = regions.addresses(was), regions.addresses(now)
    mantissa, apart = _classing(regions, classing)
    rows, payload = _native.encode(*where, regions.itemsize, regions.index, regions.extents, regions.steps, mantissa, apart)
    segments = rows.reshape(-1).view(SEGMENT)
    touched = np.unique(segments["region"]).astype(np.int64)
    digests = regions.only(touched).digests(was) if before is None else np.asarray(before, np.uint64)[touched]
    table = _table(regions, segments, digests)
    return Patch.parse(patch_index.joined(len(regions), base_version, version, epoch, object, table, segments, payload))


def merge(patches: Sequence[Patch], regions: Regions, *, base: Any = None, classing: Classing | None = None) -> Patch:
    """One patch for several successive ones: from the first one's base to the last one's version. What is again as it was is no change in it.
    Costs memory for one segment a thread. Uses several threads, and releases the GIL.

    Args:
        base: The object's bytes at the first one's base version. Needed only for patches that are coded against what was there.
        classing: As `encode` takes it; only with `base`.

    Raises:
        DeltaBaseError: one does not begin where the one before ended, is of another object, or is coded against what was there, without `base`.
        ChecksumError: one is damaged.
    """
    if not patches:
        raise ValueError("no patches to merge")
    patches[0].require(regions)
    for a, b in itertools.pairwise(patches):
        if b.base_version != a.version:
            raise DeltaBaseError(f"a patch from version {b.base_version} does not follow one to version {a.version}")
        if b.object != a.object:
            raise DeltaBaseError(f"the patches to versions {a.version} and {b.version} are of different objects")
        b.require(regions)
    if base is None and any(p.classed for p in patches):
        raise DeltaBaseError("some of the patches are coded against what was there, and cannot be merged without their base")
    before, after = np.zeros((2, len(regions)), np.uint64)
    known = np.zeros(len(regions), np.bool_)
    for p in patches:
        p.verify()
        which, is_known = p.table["region"], known[p.table["region"]]
        if np.any(wrong := is_known & (after[which] != p.table["before"])):
            raise DeltaBaseError(
                f"{int(wrong.sum())} regions at version {p.base_version} are not what the patch to version {p.version} is against, the first "
                f"is {int(which[wrong][0])}"
            )
        before[which[~is_known]] = p.table["before"][~is_known]
        after[which], known[which] = p.table["after"], True
    rows = np.concatenate([p.segments for p in patches])
    at = np.concatenate([p.at for p in patches])
    order = np.lexsort((rows["begin"], rows["region"]))  # stable: by patch, last
    rows, at = rows[order], at[order]
    fresh = np.ones(len(rows), np.bool_)
    fresh[1:] = (rows["region"][1:] != rows["region"][:-1]) | (rows["begin"][1:] != rows["begin"][:-1])
    start = np.flatnonzero(fresh)
    first = np.concatenate([start, [len(rows)]]).astype(np.int64)
    of, old = rows["region"][start], np.zeros(len(start), np.uint64)
    if base is not None:
        old = regions.addresses(bytes_of(base))[of] + rows["begin"][start] * regions.itemsize[of].astype(np.uint64)
    mantissa, apart = _classing(regions, classing if base is not None else None)
    merged, payload, bad = _native.merge(at, patch_index.raw(rows), first, regions.itemsize[of], old, mantissa[of], apart)
    if bad:
        raise ChecksumError(f"{len(bad)} segments cannot be merged, the first is of region {int(of[bad[0]])}")
    segments = merged.reshape(-1).view(SEGMENT)
    table = _table(regions, segments, before[np.unique(segments["region"])])
    a, b = patches[0], patches[-1]
    return Patch.parse(patch_index.joined(a.regions, a.base_version, b.version, b.epoch, a.object, table, segments, payload))


def _classing(regions: Regions, classing: Classing | None) -> tuple[np.ndarray, bool]:
    if classing is None:
        return np.full(len(regions), -1, np.int32), False
    if len(classing.mantissa) != len(regions):
        raise ValueError(f"there are {len(regions)} regions, and {len(classing.mantissa)} numbers of mantissa bits")
    return np.ascontiguousarray(classing.mantissa, np.int32), classing.apart


def _table(regions: Regions, segments: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Rows of REGION for the regions that segments are of, with their digests before."""
    touched, start, counts = np.unique(segments["region"], return_index=True, return_counts=True)
    table = np.zeros(len(touched), REGION)
    table["region"], table["segments"], table["elements"], table["before"] = touched, counts, regions.elements[touched], before
    if len(touched):
        table["changed"] = np.add.reduceat(segments["changed"].astype(np.uint64), start)
        table["after"] = before + np.add.reduceat(segments["digest"], start)
    return table
