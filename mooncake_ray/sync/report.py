"""What a sync did, and how a group is: for people and their dashboards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mooncake_ray.sync.messages import State

__all__ = ["EngineStatus", "GroupStatus", "SyncReport"]


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
    """One engine."""

    version: int
    """What it serves; -1: nothing."""
    state: State
    ranks: int
    """That have joined."""
    world: int


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
