"""What a snapshot says of itself: which tensors it holds, which region of them is where in which file, and digests of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_ray.errors import ChecksumError, CorruptBlockError
from mooncake_ray.weights.digest import DIGESTS
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.tensor_file import blocks

__all__ = ["BLOCK_BYTES", "Manifest", "Part", "Region", "sealed", "unsealed"]

BLOCK_BYTES = 4 << 20
"""About what of a region has a digest of its own."""
_FORMAT = 1


@dataclass(frozen=True)
class Region:
    """A box of a tensor, and where it is in its file."""

    tensor: int
    """Index in the manifest's metas."""
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    offset: int
    """Bytes."""
    digests: tuple[int, ...]
    """Content digests of its blocks, in order."""

    @property
    def extent(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.lo, self.hi, strict=True))

    def blocks(self, itemsize: int) -> tuple[int, int, int]:
        """How it divides into blocks: (dimension, its length, rows a block)."""
        return blocks(self.extent, itemsize, BLOCK_BYTES)


@dataclass(frozen=True)
class Part:
    """A file of a snapshot: what one rank has written."""

    file: str
    rank: str
    nbytes: int
    """Of the file."""
    regions: tuple[Region, ...]

    @property
    def digest(self) -> int:
        return sum(d for r in self.regions for d in r.digests) % DIGESTS

    def to_json(self) -> dict[str, Any]:
        rows = [[r.tensor, r.lo, r.hi, r.offset, [f"{d:016x}" for d in r.digests]] for r in self.regions]
        return {"file": self.file, "rank": self.rank, "nbytes": self.nbytes, "regions": rows}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Part:
        rows = (Region(t, tuple(lo), tuple(hi), at, tuple(int(d, 16) for d in digests)) for t, lo, hi, at, digests in data["regions"])
        return cls(data["file"], data["rank"], data["nbytes"], tuple(rows))


@dataclass(frozen=True)
class Manifest:
    """Everything about a snapshot but its tensors' bytes."""

    version: int
    publication: str
    """Digest of the plan by which ranks shared it out."""
    metas: tuple[ParamMeta, ...]
    parts: tuple[Part, ...]
    extra: dict[str, Any]
    """What its writer wanted to be kept with it. JSON."""

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(p.nbytes for p in self.parts)

    def digests(self) -> dict[str, int]:
        """Of each whole tensor, by name."""
        out = np.zeros(len(self.metas), object)
        for part in self.parts:
            for region in part.regions:
                out[region.tensor] += sum(region.digests)
        return {m.name: int(d) % DIGESTS for m, d in zip(self.metas, out, strict=True)}

    def to_bytes(self) -> bytes:
        return sealed(
            {
                "format": _FORMAT,
                "version": self.version,
                "publication": self.publication,
                "block_bytes": BLOCK_BYTES,
                "tensors": [{"name": m.name, "dtype": m.dtype, "shape": m.shape} for m in self.metas],
                "parts": [p.to_json() for p in self.parts],
                "extra": self.extra,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Raises CorruptBlockError, ChecksumError: it is not one, or not as it was written."""
        found = unsealed(data, where)
        if (format := found.get("format")) != _FORMAT or found["block_bytes"] != BLOCK_BYTES:
            raise CorruptBlockError(
                f"{where} is of format {format} in blocks of {found.get('block_bytes')} bytes, not {_FORMAT} of {BLOCK_BYTES}"
            )
        metas = tuple(ParamMeta(m["name"], m["dtype"], tuple(m["shape"])) for m in found["tensors"])
        parts = tuple(Part.from_json(p) for p in found["parts"])
        return cls(found["version"], found["publication"], metas, parts, found["extra"])


def sealed(content: dict[str, Any]) -> bytes:
    """JSON that begins with the SHA-256 of the rest."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return b'{"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'",' + text[1:]


def unsealed(data: bytes, where: str) -> dict[str, Any]:
    """What was sealed.

    Raises:
        CorruptBlockError: it is cut off, or something else.
        ChecksumError: something in it has changed.
    """
    head, length = b'{"sha256":"', 64
    end = len(head) + length
    if not data.startswith(head) or data[end : end + 2] != b'",':
        raise CorruptBlockError(f"{where} has {len(data)} bytes, and does not begin as it should")
    if hashlib.sha256(b"{" + data[end + 2 :]).hexdigest().encode() != data[len(head) : end]:
        raise ChecksumError(f"{where} is damaged: its {len(data)} bytes do not have the SHA-256 that it says")
    return json.loads(data)


def few(names: Iterable[str] | Sequence[str]) -> str:
    """The first of some names, and how many there are."""
    names = list(names)
    return f"{len(names)}: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
