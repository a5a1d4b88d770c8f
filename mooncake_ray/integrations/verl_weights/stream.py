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

from mooncake_ray.data.bits import dtype_name, flat_bytes, from_bytes, is_plain
from mooncake_ray.errors import PlanError

__all__ = ["ALIGNMENT", "Cut", "Cutter", "Joiner", "Named"]

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of the stream."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    at: int  # where it begins, in bytes

    @property
    def kind(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.kind.itemsize

    def part(self, begin: int, end: int) -> tuple[int, int, slice]:
        """What of it lies between two places of the stream: from where to where in its own bytes, and where that is from `begin` on."""
        nbytes = self.nbytes
        lo, hi = min(max(begin - self.at, 0), nbytes), max(min(end - self.at, nbytes), 0)
        return lo, hi, slice(self.at + lo - begin, self.at + hi - begin)


@dataclass(slots=True)
class Cut:
    """A bucket to be written: what goes where in it."""

    number: int
    nbytes: int = 0
    tensors: list[Named] = field(default_factory=list)
    pieces: list[tuple[slice, torch.Tensor]] = field(default_factory=list)
    """In their order; uint8, 1-D. None where it is another rank's."""

    def write(self, out: np.ndarray) -> None:
        """Copies the pieces to their places, from whatever device, and zeros between them."""
        to, at = torch.from_numpy(out), 0
        for where, piece in self.pieces:
            to[at : where.start] = 0
            to[where].copy_(piece)
            at = where.stop
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
        if not is_plain(tensor):
            raise PlanError(f"tensor {name!r} ({tensor.layout}) is not a dense one")
        self._names.add(name)
        named = Named(name, tuple(tensor.shape), dtype_name(tensor.dtype), self._at)
        self._digest.update(repr((name, named.shape, named.dtype)).encode())
        end, data = self._at + named.nbytes, None
        for number in range(named.at // self._size, max(end - 1, named.at) // self._size + 1):
            if self._open is not None and number > self._open.number:
                yield from self.finish()
            if self._open is None:
                self._open, self.buckets = Cut(number), number + 1
            begin = number * self._size
            lo, hi, where = named.part(begin, begin + self._size)
            self._open.tensors.append(named)
            self._open.nbytes = where.stop
            if number % self._world == self._rank and hi > lo:
                data = flat_bytes(tensor) if data is None else data
                self._open.pieces.append((where, data[lo:hi]))
        self.nbytes += named.nbytes
        self._at = -(-end // ALIGNMENT) * ALIGNMENT

    def finish(self) -> Iterator[Cut]:
        """Ends the bucket that is open, and yields it if it is this rank's. Called when there is no more."""
        cut, self._open = self._open, None
        if cut is not None and cut.number % self._world == self._rank:
            yield cut


class Joiner:
    """Makes tensors of buckets that come in their order. For one thread."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._partial: tuple[Named, np.ndarray, int] | None = None  # and how much of it there is

    def add(self, number: int, tensors: Sequence[Named], data: np.ndarray) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors that are complete with this bucket: views of `data`, but for those that lie in several, which are copies."""
        begin = number * self._size
        for named in tensors:
            lo, hi, where = named.part(begin, begin + self._size)
            if hi - lo == named.nbytes:
                yield named.name, from_bytes(data[where], named.kind, named.shape)
                continue
            if lo == 0:
                self._partial = named, np.empty(named.nbytes, np.uint8), 0
            if self._partial is None or (self._partial[0], self._partial[2]) != (named, lo):
                raise PlanError(f"bucket {number} has tensor {named.name!r} from byte {lo} on, and what is before is missing")
            whole = self._partial[1]
            whole[lo:hi] = data[where]
            self._partial = named, whole, hi
            if hi == named.nbytes:
                self._partial = None
                yield named.name, from_bytes(whole, named.kind, named.shape)
