"""What a group's coordinator and its members tell each other. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mooncake_ray.errors import SyncAbortedError, WeightSyncError
from mooncake_ray.objects.blobs import Blob
from mooncake_ray.weights.placement import Placement

__all__ = ["Command", "Contents", "GivenUpError", "Join", "Manifest", "Member", "Published", "Report", "State", "rank_name"]


class GivenUpError(SyncAbortedError):
    """The coordinator has given up the update that is being carried out."""


Role = Literal["trainer", "engine"]
State = Literal["joined", "serving", "paused", "poisoned"]
"""Of an engine's rank: without weights of any version; with some; with some that it has taken over, and waits for the engine's other ranks; with
what must not be served."""


def rank_name(unit: str, rank: int) -> str:
    """How placements name a rank: "e0/1"."""
    return f"{unit}/{rank}"


@dataclass(frozen=True)
class Member:
    """One rank of the trainers, or of an engine."""

    id: str
    """Drawn anew by every process, so that nobody is taken for who was there before."""
    role: Role
    unit: str
    """The engine's name; "trainer"."""
    rank: int
    world: int
    """Ranks of the trainers, or of that engine."""
    host: str
    """Address of its node."""
    actor: str
    """ID of its Ray actor in hex; "" for a process that is none."""

    @property
    def name(self) -> str:
        return rank_name(self.unit, self.rank)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Published:
    """What one trainer rank has published of a version."""

    version: int
    operation: str
    """That it was published for: asked for again by the same, it is not made again."""
    plan: str
    """Digest of the publication."""
    blobs: Mapping[int, Blob]
    """By number of the object in the publication: those this rank owns."""
    digests: np.ndarray
    """uint64: content digest of each of its regions, in the publication's order of them."""
    patch_bytes: int = -1
    """Of what changed since the version before; -1: that is not known."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Join:
    """Asks to be a member, and says what the process has."""

    member: Member
    placement: Placement
    published: Published | None = None
    """Of a trainer."""
    version: int = -1
    """Of an engine: what it serves; -1: nothing that a group has given it."""
    state: State = "joined"
    aliases: frozenset[str] = frozenset()
    """Of a trainer: names of tensors that are others' storage too. Engines may want them, or not."""


@dataclass(frozen=True)
class Manifest:
    """Where a version is, or is going to be: a snapshot of the model, one copy, spread over the trainers' nodes."""

    version: int
    plan: str
    """Digest of the publication."""
    blobs: tuple[Blob, ...]
    """By number of the object in the publication. Reading one waits until it is written."""

    @property
    def nbytes(self) -> int:
        return sum(blob.nbytes for blob in self.blobs)


@dataclass(frozen=True)
class Contents:
    """What is known of a version when all of it is written."""

    digests: np.ndarray
    """uint64 (regions)."""
    patch_bytes: int
    """Of what changed since the version before; -1: that is not known."""


@dataclass(frozen=True)
class Command:
    """What a member is to do. Carried out one after the other, but for `abort` and what is `told`."""

    number: int
    """Answered under it; -1: not answered."""
    epoch: int
    what: str
    timeout_s: float
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The answer to a command."""

    member: str
    """Its id."""
    number: int
    value: Any = None
    error: WeightSyncError | None = None
