"""What a buffer is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from mooncake_ray.data import balance
from mooncake_ray.errors import ConfigError
from mooncake_ray.rollout.group import Group, Rows
from mooncake_ray.rollout.replay import Draw

__all__ = ["Brought", "Draft", "NoRoom", "Reason", "Waiting", "Want", "Work", "rows_of"]

Reason = Literal["partial", "stale", "orphaned", "lost"]
"""Why a group is to be made again, or further: its producer has given back what it had so far; it was too old when it was to be learned from;
its producer is gone; or what was stored of it is."""


@dataclass(frozen=True)
class Want:
    """What a learner asks for."""

    groups: int
    """Exactly so many that were not learned from yet, unless `tokens` are reached before."""
    tokens: int | None = None
    """At most so many in all of them. A single group may have more."""
    replay: int = 0
    """So many drawn from what was learned from before, or as many as there are."""
    draw: Draw = "uniform"
    replay_staleness: int | None = None
    """How many versions old the oldest token of those may be. None: any."""

    def __post_init__(self) -> None:
        for name, least in (("groups", 1), ("tokens", 1), ("replay", 0), ("replay_staleness", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.draw not in get_args(Draw):
            raise ConfigError(f"draw must be one of {', '.join(get_args(Draw))}, got {self.draw!r}")


@dataclass(frozen=True)
class Draft:
    """What a step learns from. The same for whoever asks for the step, until it is committed or given up."""

    step: int
    version: int
    """Of the weights that it changes."""
    attempt: int
    """A number that nothing else has that was given. A step is given something else when it was given up, or some of it was lost."""
    fresh: tuple[Group, ...]
    replayed: tuple[Group, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.fresh + self.replayed

    @property
    def samples(self) -> int:
        return sum(group.size for group in self.groups)

    def share(self, rank: int, world: int) -> list[tuple[Group, np.ndarray]]:
        """What one of `world` learner ranks gets: groups with the numbers of their samples (rising). All ranks have about as many tokens, and
        equally many samples (or one more).

        Raises:
            ConfigError: there are fewer samples than ranks, or no such rank.
        """
        if not 0 <= rank < world:
            raise ConfigError(f"there is no rank {rank} of {world}")
        if not self.groups:
            return []
        if self.samples < world:
            raise ConfigError(f"step {self.step} has {self.samples} samples for {world} ranks")
        tokens = np.concatenate([group.tokens for group in self.groups])
        mine = balance.partition(tokens, world)[rank]
        ends = np.cumsum([group.size for group in self.groups])
        cuts = np.searchsorted(mine, ends)
        parts = np.split(mine, cuts[:-1])
        return [(g, part - (end - g.size)) for g, part, end in zip(self.groups, parts, ends.tolist(), strict=True) if len(part)]


@dataclass(slots=True)
class Waiting:
    """A group that waits for a producer, with what there is of it."""

    group: Group
    reason: Reason


@dataclass(frozen=True)
class Work:
    """A group for a producer to make again, or further."""

    uid: str
    reason: Reason
    rows: tuple[Rows, ...] = ()
    """What there is of it."""
    oldest: int = 0
    """The version that made the oldest token of that."""


@dataclass(frozen=True)
class Brought:
    """What became of a parcel."""

    samples: int
    whole: int
    """Groups that are whole now, and may be learned from."""
    filtered: int
    """Groups that were whole, and that a filter has refused."""


@dataclass(frozen=True)
class NoRoom:
    """Why new groups have to wait."""

    groups: int
    used_groups: int
    capacity_groups: int | None
    nbytes: int
    used_bytes: int
    capacity_bytes: int | None

    def __str__(self) -> str:
        parts = []
        if self.capacity_groups is not None:
            parts.append(f"{self.used_groups} of {self.capacity_groups} groups are on their way, and {self.groups} more wanted")
        if self.capacity_bytes is not None:
            parts.append(f"{self.used_bytes} of {self.capacity_bytes} bytes are used, and {self.nbytes} more wanted")
        return "; ".join(parts)


def rows_of(share: Sequence[tuple[Group, np.ndarray]]) -> list[Rows]:
    """Where the samples of a share lie, in their order."""
    out: list[tuple[str, list[np.ndarray]]] = []
    for group, samples in share:
        begin = 0
        for parcel, rows in group.rows:
            end = begin + len(rows)
            some = rows if len(samples) == group.size else rows[samples[(samples >= begin) & (samples < end)] - begin]
            if len(some) and out and out[-1][0] == parcel:
                out[-1][1].append(some)
            elif len(some):
                out.append((parcel, [some]))
            begin = end
    return [(parcel, np.concatenate(rows)) for parcel, rows in out]
