"""Ranks that have the same boxes in the same order, as replicas have: what is planned once for all of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mooncake_ray.weights.boxes import Ragged, firsts, spread
from mooncake_ray.weights.placement import Placement

__all__ = ["Alike"]


@dataclass(frozen=True, eq=False)
class Alike:
    """Classes of ranks. Sorted by digest, so that the numbers do not depend on who is in which."""

    ranks: tuple[str, ...]
    """Sorted; other numbers of ranks than the placement's."""
    digests: tuple[bytes, ...]
    """Of each class: of its boxes."""
    class_of: np.ndarray
    """int64 (ranks)."""
    members: Ragged
    """For each class its ranks, int64, rising."""
    fragments: Ragged
    """For each rank its fragments: indices in the placement, in their order there."""

    @classmethod
    def of(cls, placement: Placement, tensor: np.ndarray) -> Alike:
        """
        Args:
            tensor: (n): a number for each fragment's tensor, instead of the placement's own.
        """
        by_name = sorted(range(len(placement.ranks)), key=placement.ranks.__getitem__)
        place = np.empty(len(by_name), np.int64)
        place[by_name] = np.arange(len(by_name))
        rank = place[placement.rank]
        order = np.argsort(rank, kind="stable")
        start = firsts(rank[order], len(by_name))
        table = np.concatenate([tensor[:, None], placement.lo, placement.hi], axis=1, dtype=np.int64)[order]
        ranks = tuple(placement.ranks[i] for i in by_name)
        digests = [hashlib.blake2b(table[a:b].data, digest_size=32).digest() for a, b in pairwise(start.tolist())]
        known = {digest: i for i, digest in enumerate(sorted(set(digests)))}
        class_of = np.array([known[digest] for digest in digests], np.int64)
        line = np.argsort(class_of, kind="stable")
        return cls(ranks, tuple(known), class_of, Ragged(firsts(class_of[line], len(known)), line), Ragged(start, order))

    @property
    def first(self) -> np.ndarray:
        """int64 (classes): a rank of each."""
        return self.members.values[self.members.start[:-1]]

    def ranks_of(self, classes: Ragged) -> tuple[Ragged, np.ndarray]:
        """Sets of classes as sets of ranks.

        Returns:
            (sets, place): rising int32 numbers of ranks, smaller ones first, then by their members; and int64: which each row is now.
        """
        lengths = self.members.lengths[classes.values]
        row = np.repeat(np.repeat(np.arange(len(classes)), classes.lengths), lengths)
        rank = self.members.values[spread(self.members.start[classes.values], lengths)]
        order = np.lexsort((rank, row))
        sets = Ragged(firsts(row, len(classes)), rank[order].astype(np.int32))
        by_value = sorted(range(len(sets)), key=lambda i: (len(sets[i]), sets[i].tolist()))
        place = np.empty(len(sets), np.int64)
        place[by_value] = np.arange(len(sets))
        return sets.take(np.array(by_value, np.int64)), place
