"""Who of those that hold the same bytes sends which: levels filled like communicating vessels."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from mooncake_ray.weights.boxes import Ragged

__all__ = ["fill", "least_loaded", "rounds"]


def fill(load: np.ndarray, cost: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """Pours `amount` (k) into k groups of R vessels each, so that the fullest of each is as little full as can be.

    Args:
        load: what is in the vessels already, float (k, R).
        cost: by how much a unit fills each, float (k, R), positive.
        amount: float (k).

    Returns:
        float (k, R): what each vessel gets; rows add up to `amount`.
    """
    order = np.argsort(load, axis=1, kind="stable")
    sorted_load, weight = np.take_along_axis(load, order, 1), 1.0 / np.take_along_axis(cost, order, 1)
    # The level if only the first j vessels got something; the right j is the last whose vessel is below that level.
    level = (amount[:, None] + np.cumsum(sorted_load * weight, axis=1)) / np.cumsum(weight, axis=1)
    used = (level >= sorted_load).sum(axis=1) - 1
    top = level[np.arange(len(level)), np.maximum(used, 0)]
    got = np.maximum(top[:, None] - load, 0.0) / cost
    total = got.sum(axis=1, keepdims=True)
    return np.where(total > 0, got * (amount[:, None] / np.where(total > 0, total, 1.0)), amount[:, None] / load.shape[1])


def rounds(sets: Ragged, place: np.ndarray) -> list[np.ndarray]:
    """Numbers of the sets of more than one member, so that those of a round are of one size and have no place (of a member's) in common.
    Smaller sets first, as they have less choice."""
    out: list[tuple[list[int], set[int]]] = []
    size = 0
    for number in range(len(sets)):
        members = sets[number]
        if len(members) < 2:
            continue
        if len(members) != size:
            size, begun = len(members), len(out)
        taken = set(place[members].tolist())
        for chosen, places in out[begun:]:
            if places.isdisjoint(taken):
                chosen.append(number)
                places |= taken
                break
        else:
            out.append(([number], taken))
    return [np.array(chosen, np.int64) for chosen, _ in out]


def least_loaded(
    sizes: np.ndarray,
    which: np.ndarray,
    sets: Ragged,
    costs: Callable[[np.ndarray, np.ndarray], np.ndarray] | None,
    place: np.ndarray,
    load: np.ndarray,
) -> np.ndarray:
    """Gives each item to one member of its set: the longest first, to whom has least then (Graham 1969); small sets before large ones.

    Args:
        sizes: of the items, (n).
        which: their sets, (n).
        sets: smaller ones first.
        costs: what a byte of some items costs some members, float (items, members); None: the same everywhere.
        place: whose load a member's is.
        load: float (places); is added to.

    Returns:
        int32 (n): the member.
    """
    out = np.empty(len(sizes), np.int32)
    order = np.lexsort((np.arange(len(sizes)), -sizes, which))
    start = np.searchsorted(which[order], np.arange(len(sets) + 1))
    for number in range(len(sets)):
        items, members = order[start[number] : start[number + 1]], sets[number]
        if not len(items):
            continue
        if len(members) == 1:
            out[items] = members[0]
            each = costs(items, members)[:, 0] if costs else 1.0
            load[place[members[0]]] += float((sizes[items] * each).sum())
            continue
        spots, first = np.unique(place[members], return_index=True)
        turns = [members[place[members] == spot].tolist() for spot in spots]  # members that share a place take turns
        taken = [0] * len(spots)
        if costs is None:
            chosen = _lightest(load, spots, sizes[items])
        else:
            chosen = _cheapest(load, spots, sizes[items][:, None] * costs(items, members[first]))
        for item, n in zip(items.tolist(), chosen, strict=True):
            out[item] = turns[n][taken[n] % len(turns[n])]
            taken[n] += 1
    return out


def _lightest(load: np.ndarray, spots: np.ndarray, sizes: np.ndarray) -> list[int]:
    heap = [(level, n) for n, level in enumerate(load[spots].tolist())]
    heapq.heapify(heap)
    out = []
    for size in sizes.tolist():
        level, n = heap[0]
        out.append(n)
        heapq.heapreplace(heap, (level + size, n))
    for level, n in heap:
        load[spots[n]] = level
    return out


def _cheapest(load: np.ndarray, spots: np.ndarray, added: np.ndarray) -> list[int]:
    levels, out = load[spots], []
    for more in added:
        n = int((levels + more).argmin())
        out.append(n)
        levels[n] += more[n]
    load[spots] = levels
    return out
