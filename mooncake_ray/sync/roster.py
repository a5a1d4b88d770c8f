"""`Roster`: who belongs to a group, and what each of them has. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from mooncake_ray.errors import PlanError
from mooncake_ray.sync.messages import Join, Member, Published, State
from mooncake_ray.weights.placement import Placement

__all__ = ["Roster", "Unit"]


@dataclass
class Unit:
    """The trainers, or one engine: ranks that are only of use together."""

    name: str
    world: int
    joined: dict[int, Join] = field(default_factory=dict)
    _placed: tuple[list[Placement], Placement] | None = None

    @property
    def whole(self) -> bool:
        return len(self.joined) == self.world

    @property
    def members(self) -> list[Member]:
        return [self.joined[rank].member for rank in sorted(self.joined)]

    @property
    def placement(self) -> Placement:
        """Of all its ranks together; the same object for as long as they stay."""
        parts = [self.joined[rank].placement for rank in sorted(self.joined)]
        if self._placed is None or [id(p) for p in self._placed[0]] != [id(p) for p in parts]:
            self._placed = parts, Placement.join(parts)
        return self._placed[1]

    @property
    def aliases(self) -> frozenset[str]:
        return frozenset[str]().union(*(join.aliases for join in self.joined.values()))

    @property
    def hosts(self) -> dict[str, str]:
        """Of each rank, by name: where it is, as messages name it."""
        return {m.name: m.host for m in self.members}

    @property
    def version(self) -> int:
        """What it serves: -1 for nothing, or not the same on all its ranks."""
        versions = {join.version for join in self.joined.values()}
        return versions.pop() if len(versions) == 1 and self.whole and self.state == "serving" else -1

    @property
    def published(self) -> int:
        """The version that all ranks of these trainers have published; -1: there is none."""
        versions = {-1 if join.published is None else join.published.version for join in self.joined.values()}
        return versions.pop() if len(versions) == 1 and self.whole else -1

    @property
    def state(self) -> State:
        states = {join.state for join in self.joined.values()}
        return next((s for s in ("poisoned", "paused", "joined") if s in states), "serving")


class Roster:
    """Not thread-safe."""

    def __init__(self) -> None:
        self.trainers: Unit | None = None
        self.engines: dict[str, Unit] = {}
        self._by_id: dict[str, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_id.values()))

    def __contains__(self, id: str) -> bool:
        return id in self._by_id

    def unit_of(self, member: Member) -> Unit | None:
        return self.trainers if member.role == "trainer" else self.engines.get(member.unit)

    def join(self, what: Join) -> Member | None:
        """Adds a member. Returns whom it replaces: an earlier process of the same rank.

        Raises:
            PlanError: ranks of one unit disagree on how many there are.
        """
        member = what.member
        if not 0 <= member.rank < member.world:
            raise PlanError(f"{member.unit} has {member.world} ranks, and this one says it is number {member.rank}")
        unit = self.unit_of(member)
        if unit is not None and unit.world != member.world:
            if any(m.id != member.id and m.rank != member.rank for m in unit.members):
                raise PlanError(f"{member} says that {member.unit} has {member.world} ranks, others that it has {unit.world}")
            unit = None  # made anew with another number of ranks
        if unit is None:
            unit = Unit(member.unit, member.world)
            if member.role == "trainer":
                self.trainers = unit
            else:
                self.engines[member.unit] = unit
        before = unit.joined.get(member.rank)
        unit.joined[member.rank] = what
        self._by_id[member.id] = member
        if before is None or before.member.id == member.id:
            return None
        self._by_id.pop(before.member.id, None)
        return before.member

    def leave(self, member: Member) -> None:
        """Forgets it; an engine without any rank, too."""
        if self._by_id.pop(member.id, None) is None:
            return
        unit = self.unit_of(member)
        if unit is not None and (there := unit.joined.get(member.rank)) is not None and there.member.id == member.id:
            del unit.joined[member.rank]
            if not unit.joined:
                if member.role == "trainer":
                    self.trainers = None
                else:
                    del self.engines[member.unit]

    def by_id(self, id: str) -> Member | None:
        return self._by_id.get(id)

    def note(self, member: Member, *, version: int | None = None, state: State | None = None, published: Published | None = None) -> None:
        """What it has now. Nothing happens where it is gone."""
        unit = self.unit_of(member)
        there = unit.joined.get(member.rank) if unit is not None else None
        if unit is not None and there is not None and there.member.id == member.id:
            unit.joined[member.rank] = replace(
                there,
                published=there.published if published is None else published,
                version=there.version if version is None else version,
                state=there.state if state is None else state,
            )
