"""What a sync did, and how a group is: for people and their dashboards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mooncake_ray.sync.messages import State

__all__ = ["Departed", "EngineStatus", "GroupStatus", "Outcome", "Phase", "SyncReport", "Update", "VersionStatus", "What"]

What = Literal["publish", "sync", "catch up"]
"""Kinds of updates. The last is what engines that joined late are brought to the version by."""
Phase = Literal["waiting", "publishing", "planning", "staging", "verifying", "committing"]
"""Of an update: for members that have not joined; for trainers to have room, or to have written; for plans; for engines to have all of it; for
digests to be compared; for engines to take it over."""


@dataclass
class SyncReport:
    """One version's way. Seconds are those of the slowest rank."""

    version: int
    mode: str
    """That it went by; what was asked for, if there was nothing to do."""
    why: str = ""
    """That mode."""
    engines: list[str] = field(default_factory=list)
    """That serve it now, because of this."""
    lost: dict[str, str] = field(default_factory=dict)
    """Engines that do not, and why: they died, or failed while they applied it. They are brought back when they can be."""
    fallbacks: list[str] = field(default_factory=list)
    """Modes that were tried before, and why they failed."""
    nbytes: int = 0
    """Of the boxes that were staged, each once however many ranks have it; of the patches, where those were."""
    publish_s: float = 0.0
    """Until engines could begin to stage: when all is written, or (mode p2p) when there is room for it."""
    plan_s: float = 0.0
    stage_s: float = 0.0
    """Also what is still written meanwhile."""
    commit_s: float = 0.0
    pause_s: float = 0.0
    """The longest that an engine's rank was paused."""


@dataclass(frozen=True)
class EngineStatus:
    """One engine. Times are in seconds before this was told; None: not known, as the coordinator was restarted since."""

    version: int
    """What it serves; -1: nothing."""
    state: State
    ranks: int
    """That have joined."""
    world: int
    hosts: tuple[str, ...] = ()
    """Addresses of the nodes that its ranks are on, each once."""
    since_s: float | None = None
    """It has its version."""
    behind: int = 0
    """Versions that were published after the one it serves."""
    stale_s: float | None = None
    """The first of these was published; 0: it has the newest."""
    silent_s: float = 0.0
    """The rank that was not heard of for the longest time was heard of."""


@dataclass(frozen=True)
class Update:
    """What is under way."""

    what: What
    version: int
    mode: str
    """"": it is not chosen yet."""
    phase: Phase
    engines: tuple[str, ...]
    """That get it; none before it is staged."""
    moved_bytes: int
    total_bytes: int
    """0: not known before it is staged."""
    seconds: float
    """That it has taken."""
    stage_s: float
    """Since staging began."""


@dataclass(frozen=True)
class Outcome:
    """Of an update that is over."""

    what: What
    report: SyncReport
    error: str
    """"": it succeeded."""
    seconds: float
    """That it took."""
    ago_s: float


@dataclass(frozen=True)
class VersionStatus:
    """A version that was published."""

    version: int
    nbytes: int
    """Of one copy of it."""
    ago_s: float | None
    """None: not known, as the coordinator was restarted since."""
    kept: bool
    """The trainers still have it in the pool."""


@dataclass(frozen=True)
class Departed:
    """An engine that was there, and of which no rank is."""

    why: str
    """"": it left by itself."""
    ago_s: float
    version: int
    """That it served; -1: none."""


@dataclass(frozen=True)
class GroupStatus:
    """A group."""

    version: int
    """The last one that engines were brought to; -1: none."""
    published: int
    """The last one that trainers have published."""
    epoch: int
    trainers: int
    engines: Mapping[str, EngineStatus]
    moved_bytes: int
    """Of the update that is under way, or the last one."""
    total_bytes: int
    trainer_world: int = 0
    """How many trainers there are when all are there."""
    trainer_hosts: tuple[str, ...] = ()
    update: Update | None = None
    """None: none is under way."""
    outcomes: tuple[Outcome, ...] = ()
    """Of the last updates, newest first."""
    versions: tuple[VersionStatus, ...] = ()
    """The last ones, newest first."""
    departed: Mapping[str, Departed] = field(default_factory=dict)
    """By engine."""
