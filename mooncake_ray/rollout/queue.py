"""`Queue`: whole groups that wait to be learned from, in the order that settings ask for."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping

from mooncake_ray.rollout.group import Group
from mooncake_ray.rollout.settings import Order

__all__ = ["Queue"]

_Key = tuple[float, int]

_KEYS: Mapping[Order, Callable[[Group], float]] = {
    "fifo": lambda group: 0,
    "oldest": lambda group: group.oldest,
    "newest": lambda group: -group.oldest,
    "priority": lambda group: -group.priority,
}


class Queue:
    """Not thread-safe. A group that comes back has its place again."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._keys: list[_Key] = []
        self._groups: dict[int, Group] = {}
        self._versions: dict[int, set[int]] = {}  # numbers of groups by their oldest version

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Group]:
        """The first one first."""
        return (self._groups[number] for _, number in self._keys)

    def _key(self, group: Group) -> _Key:
        return _KEYS[self._order](group), group.number

    def add(self, group: Group) -> None:
        insort(self._keys, self._key(group))
        self._groups[group.number] = group
        self._versions.setdefault(group.oldest, set()).add(group.number)

    def remove(self, group: Group) -> None:
        del self._keys[bisect_left(self._keys, self._key(group))]
        del self._groups[group.number]
        numbers = self._versions[group.oldest]
        numbers.remove(group.number)
        if not numbers:
            del self._versions[group.oldest]

    def older_than(self, version: int) -> list[Group]:
        """Groups with a token of an older version, in the order of their coming."""
        numbers = (number for oldest, some in self._versions.items() if oldest < version for number in some)
        return [self._groups[number] for number in sorted(numbers)]
