"""`Patch`: what changed in one published object between two versions, as it is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mooncake_ray._native import delta as _native
from mooncake_ray.errors import ChecksumError, DeltaBaseError
from mooncake_ray.weights import patch_index
from mooncake_ray.weights.digest import steps_of
from mooncake_ray.weights.regions import Regions, bytes_of

__all__ = ["Patch"]


@dataclass(frozen=True, eq=False)
class Patch:
    """A patch, or its index and some of its segments. Immutable; holds on to the memory it was read from, which must not change."""

    regions: int
    """Of the object, changed or not."""
    base_version: int
    version: int
    epoch: int
    object: bytes
    """32 bytes: digest of the layout of the object it is of."""
    table: np.ndarray
    """A row for each region that changed: region, segments, elements, changed, before, after (content digests)."""
    segments: np.ndarray
    """A row for each segment: begin, offset, digest, checksum, elements, changed, nbytes, region, form."""
    index_bytes: int
    """Of head and index. The payload begins there."""
    data: np.ndarray | None
    """uint8: all of it, in order, if it is here."""
    at: np.ndarray
    """uint64: for each segment, the address of its bytes; 0 where they are not here."""
    kept: tuple[Any, ...]
    """Whose memory `at` is in."""

    @property
    def nbytes(self) -> int:
        return self.index_bytes + int(self.segments["nbytes"].sum(dtype=np.int64))

    @property
    def changed(self) -> int:
        """Elements."""
        return int(self.table["changed"].sum(dtype=np.int64))

    @cached_property
    def classed(self) -> bool:
        """Whether segments of it are coded against what was there: see `encode`."""
        return bool(np.any(self.segments["form"] == patch_index.CLASSED))

    @cached_property
    def touched(self) -> np.ndarray:
        """bool (regions): in which anything changed."""
        out = np.zeros(self.regions, np.bool_)
        out[self.table["region"]] = True
        return out

    @cached_property
    def first(self) -> np.ndarray:
        """int64 (rows of `table` + 1): where each changed region's segments begin."""
        return np.concatenate([[0], np.cumsum(self.table["segments"], dtype=np.int64)])

    @cached_property
    def row(self) -> np.ndarray:
        """int64 (regions): of each region in `table`; -1 where nothing changed."""
        out = np.full(self.regions, -1, np.int64)
        out[self.table["region"]] = np.arange(len(self.table))
        return out

    @staticmethod
    def bytes_of_index(head: Any) -> int:
        """How many bytes head and index have, from the first `HEAD_BYTES` of a patch.

        Raises:
            ChecksumError: this is not the beginning of a patch.
        """
        return patch_index.index_bytes(patch_index.head_of(bytes_of(head)))

    @classmethod
    def parse(cls, data: Any, *, whole: bool = True) -> Patch:
        """A patch from its bytes, whose head and index are verified. What is coded is verified when it is applied.

        Args:
            data: Anything with the buffer protocol. Not copied.
            whole: Otherwise the payload is not looked for: see `with_segments`.

        Raises:
            ChecksumError: these are not a patch's bytes, or not all of them.
        """
        raw = bytes_of(data)
        head, table, segments = patch_index.split(raw)
        size = patch_index.index_bytes(head)
        if whole and len(raw) != size + int(head["payload"]):
            raise ChecksumError(f"a patch to version {int(head['version'])} has {size + int(head['payload'])} bytes; {len(raw)} came")
        return cls(
            int(head["regions"]),
            int(head["base_version"]),
            int(head["version"]),
            int(head["epoch"]),
            bytes(head["object"]),
            table,
            segments,
            size,
            raw if whole else None,
            np.uint64(raw.ctypes.data + size) + segments["offset"] if whole else np.zeros(len(segments), np.uint64),
            (raw,) if whole else (),
        )

    def with_segments(self, which: np.ndarray, data: Any) -> Patch:
        """The same with some more segments.

        Args:
            which: int64 (n): their numbers.
            data: Their bytes, one after the other. Not copied.

        Raises:
            ChecksumError: they have another size.
        """
        raw = bytes_of(data)
        sizes = self.segments["nbytes"][which].astype(np.int64)
        if int(sizes.sum()) != len(raw):
            raise ChecksumError(f"{len(which)} segments have {int(sizes.sum())} bytes; {len(raw)} came")
        at = self.at.copy()
        at[which] = np.uint64(raw.ctypes.data) + (np.cumsum(sizes) - sizes).astype(np.uint64)
        return replace(self, at=at, kept=(*self.kept, raw))

    def ranges(self, which: np.ndarray) -> np.ndarray:
        """uint64 (n, 2): where the bytes of these segments are among the patch's: offset, bytes."""
        rows = self.segments[which]
        return np.stack([rows["offset"] + np.uint64(self.index_bytes), rows["nbytes"].astype(np.uint64)], axis=1)

    def needed(self, regions: Regions, region: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which segments may change something in some boxes.

        Args:
            region: int64 (n): whose changes.
            lo: int64 (n, d): boxes of the whole tensor; what is not in the region does not count.
            hi: int64 (n, d).

        Returns:
            Numbers of segments, and for which of the boxes, rising: int64 (k), int64 (k).
        """
        row = self.row[region]
        first, last = np.maximum(lo, regions.lo[region]), np.minimum(hi, regions.hi[region])
        some = np.flatnonzero((row >= 0) & np.all(first < last, axis=1))
        row, region = row[some], region[some]
        steps = steps_of(regions.extents[region])
        begin = np.sum((first[some] - regions.lo[region]) * steps, axis=1)
        end = np.sum((last[some] - regions.lo[region] - 1) * steps, axis=1) + 1
        counts = self.first[row + 1] - self.first[row]
        box = np.repeat(np.arange(len(some)), counts)
        segment = np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts) + self.first[row][box]
        at = self.segments["begin"][segment].astype(np.int64)
        meets = (at < end[box]) & (at + self.segments["elements"][segment] > begin[box])
        return segment[meets], some[box[meets]]

    def require(self, regions: Regions) -> None:
        """Raises DeltaBaseError unless it is of an object with these regions, as far as their number and sizes tell."""
        if self.regions != len(regions):
            raise DeltaBaseError(f"the patch to version {self.version} is of {self.regions} regions, not of {len(regions)}")
        there = regions.elements[self.table["region"]]
        if np.any(wrong := there != self.table["elements"].astype(np.int64)):
            i = int(np.flatnonzero(wrong)[0])
            raise DeltaBaseError(
                f"region {int(self.table['region'][i])} has {int(there[i])} elements, in the patch to version {self.version} "
                f"{int(self.table['elements'][i])}"
            )

    def verify(self, which: np.ndarray | None = None) -> None:
        """Raises ChecksumError unless the bytes of these segments, or of all, are here and are what was coded."""
        which = np.arange(len(self.segments)) if which is None else which
        rows, at = self.segments[which], self.at[which]
        if missing := int(np.sum(at == 0)):
            raise ChecksumError(f"{missing} of {len(which)} segments of the patch to version {self.version} are missing")
        if bad := _native.damaged(at, patch_index.raw(rows)):
            row = rows[bad[0]]
            raise ChecksumError(
                f"the patch to version {self.version} is damaged: {len(bad)} segments, the first at element {int(row['begin'])} of "
                f"region {int(row['region'])}"
            )
