"""What a broker tells about its pool, as typed values.

`Snapshot.parse` reads the JSON text of `Client.stats()` or `Client.inspect()`. Fields with a default here are those that only the latter has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

__all__ = ["Arena", "Claim", "Group", "ObjectRow", "Pin", "Session", "Snapshot"]

T = TypeVar("T")


def _many(cls: type, **default: Any) -> Any:
    """A field that is a list of objects in JSON, and a tuple of `cls` here."""
    return field(metadata={"of": cls}, **default)


@dataclass(frozen=True, slots=True)
class Arena:
    """One range of shared memory. `largest_free_bytes` is what can be had in one piece at once."""

    index: int
    size_bytes: int
    populated_bytes: int
    used_bytes: int
    largest_free_bytes: int
    huge_pages: str
    numa_node: int


@dataclass(frozen=True, slots=True)
class Group:
    """Sessions that share a quota; a Ray job is one. `quota_bytes` 0: none."""

    name: str
    resident_bytes: int
    quota_bytes: int


@dataclass(frozen=True, slots=True)
class Session:
    """One process that uses the pool. `leases`, `pins` and `claims` are counts."""

    session: int
    pid: int
    label: str
    listens: bool
    leases: int
    pins: int
    claims: int
    group: str
    age_s: float
    leased_bytes: int = 0
    pinned_bytes: int = 0
    owned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pin:
    """How often a session has an object mapped."""

    session: int
    count: int


@dataclass(frozen=True, slots=True)
class Claim:
    """Why an object is kept: for a `token` or a `return` of Ray's, or for its maker's own `self`. `owner` 0: nobody has answered for it."""

    kind: str
    key: str
    owner: int


@dataclass(frozen=True, slots=True)
class ObjectRow:
    """One object. `note` says where it was put, if its maker knew."""

    id: str
    size: int
    state: str
    clean: bool
    age_s: float
    creator: int
    creator_pid: int
    creator_label: str
    group: str
    note: str
    pins: tuple[Pin, ...] = _many(Pin)
    claims: tuple[Claim, ...] = _many(Claim)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pool at one moment."""

    capacity_bytes: int
    populated_bytes: int
    used_bytes: int
    inline_bytes: int
    free_pages: int
    objects: int
    removed_but_pinned: int
    pinned_bytes: int
    leases: int
    pins: int
    claims: int
    claims_unanswered: int
    orphans: int
    puts: int
    gets: int
    bytes_put: int
    reaped_sessions: int
    reaped_leases: int
    reaped_pins: int
    orphans_dropped: int
    spilled_bytes: int
    spilled_objects: int
    disk_bytes: int
    clean_bytes: int
    spill_written_bytes: int
    spill_read_bytes: int
    served_from_disk: int
    spill_error: str
    spill_dir: str
    waiting_creates: int
    waiting_gets: int
    waiting_waits: int
    oldest_wait_s: float
    uptime_s: float
    generation: int
    protocol: int
    pid: int
    first_listener: int
    arenas: tuple[Arena, ...] = _many(Arena)
    groups: tuple[Group, ...] = _many(Group)
    sessions: tuple[Session, ...] = _many(Session)
    object_rows: tuple[ObjectRow, ...] = _many(ObjectRow, default=())

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """From the broker's JSON."""
        return cls.of(json.loads(text))

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> Snapshot:
        """From what that JSON holds."""
        return _read(cls, stats)

    @property
    def waiting(self) -> int:
        """Requests that wait for room, for an object, or for several."""
        return self.waiting_creates + self.waiting_gets + self.waiting_waits


def _read(cls: type[T], row: Mapping[str, Any]) -> T:
    values = {}
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name in row or f.default is MISSING:
            of = f.metadata.get("of")
            values[f.name] = tuple(_read(of, r) for r in row[f.name]) if of else row[f.name]
    return cls(**values)
