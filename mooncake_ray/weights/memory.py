"""Whether the places that boxes are written to lie apart."""

from __future__ import annotations

import numpy as np

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.boxes import distinct, meetings
from mooncake_ray.weights.placement import Placement

__all__ = ["refuse_shared"]


def refuse_shared(placement: Placement) -> None:
    """Sees to it that no byte of a buffer belongs to two fragments. Several fragments of one place are one: tied tensors.

    Exact for fragments whose strides agree, and do not lead a box over itself. Others in one buffer are not looked at: nothing lays tensors out
    like that.

    Raises:
        PlanError: two fragments have some bytes in common.
    """
    extent = placement.hi - placement.lo
    strides = np.where(extent > 1, placement.strides, 0)
    end = placement.offset + (strides * (extent - 1)).sum(axis=1) + placement.itemsize
    where = np.unique(placement.rank.astype(np.int64) * max(1, len(placement.buffers)) + placement.buffer, return_inverse=True)[1].reshape(
        -1
    )
    order = np.lexsort((placement.offset, where))
    same = where[order][1:] == where[order][:-1]
    # Rises from buffer to buffer, so that one running maximum does for all.
    most = int(end.max(initial=0)) + 1
    reach = np.maximum.accumulate(where[order] * most + end[order])
    near = np.flatnonzero(same & (where[order][1:] * most + placement.offset[order][1:] < reach[:-1]))
    if not len(near):
        return
    rows = np.flatnonzero(np.isin(where, np.unique(where[order][near])))
    first, _ = distinct([where[rows], placement.offset[rows], *extent[rows].T, *strides[rows].T])
    rows = rows[first]
    _, buffer = distinct([where[rows]])
    spans = buffer, placement.offset[rows, None], end[rows, None]
    for i, j in meetings(spans, spans, np.zeros(int(buffer.max()) + 1, np.int64)):
        i, j = rows[i[i < j]], rows[j[i < j]]
        bad = np.flatnonzero(_meet(placement.offset[j] - placement.offset[i], extent[i], extent[j], strides[i], strides[j]))
        if len(bad):
            a, b = int(i[bad[0]]), int(j[bad[0]])
            names = [placement.metas[placement.tensor[n]].name for n in (a, b)]
            raise PlanError(
                f"{placement.ranks[placement.rank[a]]} would be written twice, in buffer {placement.buffers[placement.buffer[a]]!r}: "
                f"by {names[0]} [{placement.lo[a].tolist()}, {placement.hi[a].tolist()}) from byte {int(placement.offset[a])}, "
                f"and by {names[1]} [{placement.lo[b].tolist()}, {placement.hi[b].tolist()}) from byte {int(placement.offset[b])}"
            )


def _meet(apart: np.ndarray, n: np.ndarray, m: np.ndarray, strides: np.ndarray, other: np.ndarray) -> np.ndarray:
    """bool (pairs): whether there are places in two boxes, which begin `apart` bytes from each other, that are the same."""
    agree = np.all((n == 1) | (m == 1) | (strides == other), axis=1)
    strides = np.maximum(strides, other)
    order = np.argsort(-strides, axis=1, kind="stable")
    n, m, strides = (np.take_along_axis(a, order, 1) for a in (n, m, strides))
    # The difference is a sum of steps, of which each has two candidates, as all smaller ones together are less than one of it.
    left = [apart]
    fits = [np.ones(len(apart), bool)]
    for dim in range(n.shape[1]):
        step = np.maximum(strides[:, dim], 1)
        next_left, next_fits = [], []
        for rest, fit in zip(left, fits, strict=True):
            down = np.where(strides[:, dim] > 0, rest // step, 0)
            for count in (down, down + 1):
                inside = (count > -m[:, dim]) & (count < n[:, dim])
                next_left.append(rest - count * strides[:, dim])
                next_fits.append(fit & inside)
        left, fits = next_left, next_fits
    found = np.zeros(len(apart), bool)
    for rest, fit in zip(left, fits, strict=True):
        found |= fit & (rest == 0)
    return found & agree
