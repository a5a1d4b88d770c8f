"""`Holdings`: which stored batches are still needed, and how many bytes these are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mooncake_ray.rollout.group import Group

__all__ = ["Holdings"]


class Holdings:
    """Counts uses of parcels by groups. A group is held as often as somebody needs it. Not thread-safe."""

    def __init__(self) -> None:
        self._uses: Counter[str] = Counter()
        self._unused: dict[str, None] = {}

    def __contains__(self, parcel: str) -> bool:
        return self._uses[parcel] > 0

    def __len__(self) -> int:
        """Parcels."""
        return len(self._uses)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._uses))

    def hold(self, group: Group) -> None:
        self._uses.update(parcel for parcel, _ in group.rows)

    def let_go(self, group: Group) -> None:
        for parcel, _ in group.rows:
            self._uses[parcel] -= 1
            if not self._uses[parcel]:
                del self._uses[parcel]
                self._unused[parcel] = None

    def retired(self) -> list[str]:
        """Parcels that are not needed any more. Each is told once."""
        out, self._unused = [parcel for parcel in self._unused if parcel not in self], {}
        return out
