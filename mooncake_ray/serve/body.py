"""`Body`: what is published, as the body of a request, which may be sent more than once."""

from __future__ import annotations

import base64
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch

from mooncake_ray.errors import SnapshotError
from mooncake_ray.weights.tensor_file import Entry, header, raw

__all__ = ["Body", "FileBody", "TensorsBody"]

_PIECE = 1 << 20


class Body(ABC):
    """Must not change while it is used."""

    nbytes: int

    @abstractmethod
    def pieces(self) -> Iterator[bytes | memoryview]:
        """All of it, in pieces that are good until the next. Raises SnapshotError: it cannot be read any more."""

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """Its length, kind and digest, for which all of it is read."""
        sha = hashlib.sha256()
        for piece in self.pieces():
            sha.update(piece)
        digest = base64.b64encode(sha.digest()).decode()
        return {
            "Content-Length": str(self.nbytes),
            "Content-Type": "application/vnd.safetensors",
            "Content-Digest": f"sha-256=:{digest}:",
        }


class TensorsBody(Body):
    """Tensors, and metadata, in the safetensors format."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        ordered = sorted(tensors.items(), key=lambda t: -t[1].element_size())
        entries = [Entry(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in ordered]
        self._head = header(entries, {"format": "pt", **metadata})[0]
        self._tensors = [t for _, t in ordered]
        self.nbytes = len(self._head) + sum(e.nbytes for e in entries)

    def pieces(self) -> Iterator[bytes | memoryview]:
        yield self._head
        for tensor in self._tensors:
            data = raw(tensor)
            for at in range(0, len(data), _PIECE):
                yield data[at : at + _PIECE]


class FileBody(Body):
    """A file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError: it is not there."""
        self._path = Path(path)
        self.nbytes = self._path.stat().st_size

    def pieces(self) -> Iterator[bytes]:
        left = self.nbytes
        try:
            with open(self._path, "rb") as file:
                while left and (piece := file.read(min(left, _PIECE))):
                    left -= len(piece)
                    yield piece
        except OSError as e:  # which is no matter of the connection
            raise SnapshotError(f"{self._path} cannot be published: {e}") from e
        if left:
            raise SnapshotError(f"{self._path} cannot be published: {left} of its {self.nbytes} bytes are gone")
