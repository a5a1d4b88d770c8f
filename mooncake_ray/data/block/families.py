"""Length families: where in each row the data is. Columns of one family share their row lengths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mooncake_ray.data.block.node import narrow as narrowest
from mooncake_ray.data.block.read import offsets_of

__all__ = ["Families", "Family"]


@dataclass(frozen=True, eq=False)
class Family:
    """Row r has `lengths[r]` positions of data; in its padded form they begin at position `starts[r]` of `width`.

    Both int64 (rows,). Width -1: ragged rows, which have no padded form of their own.
    """

    lengths: np.ndarray
    starts: np.ndarray
    width: int
    told: bool = True
    """By a mask. Else by a column whose rows end or begin with its pad, which may be data as well: no lengths to give anybody."""

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 (rows + 1,)."""
        return offsets_of(self.lengths)

    @property
    def total(self) -> int:
        return int(self.offsets[-1])

    def cut(self, first: int, width: int) -> Family:
        """The family of the columns first … first + width - 1."""
        start = np.clip(self.starts - first, 0, width)
        stop = np.clip(self.starts + self.lengths - first, 0, width)
        lengths = stop - start
        return Family(lengths, np.where(lengths > 0, start, 0), width, self.told)

    def same(self, other: Family) -> bool:
        return self.width == other.width and np.array_equal(self.lengths, other.lengths) and np.array_equal(self.starts, other.starts)


def narrow(values: np.ndarray) -> np.ndarray:
    """The same numbers (not negative) in the narrowest unsigned dtype."""
    return values.astype(narrowest(int(values.max(initial=0))))


class Families:
    """The families of one block to be. Equal ones are one."""

    def __init__(self) -> None:
        self.all: list[Family] = []
        self._nodes: list[dict[str, Any]] = []
        self._cut: set[tuple[int, int, int]] = set()  # family, first column and width of what was made of wider ones

    def add(self, family: Family) -> int:
        """Returns the family's number. It is stored as part of another where it is one."""
        for number, other in enumerate(self.all):
            if family.same(other):
                return number
        node: dict[str, Any] = {"width": family.width} | ({} if family.told else {"told": False})
        for number, other in enumerate(self.all):
            if family.width < 0:
                if np.array_equal(family.lengths, other.lengths):
                    node["of"] = number
                    break
            elif other.width >= family.width:
                first = next((f for f in {0, other.width - family.width} if family.same(other.cut(f, family.width))), None)
                if first is not None:
                    node.update(of=number, first=first)
                    break
        self.all.append(family)
        self._nodes.append(node)
        return len(self.all) - 1

    def of_width(self, width: int) -> list[int]:
        """Families that a padded column of that width may have, those that store least first; parts of wider families included."""
        for number, other in enumerate(list(self.all)):
            for first in {0, other.width - width} if other.width > width else ():
                if (number, first, width) not in self._cut:
                    self._cut.add((number, first, width))
                    self.add(other.cut(first, width))
        found = [n for n, family in enumerate(self.all) if family.width == width]
        return sorted(found, key=lambda n: self.all[n].total)

    def nodes(self, used: set[int], add: Any) -> list[dict[str, Any]]:
        """The families as nodes of the index, with buffers for what cannot be told from another; unused ones are left empty."""
        for number in reversed(range(len(self.all))):  # a family is part of an earlier one
            if number in used and "of" in self._nodes[number]:
                used.add(self._nodes[number]["of"])
        out: list[dict[str, Any]] = []
        for number, (family, node) in enumerate(zip(self.all, self._nodes, strict=True)):
            if number not in used:
                out.append({})
            elif "of" in node:
                out.append(node)
            else:
                out.append({**node, **_stored("lengths", family.lengths, add), **_stored("starts", family.starts, add)})
        return out


def _stored(name: str, values: np.ndarray, add: Any) -> dict[str, Any]:
    if not len(values) or (values == values[0]).all():
        return {name: int(values[0]) if len(values) else 0}
    small = narrow(values)
    return {name: [small.dtype.name, add(small)]}
