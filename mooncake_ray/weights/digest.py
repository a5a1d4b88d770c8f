"""Content digests: 64 bits for what a tensor holds, whoever holds which part of it.

The digest of a box of a tensor is the sum, modulo 2^64, of a term for each element, made of its bits and its place in the whole tensor. So the
digests of disjoint boxes add up to that of their union, in any layout; and who knows which elements changed knows what to add.

The term of an element with bits x (as an unsigned integer, zero-extended to 64 bits) and index i (in the whole tensor, in C order) is, with
their upper and lower halves, and all modulo 2^32 but for the last product::

    u  = i_lo * 0x9E3779B1 + i_hi * 0x7FEB352D;  u ^= u >> 15;  u *= 0xD168AAAD;  u ^= u >> 15
    a  = x_lo * 0xAF723597 + x_hi * 0x31848BAB + u
    b  = x_lo * 0x2C1B3C6D + x_hi * 0x297A2D39 + rotate(u, 16) + i_hi * 0x846CA68B
    term = a * b

It finds what goes wrong by chance: wrong, missing, moved or mixed elements. It is no defence against somebody who computes what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_ray._native import delta as _native

__all__ = ["DIGESTS", "content_digest", "layout", "steps_of"]

DIGESTS = 1 << 64
"""Digests are modulo this."""


def content_digest(view: Any, lo: Sequence[int], shape: Sequence[int]) -> int:
    """The digest of a box of a tensor. Thread-safe; releases the GIL; uses several threads where there is much.

    Args:
        view: torch.Tensor on the CPU, or np.ndarray, of the box's shape, with elements of 1, 2, 4 or 8 bytes and any strides. Leading
            dimensions of length 1 may be more or fewer than the tensor's. Nobody may write it meanwhile.
        lo: Where the box begins in the tensor.
        shape: Of the whole tensor.

    Raises:
        ValueError: the box is not in the tensor, or its memory cannot be read from here.
    """
    at, item, extents, strides = layout(view)
    extents, strides, lo, shape = padded(extents, strides, lo, shape)
    if any(a < 0 or a + n > s for a, n, s in zip(lo, extents, shape, strict=True)):
        raise ValueError(f"a box of {tuple(extents)} at {tuple(lo)} is not in a tensor of shape {tuple(shape)}")
    steps = steps_of(np.array([shape], np.int64))[0]
    index = int(np.dot(steps, np.array(lo, np.int64)))
    one = np.array([at], np.uint64), np.array([item], np.int32), np.array([index], np.uint64)
    (out,) = _native.digests(*one, np.array([extents], np.int64), steps[None], np.array([strides], np.int64)).tolist()
    return out


def steps_of(shape: np.ndarray) -> np.ndarray:
    """How far apart neighbours along each dimension are in C order, in elements: int64 (n, d) for shapes int64 (n, d)."""
    steps = np.ones_like(shape)
    if shape.shape[1] > 1:
        steps[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return steps


def layout(view: Any) -> tuple[int, int, list[int], list[int]]:
    """Address, bytes of an element, extents, and strides in bytes.

    Raises:
        ValueError: not in this process's memory as plain elements of 1, 2, 4 or 8 bytes.
    """
    if isinstance(view, np.ndarray):
        at, item, extents, strides = view.ctypes.data, view.itemsize, list(view.shape), list(view.strides)
    else:
        if view.device.type != "cpu":
            raise ValueError(f"the view is on {view.device}, not in this process's memory")
        at, item = view.data_ptr(), view.element_size()
        extents, strides = list(view.shape), [s * item for s in view.stride()]
    if item not in (1, 2, 4, 8):
        raise ValueError(f"elements of {item} bytes; they may have 1, 2, 4 or 8")
    return at, item, extents, strides


def padded(
    extents: list[int], strides: list[int], lo: Sequence[int], shape: Sequence[int]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """The same with as many dimensions, where leading ones are missing or too many."""
    d = max(len(extents), len(shape), len(lo))
    return (
        [1] * (d - len(extents)) + extents,
        [0] * (d - len(strides)) + strides,
        [0] * (d - len(lo)) + list(lo),
        [1] * (d - len(shape)) + list(shape),
    )
