"""`Patch`: what changed in one published object between two versions, in few bytes; making, applying and joining them.

A patch is bytes: a head (versions, digest of the object's layout, which regions changed at all, an index of segments), and a payload of coded
segments. A segment is at most 2^21 adjacent elements of a region, whole rows where they are not longer, and can be read and applied by itself. What
is coded is a step for each changed element: new - old of its bits as an unsigned integer, modulo its size. So every bit pattern of every dtype comes
back as it was, the steps of successive patches add up, and a patch can be taken back.

Little-endian, and all of it:

    head      magic "MCRDELTA", format u32, regions u32, base version, version, epoch i64, digest of the object's layout 32 bytes, touched regions,
              segments, bytes of the payload u64, checksum of head and index u64 (itself 0)
    bitmap    a bit for each region, the lowest first: whether anything in it changed; padded to 8 bytes
    regions   for each that did: number u32, segments u32, elements, changed, content digest before and after u64
    segments  begin (element of the region), offset in the payload, what it adds to the digest, checksum of its bytes u64,
              elements, changed, bytes, region u32
    payload
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mooncake_ray._native import delta as _native
from mooncake_ray.errors import ChecksumError, DeltaBaseError
from mooncake_ray.weights.digest import steps_of

__all__ = ["HEAD_BYTES", "Patch", "Regions", "encode", "merge"]

_MAGIC = b"MCRDELTA"
_FORMAT = 1
_HEAD = np.dtype(
    [
        ("magic", "S8"),
        ("format", "<u4"),
        ("regions", "<u4"),
        ("base_version", "<i8"),
        ("version", "<i8"),
        ("epoch", "<i8"),
        ("object", "V32"),
        ("touched", "<u8"),
        ("segments", "<u8"),
        ("payload", "<u8"),
        ("checksum", "<u8"),
    ]
)
_REGION = np.dtype([("region", "<u4"), ("segments", "<u4"), ("elements", "<u8"), ("changed", "<u8"), ("before", "<u8"), ("after", "<u8")])
_SEGMENT = np.dtype(
    [
        ("begin", "<u8"),
        ("offset", "<u8"),
        ("digest", "<u8"),
        ("checksum", "<u8"),
        ("elements", "<u4"),
        ("changed", "<u4"),
        ("nbytes", "<u4"),
        ("region", "<u4"),
    ]
)
HEAD_BYTES = _HEAD.itemsize
"""So many bytes of a patch say how long head and index are: see `Patch.index_bytes`."""


@dataclass(frozen=True, eq=False)
class Regions:
    """The regions of one published object: packed boxes of tensors, each at an offset. Arrays are not to be written.

    `m` regions, `d` dimensions; those a tensor has not are [0, 1) of 1, and come first.
    """

    lo: np.ndarray
    """int64 (m, d): in the whole tensor."""
    hi: np.ndarray
    """int64 (m, d)."""
    shape: np.ndarray
    """int64 (m, d): of the whole tensor."""
    itemsize: np.ndarray
    """int32 (m): bytes of an element: 1, 2, 4 or 8."""
    offset: np.ndarray
    """int64 (m): bytes, in the object."""

    def __len__(self) -> int:
        return len(self.offset)

    @cached_property
    def extents(self) -> np.ndarray:
        """int64 (m, d)."""
        return np.ascontiguousarray(self.hi - self.lo)

    @cached_property
    def elements(self) -> np.ndarray:
        """int64 (m)."""
        return np.prod(self.extents, axis=1, dtype=np.int64)

    @cached_property
    def steps(self) -> np.ndarray:
        """int64 (m, d): from one element to the next along each dimension of the whole tensor."""
        return np.ascontiguousarray(steps_of(self.shape))

    @cached_property
    def index(self) -> np.ndarray:
        """uint64 (m): of each region's first element in the whole tensor."""
        return np.einsum("md,md->m", self.lo, self.steps).astype(np.uint64)

    @cached_property
    def strides(self) -> np.ndarray:
        """int64 (m, d): of the packed region, in bytes."""
        return np.ascontiguousarray(steps_of(self.extents) * self.itemsize[:, None])

    def addresses(self, data: np.ndarray) -> np.ndarray:
        """uint64 (m): where each region is in an object's bytes, uint8 (bytes,).

        Raises:
            ValueError: the object is shorter than what should be in it.
        """
        ends = self.offset + self.elements * self.itemsize
        if len(self) and int(ends.max()) > len(data):
            raise ValueError(f"an object of {len(data)} bytes; its regions end at byte {int(ends.max())}")
        return np.uint64(data.ctypes.data) + self.offset.astype(np.uint64)

    def digests(self, data: Any) -> np.ndarray:
        """uint64 (m): content digest of each region, from an object's bytes."""
        at = self.addresses(_bytes(data))
        rows = zip(at, self.itemsize, self.index, self.extents, self.steps, self.strides, strict=True)
        return np.array([_native.digest(int(a), int(i), int(x), e, s, t) for a, i, x, e, s, t in rows], np.uint64)


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
    """A row for each segment: begin, offset, digest, checksum, elements, changed, nbytes, region."""
    index_bytes: int
    """Of head and index. The payload begins there."""
    data: np.ndarray | None = None
    """uint8: all of it, in order, if it is here."""
    at: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    """uint64: for each segment, the address of its bytes; 0 where they are not here."""
    _kept: tuple[Any, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.index_bytes + int(self.segments["nbytes"].sum(dtype=np.int64))

    @property
    def changed(self) -> int:
        """Elements."""
        return int(self.table["changed"].sum(dtype=np.int64))

    @cached_property
    def touched(self) -> np.ndarray:
        """bool (regions): in which anything changed."""
        out = np.zeros(self.regions, np.bool_)
        out[self.table["region"]] = True
        return out

    @cached_property
    def first(self) -> np.ndarray:
        """int64 (touched + 1): where each touched region's segments begin."""
        return np.concatenate([[0], np.cumsum(self.table["segments"], dtype=np.int64)])

    def row(self, region: int) -> int:
        """Of a touched region in `table`; -1 if nothing in it changed."""
        row = int(np.searchsorted(self.table["region"], region))
        return row if row < len(self.table) and self.table["region"][row] == region else -1

    @staticmethod
    def bytes_of_index(head: Any) -> int:
        """How many bytes head and index have, from the first `HEAD_BYTES` of a patch.

        Raises:
            ChecksumError: this is not the beginning of a patch.
        """
        found = _head(_bytes(head))
        return _index_bytes(int(found["regions"]), int(found["touched"]), int(found["segments"]))

    @classmethod
    def parse(cls, data: Any, *, whole: bool = True) -> Patch:
        """A patch from its bytes, whose head and index are verified. What is coded is verified when it is applied.

        Args:
            data: Anything with the buffer protocol. Not copied.
            whole: Otherwise, the payload may be missing: see `with_segments`.

        Raises:
            ChecksumError: these are not a patch's bytes, or not all of them.
        """
        raw = _bytes(data)
        head = _head(raw)
        m, touched, count = int(head["regions"]), int(head["touched"]), int(head["segments"])
        size = _index_bytes(m, touched, count)
        if len(raw) < size:
            raise ChecksumError(f"a patch's index has {size} bytes; {len(raw)} came")
        index = raw[:size].copy()
        index[_HEAD.fields["checksum"][1] : HEAD_BYTES] = 0
        if _native.checksum(index) != int(head["checksum"]):
            raise ChecksumError(f"the index of a patch to version {int(head['version'])} is damaged")
        at = HEAD_BYTES
        bits = np.unpackbits(index[at : at + -(-m // 64) * 8], bitorder="little")
        at += -(-m // 64) * 8
        table = index[at : at + touched * _REGION.itemsize].view(_REGION)
        segments = index[at + touched * _REGION.itemsize :].view(_SEGMENT)
        _verify(bits, m, table, segments, int(head["payload"]))
        out = cls(
            m,
            int(head["base_version"]),
            int(head["version"]),
            int(head["epoch"]),
            bytes(head["object"]),
            table,
            segments,
            size,
            _kept=(raw,),
        )
        if not whole:
            object.__setattr__(out, "at", np.zeros(count, np.uint64))
            return out
        if len(raw) != out.nbytes:
            raise ChecksumError(f"a patch to version {out.version} has {out.nbytes} bytes; {len(raw)} came")
        object.__setattr__(out, "data", raw)
        object.__setattr__(out, "at", np.uint64(raw.ctypes.data + size) + segments["offset"])
        return out

    def with_segments(self, which: np.ndarray, data: Any) -> Patch:
        """The same with some more segments.

        Args:
            which: int64 (n): their numbers.
            data: Their bytes, one after the other. Not copied.

        Raises:
            ChecksumError: that is not their size.
        """
        raw = _bytes(data)
        sizes = self.segments["nbytes"][which].astype(np.int64)
        if int(sizes.sum()) != len(raw):
            raise ChecksumError(f"{len(which)} segments of {int(sizes.sum())} bytes; {len(raw)} came")
        at = self.at.copy()
        at[which] = np.uint64(raw.ctypes.data) + (np.cumsum(sizes) - sizes).astype(np.uint64)
        out = Patch(**{name: getattr(self, name) for name in _FIELDS} | {"at": at, "_kept": (*self._kept, raw)})
        return out

    def needed(self, regions: Regions, region: int, lo: Sequence[int], hi: Sequence[int]) -> np.ndarray:
        """int64: numbers of the segments that change anything in a box [lo, hi) of the whole tensor, as far as rows tell. A segment's bytes are
        at `index_bytes` + its offset."""
        row = self.row(region)
        if row < 0:
            return np.zeros(0, np.int64)
        mine = np.arange(self.first[row], self.first[row + 1])
        extents = regions.extents[region]
        d = len(extents)
        a = np.maximum([0] * (d - len(lo)) + list(lo), regions.lo[region]) - regions.lo[region]
        b = np.minimum([1] * (d - len(hi)) + list(hi), regions.hi[region]) - regions.lo[region]
        if np.any(a >= b):
            return np.zeros(0, np.int64)
        steps = steps_of(extents[None])[0]
        begin = self.segments["begin"][mine].astype(np.int64)
        end = begin + self.segments["elements"][mine]
        return mine[(end > int(np.dot(a, steps))) & (begin <= int(np.dot(b - 1, steps)))]


_FIELDS = ("regions", "base_version", "version", "epoch", "object", "table", "segments", "index_bytes", "data", "at", "_kept")


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
) -> Patch:
    """What changed from one version of an object to another. Uses several threads; releases the GIL; thread-safe while nobody writes the objects.

    Args:
        old: The object's bytes at the base version; buffer protocol.
        new: The same, at the new version.
        regions: What is where in both.
        object: 32 bytes by which receivers recognize what the patch is of.
        before: uint64 (m): content digests of the regions at the base version, where they are known; otherwise those of changed ones are computed.

    Raises:
        ValueError: an object is shorter than its regions, or versions do not grow.
    """
    if version <= base_version:
        raise ValueError(f"a patch from version {base_version} to {version}")
    was, now = _bytes(old), _bytes(new)
    rows, payload = _native.encode(
        regions.addresses(was), regions.addresses(now), regions.itemsize, regions.index, regions.extents, regions.steps
    )
    segments = rows.reshape(-1).view(_SEGMENT)
    touched = np.unique(segments["region"]).astype(np.int64)
    if before is None:
        digests = _part(regions, touched).digests(was)
    else:
        digests = np.asarray(before, np.uint64)[touched]
    return _assembled(len(regions), base_version, version, epoch, object, segments, payload, regions.elements[touched], digests)


def merge(patches: Sequence[Patch], regions: Regions) -> Patch:
    """One patch for several successive ones: from the first one's base to the last one's version. What is again as it was is no change in it.

    Raises:
        DeltaBaseError: one does not begin where the one before ended, or is of another object.
        ChecksumError: one is damaged.
    """
    if not patches:
        raise ValueError("no patches to merge")
    for a, b in zip(patches, patches[1:], strict=False):
        if b.base_version != a.version:
            raise DeltaBaseError(f"a patch from version {b.base_version} does not follow one to version {a.version}")
        if (b.object, b.regions) != (a.object, a.regions):
            raise DeltaBaseError(f"the patches to versions {a.version} and {b.version} are of different objects")
    fits(patches[0], regions)
    before: dict[int, int] = {}
    after: dict[int, int] = {}
    for p in patches:
        verify(p, np.arange(len(p.segments)))
        for row in p.table:
            region = int(row["region"])
            if after.setdefault(region, int(row["before"])) != int(row["before"]):
                raise DeltaBaseError(f"region {region} at version {p.base_version} is not what the patch to version {p.version} is against")
            before.setdefault(region, int(row["before"]))
            after[region] = int(row["after"])
    rows = np.concatenate([p.segments for p in patches])
    at = np.concatenate([p.at for p in patches])
    order = np.lexsort((np.repeat(np.arange(len(patches)), [len(p.segments) for p in patches]), rows["begin"], rows["region"]))
    rows, at = rows[order], at[order]
    fresh = np.ones(len(rows), np.bool_)
    fresh[1:] = (rows["region"][1:] != rows["region"][:-1]) | (rows["begin"][1:] != rows["begin"][:-1])
    starts = np.flatnonzero(fresh)
    first = np.concatenate([starts, [len(rows)]]).astype(np.int64)
    merged, payload, bad = _native.merge(at, _raw(rows), first, regions.itemsize[rows["region"][starts]].astype(np.int32))
    if bad:
        raise ChecksumError(f"region {int(rows['region'][starts[bad[0]]])}: {len(bad)} segments cannot be decoded")
    segments = merged.reshape(-1).view(_SEGMENT)
    touched = np.unique(segments["region"]).astype(np.int64)
    digests = np.array([before[int(r)] for r in touched], np.uint64)
    a, b = patches[0], patches[-1]
    return _assembled(a.regions, a.base_version, b.version, b.epoch, a.object, segments, payload, regions.elements[touched], digests)


def verify(patch: Patch, which: np.ndarray) -> None:
    """Raises ChecksumError unless the bytes of these segments are here, and are what was coded."""
    if not np.all(patch.at[which]):
        raise ChecksumError(
            f"{int(np.sum(patch.at[which] == 0))} of {len(which)} segments of the patch to version {patch.version} are missing"
        )
    rows = patch.segments[which]
    if bad := _native.damaged(patch.at[which], _raw(rows)):
        row = rows[bad[0]]
        raise ChecksumError(
            f"the patch to version {patch.version} is damaged: {len(bad)} segments, the first at element {int(row['begin'])} of region "
            f"{int(row['region'])}"
        )


def fits(patch: Patch, regions: Regions) -> None:
    """Raises DeltaBaseError unless a patch is of an object with these regions, as far as their number and sizes tell."""
    if patch.regions != len(regions):
        raise DeltaBaseError(f"the patch to version {patch.version} is of {patch.regions} regions, not of {len(regions)}")
    want = regions.elements[patch.table["region"]]
    if np.any(wrong := want != patch.table["elements"].astype(np.int64)):
        row = patch.table[int(np.flatnonzero(wrong)[0])]
        raise DeltaBaseError(
            f"region {int(row['region'])} has {int(regions.elements[row['region']])} elements, in the patch to version {patch.version} "
            f"{int(row['elements'])}"
        )


def _part(regions: Regions, which: np.ndarray) -> Regions:
    return Regions(regions.lo[which], regions.hi[which], regions.shape[which], regions.itemsize[which], regions.offset[which])


def _assembled(
    m: int,
    base_version: int,
    version: int,
    epoch: int,
    object: bytes,
    segments: np.ndarray,
    payload: np.ndarray,
    elements: np.ndarray,
    before: np.ndarray,
) -> Patch:
    """The bytes of a patch, and the patch."""
    if len(object) != 32:
        raise ValueError(f"the digest of an object has {len(object)} bytes, not 32")
    touched, start, counts = np.unique(segments["region"], return_index=True, return_counts=True)
    table = np.zeros(len(touched), _REGION)
    table["region"], table["segments"], table["elements"], table["before"] = touched, counts, elements, before
    if len(touched):
        table["changed"] = np.add.reduceat(segments["changed"].astype(np.uint64), start)
        table["after"] = before + np.add.reduceat(segments["digest"], start)
    size = _index_bytes(m, len(touched), len(segments))
    data = np.zeros(size + len(payload), np.uint8)
    head = data[:HEAD_BYTES].view(_HEAD)
    values = (_MAGIC, _FORMAT, m, base_version, version, epoch, np.void(object), len(touched), len(segments), len(payload), 0)
    head[0] = values
    at = HEAD_BYTES
    bits = np.zeros(-(-m // 64) * 64, np.uint8)
    bits[touched] = 1
    for part in (np.packbits(bits, bitorder="little"), _raw(table).reshape(-1), _raw(segments).reshape(-1)):
        data[at : at + len(part)] = part
        at += len(part)
    head["checksum"] = _native.checksum(data[:size])
    data[size:] = payload
    return Patch.parse(data)


def _index_bytes(m: int, touched: int, segments: int) -> int:
    return HEAD_BYTES + -(-m // 64) * 8 + touched * _REGION.itemsize + segments * _SEGMENT.itemsize


def _head(raw: np.ndarray) -> np.void:
    if len(raw) < HEAD_BYTES:
        raise ChecksumError(f"a patch begins with {HEAD_BYTES} bytes; {len(raw)} came")
    head = raw[:HEAD_BYTES].copy().view(_HEAD)[0]
    if head["magic"] != _MAGIC or head["format"] != _FORMAT:
        raise ChecksumError(f"not a patch of format {_FORMAT}: it begins with {bytes(raw[:12])!r}")
    if int(head["touched"]) > int(head["regions"]) or int(head["segments"]) >= 1 << 40:
        raise ChecksumError(f"a patch of {int(head['touched'])} of {int(head['regions'])} regions, in {int(head['segments'])} segments")
    return head


def _verify(bits: np.ndarray, m: int, table: np.ndarray, segments: np.ndarray, payload: int) -> None:
    """Raises ChecksumError unless everything in an index agrees with everything else, so that nothing outside the payload is ever read."""
    regions = table["region"].astype(np.int64)
    good = (
        np.array_equal(np.flatnonzero(bits), regions)
        and (not len(regions) or int(regions[-1]) < m)
        and np.array_equal(np.repeat(table["region"], table["segments"]), segments["region"])
    )
    if good:
        begin, elements = segments["begin"], segments["elements"].astype(np.uint64)
        end, most = begin + elements, np.repeat(table["elements"], table["segments"])
        offset, nbytes = segments["offset"], segments["nbytes"].astype(np.uint64)
        follows = segments["region"][1:] == segments["region"][:-1]
        good = (
            bool(np.all(end <= most) and np.all(begin < end) and np.all(elements <= 1 << 21))
            and bool(np.all(segments["changed"] <= segments["elements"]) and np.all(segments["changed"]))
            and bool(np.all(begin[1:][follows] >= end[:-1][follows]))
            and np.array_equal(offset, np.cumsum(nbytes, dtype=np.uint64) - nbytes)
            and int(nbytes.sum()) == payload
        )
    if not good:
        raise ChecksumError("the index of a patch contradicts itself")


def _bytes(data: Any) -> np.ndarray:
    """uint8 (bytes,): a view."""
    if isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1 and data.flags.c_contiguous:
        return data
    return np.frombuffer(data, np.uint8)


def _raw(rows: np.ndarray) -> np.ndarray:
    """Rows of a table as uint8 (n, bytes of a row)."""
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), rows.dtype.itemsize)
