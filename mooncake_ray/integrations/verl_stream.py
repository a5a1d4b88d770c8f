"""The named tensors of a model as one stream of bytes, cut into buckets of one size.

Tensors come one after the other, each at a multiple of 64 bytes; bucket k is bytes k·size to (k+1)·size. So whoever sees the same tensors cuts
the same buckets, and ranks that share the work need not talk: bucket k is that of rank k modulo how many there are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mooncake_ray.errors import PlanError

__all__ = ["ALIGNMENT", "Cut", "Cutter", "Joiner", "Named", "as_bytes", "dtype_of"]

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of the stream."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    at: int  # where it begins, in bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    def part(self, begin: int, end: int) -> tuple[int, int]:
        """From where to where, in its own bytes, it lies between two places of the stream."""
        nbytes = self.nbytes
        return min(max(begin - self.at, 0), nbytes), max(min(end - self.at, nbytes), 0)


@dataclass(slots=True)
class Cut:
    """A bucket to be written: what goes where in it."""

    number: int
    nbytes: int = 0
    tensors: list[Named] = field(default_factory=list)
    pieces: list[tuple[int, torch.Tensor]] = field(
        default_factory=list
    )  # offset in the bucket; uint8, 1-D. None where it is another rank's

    def write(self, out: np.ndarray) -> None:
        """Copies the pieces to their places, from whatever device, and zeros between them."""
        to, at = torch.from_numpy(out), 0
        for offset, piece in self.pieces:
            to[at:offset] = 0
            at = offset + piece.numel()
            to[offset:at].copy_(piece)
        to[at:] = 0


class Cutter:
    """Cuts the stream. Keeps what it is given until the bucket that it belongs to is complete, and no longer. For one thread."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        """`size`: of buckets, bytes, a multiple of 64. This is one of `world` ranks that share the stream."""
        if size < ALIGNMENT or size % ALIGNMENT:
            raise PlanError(f"buckets of {size} bytes; expected a positive multiple of {ALIGNMENT}")
        self._size, self._rank, self._world = size, rank, world
        self._at = 0
        self._open: Cut | None = None
        self._names: set[str] = set()
        self._digest = hashlib.sha256()
        self.buckets = 0
        self.nbytes = 0

    @property
    def digest(self) -> str:
        """Of all tensors up to now: names, shapes and dtypes, in their order."""
        return self._digest.hexdigest()

    def add(self, name: str, tensor: torch.Tensor) -> Iterator[Cut]:
        """Appends a tensor. Yields the buckets of this rank that are complete then.

        Raises:
            PlanError: there was one of that name already, or it is not a dense tensor.
        """
        if name in self._names:
            raise PlanError(f"there are two tensors of the name {name!r}")
        if tensor.layout is not torch.strided:
            raise PlanError(f"tensor {name!r} has the layout {tensor.layout}, expected a dense one")
        self._names.add(name)
        named = Named(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), self._at)
        self._digest.update(repr((name, named.shape, named.dtype)).encode())
        end, data = self._at + named.nbytes, None
        for number in range(named.at // self._size, max(end - 1, named.at) // self._size + 1):
            if self._open is not None and number > self._open.number:
                yield from self._done()
            if self._open is None:
                self._open, self.buckets = Cut(number), number + 1
            begin = number * self._size
            lo, hi = named.part(begin, begin + self._size)
            self._open.tensors.append(named)
            self._open.nbytes = named.at + hi - begin
            if number % self._world == self._rank and hi > lo:
                data = as_bytes(tensor) if data is None else data
                self._open.pieces.append((named.at + lo - begin, data[lo:hi]))
        self.nbytes += named.nbytes
        self._at = -(-end // ALIGNMENT) * ALIGNMENT

    def finish(self) -> Iterator[Cut]:
        """There is no more. Yields the last bucket, if it is this rank's."""
        yield from self._done()

    def _done(self) -> Iterator[Cut]:
        cut, self._open = self._open, None
        if cut is not None and cut.number % self._world == self._rank:
            yield cut


class Joiner:
    """Makes tensors of buckets that come in their order. For one thread."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._partial: tuple[Named, torch.Tensor, int] | None = None  # and how much of it there is

    def add(self, number: int, tensors: Sequence[Named], data: np.ndarray) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors that are complete with this bucket: views of `data`, but for those that lie in several, which are copies."""
        begin, of = number * self._size, torch.from_numpy(data)
        for named in tensors:
            lo, hi = named.part(begin, begin + self._size)
            piece = of[named.at + lo - begin : named.at + hi - begin]
            if hi - lo == named.nbytes:
                yield named.name, _typed(piece, named)
                continue
            if lo == 0:
                self._partial = named, torch.empty(named.nbytes, dtype=torch.uint8), 0
            if self._partial is None or (self._partial[0], self._partial[2]) != (named, lo):
                raise PlanError(f"bucket {number} has tensor {named.name!r} from byte {lo} on, and what is before is missing")
            whole = self._partial[1]
            whole[lo:hi] = piece
            self._partial = named, whole, hi
            if hi == named.nbytes:
                self._partial = None
                yield named.name, _typed(whole, named)


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8, 1-D; a view, where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _typed(data: torch.Tensor, named: Named) -> torch.Tensor:
    dtype = dtype_of(named.dtype)
    return data.view(dtype).view(named.shape) if data.numel() else torch.empty(named.shape, dtype=dtype)
