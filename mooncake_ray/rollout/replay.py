"""`Replay`: groups that were learned from, to be drawn again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from mooncake_ray.rollout.group import Group

__all__ = ["Draw", "Replay"]

Draw = Literal["uniform", "prioritised", "recency"]
"""How groups are drawn, without putting them back: all alike; in proportion to their priority ** 0.6 (proportional prioritisation of Schaul et
al., arXiv 1511.05952, with its exponent); or the newer the likelier, half as likely for each eighth of the replay that came after."""

_EXPONENT = 0.6
_LEAST_PRIORITY = 1e-6  # so that each may be drawn
_HALVINGS = 8


class Replay:
    """A ring of bytes: the oldest groups go for new ones. Not thread-safe."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.nbytes = 0
        self._groups: dict[int, Group] = {}  # by number, in the order in which they were learned from

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        """The one that was learned from first comes first."""
        return iter(list(self._groups.values()))

    def add(self, group: Group) -> list[Group]:
        """Returns the groups that have to go for it: itself, if it is larger than all of the replay."""
        if group.nbytes > self.capacity_bytes:
            return [group]
        self._groups[group.number] = group
        self.nbytes += group.nbytes
        out = []
        while self.nbytes > self.capacity_bytes:
            out.append(self.remove(next(iter(self._groups))))
        return out

    def remove(self, number: int) -> Group:
        group = self._groups.pop(number)
        self.nbytes -= group.nbytes
        return group

    def __contains__(self, number: int) -> bool:
        return number in self._groups

    def using(self, parcels: set[str]) -> list[Group]:
        """Groups with rows in one of the parcels."""
        return [group for group in self._groups.values() if group.uses(parcels)]

    def prioritise(self, priorities: Mapping[int, float]) -> None:
        """By numbers of groups. Those that have gone are passed over."""
        for number, priority in priorities.items():
            if number in self._groups:
                self._groups[number].priority = priority

    def draw(self, count: int, how: Draw, random: np.random.Generator, *, least: int | None = None) -> list[Group]:
        """At most `count` different groups, none with a token older than version `least`."""
        pool = [group for group in self._groups.values() if least is None or group.oldest >= least]
        if count >= len(pool):
            return pool
        weights: np.ndarray | None = None
        if how == "prioritised":
            weights = np.maximum([group.priority for group in pool], _LEAST_PRIORITY) ** _EXPONENT
        elif how == "recency":
            weights = 0.5 ** ((len(pool) - 1 - np.arange(len(pool))) * _HALVINGS / len(pool))
        chosen = random.choice(len(pool), count, replace=False, p=None if weights is None else weights / weights.sum())
        return [pool[i] for i in sorted(chosen)]
