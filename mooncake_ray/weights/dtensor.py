"""Which boxes of a whole tensor a `DTensor`'s local part holds: torch's sharding, in plain numbers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from mooncake_ray.errors import PlanError

__all__ = ["Part", "boxes", "is_dtensor", "parts_of"]

Part = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""`lo`, `hi` in the whole tensor, and where `lo` is in the local one."""


def is_dtensor(tensor: Any) -> bool:
    """Whether it is one. Who has not imported DTensors has none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def parts_of(name: str, tensor: Any) -> tuple[tuple[int, ...], torch.Tensor, list[Part]]:
    """The whole's shape, the memory that is here, and which boxes of the whole lie where in it. Gathers nothing.

    Raises:
        PlanError: the tensor holds partial sums, or its local part is not the size its placements say.
    """
    if not is_dtensor(tensor):
        shape = tuple(tensor.shape)
        zeros = (0,) * len(shape)
        return shape, tensor, [(zeros, shape, zeros)]
    local, mesh, shape = tensor._local_tensor, tensor.device_mesh, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is outside of the mesh
        return shape, local, []
    try:
        parts = boxes(shape, tuple(mesh.shape), coordinate, tensor.placements)
    except PlanError as error:
        raise PlanError(f"{name}: {error}") from None
    held = sum(_volume(lo, hi) for lo, hi, _ in parts)
    if held != local.numel():
        raise PlanError(
            f"{name}: {list(tensor.placements)} on a mesh of {tuple(mesh.shape)} is {held} elements here, but there are {local.numel()}"
        )
    return shape, local, parts


def boxes(shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]) -> list[Part]:
    """What a rank holds of a tensor of `shape`.

    Each placement cuts what the ones before it left, as `torch.chunk` does: chunks of ceil(n / parts), so that the last ones may be short or
    empty. A strided one (FSDP over tensor parallelism, on the same dimension) cuts into `split_factor` pieces first, and takes a chunk of each.

    Args:
        mesh: the mesh's sizes.
        coordinate: this rank's place in it.
        placements: torch's, one for each axis of the mesh.

    Returns:
        Non-empty boxes in the order of the local tensor. Several only where strided placements leave gaps.

    Raises:
        PlanError: a placement is neither a shard nor a replica.
    """
    bands = [[(0, n)] for n in shape]
    for size, at, placement in zip(mesh, coordinate, placements, strict=True):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None or placement.is_partial():
            raise PlanError(f"{placement} is neither a shard nor a replica: reduce it first")
        pieces = getattr(placement, "split_factor", 1)
        n = sum(hi - lo for lo, hi in bands[dim])
        kept: list[tuple[int, int]] = []
        for piece in range(pieces):
            first, end = _chunk(n, pieces, piece)
            lo, hi = _chunk(end - first, size, at)
            kept += _cut(bands[dim], first + lo, first + hi)
        bands[dim] = kept
    placed = []
    for ranges in bands:
        starts = itertools.accumulate((hi - lo for lo, hi in ranges), initial=0)
        placed.append([(lo, hi, start) for (lo, hi), start in zip(ranges, starts, strict=False)])
    return [tuple(zip(*combination, strict=True)) or ((), (), ()) for combination in itertools.product(*placed)]


def _chunk(n: int, parts: int, at: int) -> tuple[int, int]:
    size = -(-n // parts)
    return min(at * size, n), min((at + 1) * size, n)


def _cut(bands: list[tuple[int, int]], first: int, end: int) -> list[tuple[int, int]]:
    """The elements [first, end) of the concatenation of some ranges, as ranges; neighbours joined."""
    out: list[tuple[int, int]] = []
    at = 0
    for lo, hi in bands:
        a, b = max(lo, lo + first - at), min(hi, lo + end - at)
        at += hi - lo
        if a >= b:
            continue
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out


def _volume(lo: Sequence[int], hi: Sequence[int]) -> int:
    out = 1
    for a, b in zip(lo, hi, strict=True):
        out *= b - a
    return out
