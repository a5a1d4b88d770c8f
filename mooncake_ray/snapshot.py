"""What a broker tells about its pool, as typed values.

`Snapshot.parse` reads the JSON text of `Client.stats()` or `Client.inspect()`. A field that the broker did not send has its default, so that
a broker of another version can be looked at too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

__all__ = ["Arena", "Claim", "Group", "ObjectRow", "Pin", "Session", "Snapshot"]

T = TypeVar("T")


def _many(cls: type) -> Any:
    """A field that is a list of objects in JSON, and a tuple of `cls` here."""
    return field(default=(), metadata={"of": cls})


@dataclass(frozen=True, slots=True)
class Arena:
    """One range of shared memory. `largest_free_bytes` is what can be had in one piece at once."""

    index: int = 0
    size_bytes: int = 0
    populated_bytes: int = 0
    used_bytes: int = 0
    largest_free_bytes: int = 0
    huge_pages: str = ""
    numa_node: int = -1


@dataclass(frozen=True, slots=True)
class Group:
    """Sessions that share a quota; a Ray job is one. `quota_bytes` 0: none."""

    name: str = ""
    resident_bytes: int = 0
    quota_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Session:
    """One process that uses the pool. `leases`, `pins` and `claims` are counts."""

    session: int = 0
    pid: int = 0
    label: str = ""
    listens: bool = False
    leases: int = 0
    pins: int = 0
    claims: int = 0
    group: str = ""
    age_s: float = 0.0
    leased_bytes: int = 0
    pinned_bytes: int = 0
    owned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pin:
    """How often a session has an object mapped."""

    session: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """Why an object is kept: for a `token` or a `return` of Ray's, or for its maker's own `self`. `owner` 0: nobody has answered for it."""

    kind: str = ""
    key: str = ""
    owner: int = 0


@dataclass(frozen=True, slots=True)
class ObjectRow:
    """One object. `note` says where it was put, if its maker knew."""

    id: str = ""
    size: int = 0
    state: str = ""
    clean: bool = False
    age_s: float = 0.0
    creator: int = 0
    creator_pid: int = 0
    creator_label: str = ""
    group: str = ""
    note: str = ""
    pins: tuple[Pin, ...] = _many(Pin)
    claims: tuple[Claim, ...] = _many(Claim)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pool at one moment."""

    capacity_bytes: int = 0
    populated_bytes: int = 0
    used_bytes: int = 0
    inline_bytes: int = 0
    free_pages: int = 0
    objects: int = 0
    removed_but_pinned: int = 0
    pinned_bytes: int = 0
    leases: int = 0
    pins: int = 0
    claims: int = 0
    claims_unanswered: int = 0
    orphans: int = 0
    puts: int = 0
    gets: int = 0
    bytes_put: int = 0
    reaped_sessions: int = 0
    reaped_leases: int = 0
    reaped_pins: int = 0
    orphans_dropped: int = 0
    spilled_bytes: int = 0
    spilled_objects: int = 0
    disk_bytes: int = 0
    clean_bytes: int = 0
    spill_written_bytes: int = 0
    spill_read_bytes: int = 0
    served_from_disk: int = 0
    spill_error: str = ""
    spill_dir: str = ""
    waiting_creates: int = 0
    waiting_gets: int = 0
    waiting_waits: int = 0
    oldest_wait_s: float = 0.0
    uptime_s: float = 0.0
    generation: int = 0
    version: str = ""
    protocol: int = 0
    pid: int = 0
    first_listener: int = 0
    arenas: tuple[Arena, ...] = _many(Arena)
    groups: tuple[Group, ...] = _many(Group)
    sessions: tuple[Session, ...] = _many(Session)
    object_rows: tuple[ObjectRow, ...] = _many(ObjectRow)
    has_object_rows: bool = False

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """From the broker's JSON."""
        row = json.loads(text)
        return _read(cls, {**row, "has_object_rows": "object_rows" in row})

    @property
    def waiting(self) -> int:
        """Requests that wait for room, for an object, or for several."""
        return self.waiting_creates + self.waiting_gets + self.waiting_waits

    def exporter(self) -> int:
        """The session that exports the node's gauges: one a pool, chosen by the broker, else the first that listens. 0: none."""
        return self.first_listener or min((s.session for s in self.sessions if s.listens), default=0)


def _read(cls: type[T], row: Mapping[str, Any]) -> T:
    values = {}
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name in row:
            of = f.metadata.get("of")
            values[f.name] = tuple(_read(of, r) for r in row[f.name]) if of else row[f.name]
    return cls(**values)
