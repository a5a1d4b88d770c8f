"""Finds the pools of this user on this node, and asks their brokers, leaving them as they are.

A broker's socket is in the abstract namespace, so the kernel lists it, and with it every connection that the broker has accepted. A pool
that nobody is connected to is about to end, and is not asked: a session, however short, would start its time to linger anew.

The node service of a pool, where there is one, has such a socket too, of another type.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mooncake_ray.errors import StoreError
from mooncake_ray.snapshot import Snapshot

__all__ = ["PoolName", "Reading", "fill", "listed", "parse_sockets", "read"]

_SOCKETS = "/proc/net/unix"
_RAY_TITLE = "ray::"
_LISTENS = 1 << 16  # __SO_ACCEPTCON among a row's flags
_BROKERS_TYPE = 5  # SOCK_SEQPACKET
_DOOR = "/engine"
_SERVICE_S = 5.0


@dataclass(frozen=True, slots=True)
class PoolName:
    """A pool that has a broker. `connections`: sockets that its broker has accepted. `served`: there is a node service."""

    name: str
    scope: str
    connections: int
    served: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """What one look at a pool gave: the broker's JSON; or none, because nobody is connected, or because of `error`.

    `service`: what the node service said of itself (`transfer.engine.Engine.report`); or none, as there is none or because of `service_error`.
    """

    pool: PoolName
    text: str = ""
    error: str = ""
    observer: int = 0  # the session that asked
    titles: Mapping[int, str] = field(default_factory=dict)  # what processes call themselves now, by pid, where that says more
    service: Mapping[str, Any] | None = None
    service_error: str = ""

    @property
    def snapshot(self) -> Snapshot | None:
        if not self.text:
            return None
        s = Snapshot.parse(self.text)
        return replace(s, sessions=tuple(replace(x, label=self.titles.get(x.pid, x.label)) for x in s.sessions))


def parse_sockets(lines: Iterable[str], uid: int) -> list[PoolName]:
    """The pools of a user among the rows of /proc/net/unix, by scope."""
    prefix = f"@mooncake_ray/{uid}/"
    listening: set[str] = set()
    doors: set[str] = set()
    accepted: dict[str, int] = {}
    for line in lines:
        cells = line.rstrip("\n").split(None, 7)
        if len(cells) < 8 or not cells[7].startswith(prefix):
            continue
        path = cells[7]
        if int(cells[4], 16) != _BROKERS_TYPE:
            if path.endswith(_DOOR) and int(cells[3], 16) & _LISTENS:
                doors.add(path.removesuffix(_DOOR))
        elif int(cells[3], 16) & _LISTENS:
            listening.add(path)
        else:
            accepted[path] = accepted.get(path, 0) + 1
    return [PoolName(path[1:], path.removeprefix(prefix), accepted.get(path, 0), path in doors) for path in sorted(listening)]


def listed(scope: str | None = None) -> list[PoolName]:
    """The pools of this user that have a broker now; only the one of that scope, if one is given."""
    with open(_SOCKETS, errors="surrogateescape") as f:
        found = parse_sockets(f, os.geteuid())
    return [p for p in found if scope is None or p.scope == scope]


def title_of(pid: int) -> str:
    """What Ray has a worker call itself, such as `ray::Trainer.step`; "" for other processes."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    title = line.rstrip(b"\0 ").decode(errors="replace")
    return title if title.startswith(_RAY_TITLE) else ""


def read(pool: PoolName, command: str) -> Reading | None:
    """Asks a broker all it can tell, as an observer called `command`. None if the pool has ended meanwhile."""
    if not pool.connections:
        return Reading(pool)
    from mooncake_ray._native.pool import Client

    try:
        client = Client.connect(pool.name, command)
    except StoreError as e:
        return Reading(pool, error=str(e)) if listed(pool.scope) else None
    try:
        text = client.inspect()
        pids = {s.pid for s in Snapshot.parse(text).sessions}
        titles = {pid: title for pid in pids if (title := title_of(pid))}
        return replace(_service(pool), text=text, observer=client.session, titles=titles)
    except StoreError as e:
        return Reading(pool, error=str(e)) if listed(pool.scope) else None
    finally:
        client.close()


def fill(pool: PoolName, command: str) -> Snapshot | None:
    """As `read`, without a row for each object. None if nobody uses the pool, or it has ended meanwhile. Raises StoreError."""
    if not pool.connections:
        return None
    from mooncake_ray._native.pool import Client

    try:
        client = Client.connect(pool.name, command)
        try:
            return Snapshot.parse(client.stats())
        finally:
            client.close()
    except StoreError:
        if listed(pool.scope):
            raise
        return None


def _service(pool: PoolName) -> Reading:
    if not pool.served:
        return Reading(pool)
    from mooncake_ray.transfer.door import Door, door_name

    try:
        return Reading(pool, service=Door(door_name(pool.name)).report(_SERVICE_S))
    except (StoreError, OSError) as e:
        return Reading(pool, service_error=str(e))
