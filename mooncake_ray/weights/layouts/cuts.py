"""How Megatron cuts a tensor for one rank: which boxes of which canonical tensors a local tensor is made of.

Every function answers with pieces of the local tensor, and checks that it has the shape it must have by the model and the rank's place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.held import Piece

__all__ = ["Local", "column", "duplicated_or_column", "gated", "grouped_down", "grouped_gate_up", "heads", "row", "vocabulary", "whole"]


@dataclass(frozen=True)
class Local:
    """One rank's tensor."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    part: int = 0
    parts: int = 1
    """Over how many ranks the whole is cut, and which of them this one is."""

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, part: int = 0, parts: int = 1) -> Local:
        return cls(name, tuple(tensor.shape), tuple(tensor.stride()), part, parts)

    def must_be(self, *shape: int) -> None:
        if self.shape != shape:
            raise PlanError(
                f"{self.name} is {list(self.shape)} here, but part {self.part} of {self.parts} of it is {list(shape)} by the config"
            )

    def share(self, n: int, what: str) -> int:
        """Of `n`, this rank's."""
        if n % self.parts:
            raise PlanError(f"{self.name}: {what} of {n} cannot be divided by {self.parts}")
        return n // self.parts

    def band(self, name: str, shape: Sequence[int], dim: int, lo: int, hi: int, at: int) -> Piece:
        """The whole of the canonical tensor but for `dim`, of which it is [lo, hi) and begins at `at` here."""
        first, end = [0] * len(shape), list(shape)
        first[dim], end[dim] = lo, hi
        return Piece(name, tuple(shape), tuple(first), tuple(end), at * self.strides[dim], self.strides)


def whole(local: Local, name: str, *shape: int) -> Iterator[Piece]:
    """Every rank has all of it."""
    local.must_be(*shape)
    yield Piece(name, shape, (0,) * len(shape), shape, 0, local.strides)


def column(local: Local, name: str, rows: int, *columns: int) -> Iterator[Piece]:
    """Rows [part x n, (part + 1) x n). Without `columns`, a bias."""
    n = local.share(rows, "rows")
    local.must_be(n, *columns)
    yield local.band(name, (rows, *columns), 0, local.part * n, (local.part + 1) * n, 0)


def duplicated_or_column(local: Local, name: str, rows: int, columns: int) -> Iterator[Piece]:
    """All rows on every rank with one implementation of the layer, cut into columns with another: the shape tells."""
    if local.shape == (rows, columns):
        return whole(local, name, rows, columns)
    return column(local, name, rows, columns)


def row(local: Local, name: str, rows: int, columns: int) -> Iterator[Piece]:
    """Columns [part x n, (part + 1) x n)."""
    n = local.share(columns, "columns")
    local.must_be(rows, n)
    yield local.band(name, (rows, columns), 1, local.part * n, (local.part + 1) * n, 0)


def vocabulary(local: Local, names: Sequence[str], vocab: int, hidden: int) -> Iterator[Piece]:
    """Rows of a vocabulary that is padded to something that divides; the padding is nobody's. Under each of the names."""
    n = local.shape[0]
    local.must_be(n, hidden)
    if n * local.parts < vocab:
        raise PlanError(f"{local.name}: {local.parts} times {n} rows are less than a vocabulary of {vocab}")
    lo, hi = min(local.part * n, vocab), min((local.part + 1) * n, vocab)
    for name in names:
        yield local.band(name, (vocab, hidden), 0, lo, hi, 0)


def gated(local: Local, gate: str, up: str, rows: int, *columns: int) -> Iterator[Piece]:
    """The rank's rows of the gate over its rows of the other."""
    n = local.share(rows, "rows")
    local.must_be(2 * n, *columns)
    for at, name in ((0, gate), (n, up)):
        yield local.band(name, (rows, *columns), 0, local.part * n, (local.part + 1) * n, at)


def heads(local: Local, names: tuple[str, str, str], heads: int, groups: int, dim: int, gate: bool, *columns: int) -> Iterator[Piece]:
    """Queries, keys and values, by key-value group: [its queries; (their gates); its key; its value], and this rank's rows of all that.

    With fewer groups than ranks a group's block is cut wherever it happens, so that a rank may have no rows of keys or values.

    Args:
        names: of queries, keys and values. Gates are in the queries' tensor, each after its query.
        heads: of queries, in all.
        groups: of keys and values, in all.
        dim: rows of a head.
    """
    if heads % groups:
        raise PlanError(f"{local.name}: {heads} heads cannot be divided into {groups} groups")
    each = heads // groups
    query, key, value = names
    block = (each * (2 if gate else 1) + 2) * dim
    n = local.share(groups * block, "rows")
    local.must_be(n, *columns)
    first, end = local.part * n, (local.part + 1) * n
    q_shape, kv_shape = (heads * dim * (2 if gate else 1), *columns), (groups * dim, *columns)
    for group in range(first // block, -(-end // block)):
        at = group * block
        bands: list[tuple[str, tuple[int, ...], int, int]] = []
        if gate:
            lows = [(group * each + i) * 2 * dim for i in range(each)]
            bands += [(query, q_shape, lo, dim) for lo in lows] + [(query, q_shape, lo + dim, dim) for lo in lows]
        else:
            bands.append((query, q_shape, group * each * dim, each * dim))
        bands += [(key, kv_shape, group * dim, dim), (value, kv_shape, group * dim, dim)]
        for name, shape, lo, rows in bands:
            a, b = max(first, at), min(end, at + rows)
            if a < b:
                yield local.band(name, shape, 0, lo + a - at, lo + b - at, a - first)
            at += rows


def grouped_gate_up(local: Local, names: Sequence[tuple[str, str]], rows: int, columns: int) -> Iterator[Piece]:
    """Several experts in one tensor, each transposed: [columns, its gate's rows, then its other's], one after the other in memory.

    Args:
        names: gate and up of each local expert.
        rows: of each, on all ranks.
        columns: of each.
    """
    n = local.share(rows, "rows")
    local.must_be(columns, len(names) * 2 * n)
    _must_be_packed(local)
    for i, pair in enumerate(names):
        for j, name in enumerate(pair):
            lo = (local.part * n, 0)
            yield Piece(name, (rows, columns), lo, (lo[0] + n, columns), i * columns * 2 * n + j * n, (1, 2 * n))


def grouped_down(local: Local, names: Sequence[str], rows: int, columns: int) -> Iterator[Piece]:
    """Several experts in one tensor, each transposed: [its columns, rows], one after the other in memory."""
    n = local.share(columns, "columns")
    local.must_be(len(names) * n, rows)
    _must_be_packed(local)
    for i, name in enumerate(names):
        lo = (0, local.part * n)
        yield Piece(name, (rows, columns), lo, (rows, lo[1] + n), i * n * rows, (1, rows))


def _must_be_packed(local: Local) -> None:
    if any(n > 1 and s != packed for n, s, packed in zip(local.shape, local.strides, (local.shape[1], 1), strict=True)):
        raise PlanError(f"{local.name}: experts in one tensor must lie packed, not with strides {list(local.strides)}")
