"""Views as boxes: which boxes of a tensor a strided view of it is, whatever chain of view operations made the view.

Where a view lies says all of it: an offset and a stride for each of its dimensions. No operation has to be known by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mooncake_ray.errors import PlanError

__all__ = ["MOST_BOXES", "Axis", "Piece", "boxes", "storage_order"]

MOST_BOXES = 1 << 16
"""Of one view. What is scattered more than this is no layout that is worth moving piece by piece."""


@dataclass(frozen=True)
class Axis:
    """A dimension of a view, and of what it is copied into or from. In elements."""

    length: int
    source: int
    """Stride in the tensor that the view is of."""
    target: int
    """Stride at the other end of the copy."""


@dataclass(frozen=True)
class Piece:
    """A box `[lo, hi)` of the tensor, and where it lies at the other end. In elements, with a stride for each of the tensor's dimensions."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


def boxes(shape: Sequence[int], axes: Sequence[Axis], start: int, to: int = 0) -> Iterator[Piece]:
    """The boxes of a C-ordered tensor of `shape` that a view covers, together with the places of their elements at the other end of a copy.

    Args:
        axes: of the view, in any order.
        start: of the view's first element, in elements from the tensor's first one.
        to: where that element lies at the other end.

    Returns:
        As few as it takes for common layouts; every element of the view is in exactly one. None for an empty view.

    Raises:
        PlanError: one element of the tensor is several of the view (`expand`), or there would be more than `MOST_BOXES`.
    """
    if any(a.length == 0 for a in axes):
        return
    axes = [a for a in axes if a.length > 1]
    if any(a.source <= 0 for a in axes):
        raise PlanError("one element is repeated (expand): every element has one place")
    for count, piece in enumerate(_split(tuple(shape), _steps(shape), _merged(axes), start, to)):
        if count == MOST_BOXES:
            raise PlanError(f"is scattered over more than {MOST_BOXES} boxes")
        yield piece


def storage_order(lengths: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """The dimensions of a tensor, outermost first as they lie in memory; None unless they lie there without gaps and overlaps."""
    order = sorted(range(len(lengths)), key=lambda i: (-strides[i], -lengths[i]))
    step = 1
    for i in reversed(order):
        if lengths[i] > 1 and strides[i] != step:
            return None
        step *= lengths[i]
    return order


def _steps(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _merged(axes: Sequence[Axis]) -> list[Axis]:
    """Outermost first; two that follow on each other at both ends are one."""
    out: list[Axis] = []
    for axis in sorted(axes, key=lambda a: -a.source):
        last = out[-1] if out else None
        if last and last.source == axis.length * axis.source and last.target == axis.length * axis.target:
            out[-1] = Axis(last.length * axis.length, axis.source, axis.target)
        else:
            out.append(axis)
    return out


def _split(shape: tuple[int, ...], steps: list[int], axes: list[Axis], start: int, to: int) -> Iterator[Piece]:
    """Takes one axis apart until each is a range of one dimension of the tensor."""
    lo, rest = [], start
    for step in steps:
        lo.append(rest // step)
        rest %= step
    of: dict[int | None, Axis] = {}
    for axis in axes:
        # A dimension of length 1 takes nothing: its step is that of a longer one further in.
        dim = next((i for i, step in enumerate(steps) if shape[i] > 1 and step <= axis.source), None)
        if dim is None or axis.source != steps[dim] or dim in of:
            yield from _one_by_one(shape, steps, axes, of.get(dim, axis), start, to)
            return
        of[dim] = axis
    for dim, axis in of.items():
        if lo[dim] + axis.length > shape[dim]:
            others = [a for a in axes if a is not axis]
            for first, inner in _rows(axis, lo[dim], shape[dim], steps[dim]):
                yield from _split(shape, steps, [*others, *inner], start + first * axis.source, to + first * axis.target)
            return
    extent = [of[i].length if i in of else 1 for i in range(len(shape))]
    strides = [0] * len(shape)
    step = 1
    for i in reversed(range(len(shape))):  # those of length 1 get the stride that they would have in a packed box
        strides[i] = of[i].target if i in of else step
        step = strides[i] * extent[i]
    yield Piece(tuple(lo), tuple(a + n for a, n in zip(lo, extent, strict=True)), to, tuple(strides))


def _one_by_one(shape: tuple[int, ...], steps: list[int], axes: list[Axis], axis: Axis, start: int, to: int) -> Iterator[Piece]:
    if axis.length > MOST_BOXES:
        raise PlanError(f"is scattered over more than {MOST_BOXES} boxes")
    others = [a for a in axes if a is not axis]
    for i in range(axis.length):
        yield from _split(shape, steps, others, start + i * axis.source, to + i * axis.target)


def _rows(axis: Axis, lo: int, width: int, step: int) -> Iterator[tuple[int, list[Axis]]]:
    """A range that runs over the end of a row: the rest of the first row, whole rows, the beginning of the last one."""
    head = min((width - lo) % width, axis.length)
    if head:
        yield 0, [Axis(head, axis.source, axis.target)]
    rows, tail = divmod(axis.length - head, width)
    if rows:
        inner = [Axis(rows, step * width, axis.target * width), Axis(width, step, axis.target)]
        yield head, [a for a in inner if a.length > 1]
    if tail:
        yield head + rows * width, [Axis(tail, axis.source, axis.target)]
