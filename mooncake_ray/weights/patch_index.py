"""The head and the index of a patch, as bytes and as arrays.

Little-endian, and all of it:

    head      magic "MCRDELTA", format u32, regions u32, base version, version, epoch i64, digest of the object's layout 32 bytes,
              touched regions, segments, bytes of the payload u64, checksum of head and index u64 (itself 0)
    bitmap    a bit for each region, the lowest first: whether anything in it changed; padded to 8 bytes
    regions   for each that did: number u32, segments u32, elements, changed, content digest before and after u64
    segments  first element in the region, offset in the payload, what it adds to the digest, checksum of its bytes u64,
              elements, changed, bytes, region, form u32, 0 u32
    payload   the segments' bytes, one after the other
"""

from __future__ import annotations

import numpy as np

from mooncake_ray._native import delta as _native
from mooncake_ray.errors import ChecksumError

__all__ = ["CLASSED", "HEAD", "HEAD_BYTES", "REGION", "SEGMENT", "head_of", "index_bytes", "joined", "raw", "split"]

_MAGIC = b"MCRDELTA"
_FORMAT = 1
_MOST_ELEMENTS = 1 << 21
HEAD = np.dtype(
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
HEAD_BYTES = HEAD.itemsize
REGION = np.dtype([("region", "<u4"), ("segments", "<u4"), ("elements", "<u8"), ("changed", "<u8"), ("before", "<u8"), ("after", "<u8")])
SEGMENT = np.dtype(
    [
        ("begin", "<u8"),
        ("offset", "<u8"),
        ("digest", "<u8"),
        ("checksum", "<u8"),
        ("elements", "<u4"),
        ("changed", "<u4"),
        ("nbytes", "<u4"),
        ("region", "<u4"),
        ("form", "<u4"),
        ("spare", "<u4"),
    ]
)
CLASSED = 3
"""The form of segments that are coded against what was there."""


def index_bytes(head: np.void) -> int:
    """Of head and index together."""
    regions, touched, segments = (int(head[name]) for name in ("regions", "touched", "segments"))
    return HEAD_BYTES + -(-regions // 64) * 8 + touched * REGION.itemsize + segments * SEGMENT.itemsize


def head_of(data: np.ndarray) -> np.void:
    """The head, from the first `HEAD_BYTES` of a patch; a row of HEAD.

    Raises:
        ChecksumError: this is not the beginning of a patch.
    """
    if len(data) < HEAD_BYTES:
        raise ChecksumError(f"a patch begins with {HEAD_BYTES} bytes; {len(data)} came")
    head = data[:HEAD_BYTES].copy().view(HEAD)[0]
    if head["magic"] != _MAGIC or head["format"] != _FORMAT:
        raise ChecksumError(f"not a patch of format {_FORMAT}: it begins with {bytes(data[:12])!r}")
    if int(head["touched"]) > int(head["regions"]) or int(head["segments"]) >= 1 << 40:
        raise ChecksumError(f"a patch of {int(head['touched'])} of {int(head['regions'])} regions, in {int(head['segments'])} segments")
    return head


def split(data: np.ndarray) -> tuple[np.void, np.ndarray, np.ndarray]:
    """Head, rows of REGION and rows of SEGMENT of a patch that begins with these bytes. Copies.

    Raises:
        ChecksumError: they are not what `joined` makes, or not all of it.
    """
    head = head_of(data)
    size = index_bytes(head)
    if len(data) < size:
        raise ChecksumError(f"a patch's index has {size} bytes; {len(data)} came")
    index = data[:size].copy()
    index[HEAD.fields["checksum"][1] : HEAD_BYTES] = 0
    if _native.checksum(index) != int(head["checksum"]):
        raise ChecksumError(f"the index of a patch to version {int(head['version'])} is damaged")
    m, touched = int(head["regions"]), int(head["touched"])
    at = HEAD_BYTES + -(-m // 64) * 8
    bits = np.unpackbits(index[HEAD_BYTES:at], bitorder="little")
    regions = index[at : at + touched * REGION.itemsize].view(REGION)
    segments = index[at + touched * REGION.itemsize :].view(SEGMENT)
    if not _agrees(bits, m, regions, segments, int(head["payload"])):
        raise ChecksumError(f"the index of a patch to version {int(head['version'])} contradicts itself")
    return head, regions, segments


def joined(
    m: int, base_version: int, version: int, epoch: int, object: bytes, regions: np.ndarray, segments: np.ndarray, payload: np.ndarray
) -> np.ndarray:
    """The bytes of a patch of an object of `m` regions: uint8. Rows of SEGMENT say where their bytes are in the payload."""
    if len(object) != 32:
        raise ValueError(f"the digest of an object has {len(object)} bytes, not 32")
    head = np.zeros(1, HEAD)
    head[0] = (_MAGIC, _FORMAT, m, base_version, version, epoch, np.void(object), len(regions), len(segments), len(payload), 0)
    size = index_bytes(head[0])
    data = np.zeros(size + len(payload), np.uint8)
    bits = np.zeros(-(-m // 64) * 64, np.uint8)
    bits[regions["region"]] = 1
    at = 0
    for part in (raw(head), np.packbits(bits, bitorder="little"), raw(regions), raw(segments), payload):
        data[at : at + part.size] = part.reshape(-1)
        at += part.size
    data[:HEAD_BYTES].view(HEAD)["checksum"] = _native.checksum(data[:size])
    return data


def raw(rows: np.ndarray) -> np.ndarray:
    """Rows of a table as uint8 (n, bytes of a row)."""
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), rows.dtype.itemsize)


def _agrees(bits: np.ndarray, m: int, regions: np.ndarray, segments: np.ndarray, payload: int) -> bool:
    """Whether everything in an index agrees with everything else, so that nothing outside the payload is ever read."""
    numbers = regions["region"].astype(np.int64)
    if (
        not np.array_equal(np.flatnonzero(bits), numbers)
        or (len(numbers) and int(numbers[-1]) >= m)
        or int(regions["segments"].sum(dtype=np.uint64)) != len(segments)
        or not np.array_equal(np.repeat(regions["region"], regions["segments"]), segments["region"])
        or not np.all(regions["segments"])
    ):
        return False
    begin, elements = segments["begin"], segments["elements"].astype(np.uint64)
    end, most = begin + elements, np.repeat(regions["elements"], regions["segments"])
    nbytes = segments["nbytes"].astype(np.uint64)
    follows = segments["region"][1:] == segments["region"][:-1]
    changed = segments["changed"]
    first = np.cumsum(regions["segments"], dtype=np.int64) - regions["segments"]
    sums = [np.add.reduceat(a, first) if len(first) else a[:0] for a in (changed.astype(np.uint64), segments["digest"])]
    return (
        bool(np.all(begin < end) and np.all(end <= most) and np.all(elements <= _MOST_ELEMENTS))
        and bool(np.all(changed) and np.all(changed <= segments["elements"]))
        and bool(np.all(begin[1:][follows] >= end[:-1][follows]))
        and np.array_equal(segments["offset"], np.cumsum(nbytes, dtype=np.uint64) - nbytes)
        and int(nbytes.sum()) == payload
        and np.array_equal(sums[0], regions["changed"])
        and np.array_equal(regions["before"] + sums[1], regions["after"])
    )
