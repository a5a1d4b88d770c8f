"""`GET /v1/overview`: versions, receivers, transfers and pools at a glance. Put together from plain data, so that it can be tested as such."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fastapi import APIRouter, Depends, Request, Response

from mooncake_ray.serve.access import may_read, problems
from mooncake_ray.serve.fill import NodePool
from mooncake_ray.serve.overview_model import (
    Group,
    Node,
    Outcome,
    Overview,
    Pin,
    Receiver,
    ReceiverState,
    Shortfall,
    Trainers,
    Transfer,
    Version,
)
from mooncake_ray.sync import report
from mooncake_ray.sync.report import GroupStatus

__all__ = ["StoredVersion", "assemble", "router"]

T = TypeVar("T")

router = APIRouter(prefix="/v1", tags=["overview"], dependencies=[Depends(may_read)], responses=problems(401, 403, 500, 503))


@router.get("/overview")
async def overview(request: Request, response: Response) -> Overview:
    """Versions, receivers and their versions, transfers that are under way, and how full each node's pool is. At most half a second old; what
    could not be asked for in time is told under `shortfalls`."""
    response.headers["Cache-Control"] = "no-store"
    return await asyncio.wrap_future(request.app.state.lookout.look())


@dataclass(frozen=True)
class StoredVersion:
    """In the endpoint's store."""

    version: int
    whole: bool
    """Else deltas lead to it."""
    nbytes: int | None = None
    """Of its files, if it is whole."""
    age_s: float | None = None
    pins: tuple[Pin, ...] = ()
    readers: int = 0


def assemble(
    time: float,
    replica: str,
    name: str | None,
    group: GroupStatus | None,
    store: Iterable[StoredVersion],
    nodes: Iterable[NodePool],
    shortfalls: Sequence[Shortfall],
) -> Overview:
    """
    Args:
        time: Now; seconds since 1970.
        replica: That tells it.
        name: Of the group; None: there is none.
    """
    return Overview(
        time=time,
        replica=replica,
        group=None if name is None or group is None else _group(name, group),
        versions=_versions(group, store),
        nodes=sorted(map(_node, nodes), key=lambda n: n.host),
        shortfalls=list(shortfalls),
    )


def _group(name: str, status: GroupStatus) -> Group:
    receivers = [_receiver(name, e) for name, e in sorted(status.engines.items())]
    stale = [r.stale_s for r in receivers]
    return Group(
        name=name,
        version=_known(status.version),
        published=_known(status.published),
        behind=max((r.behind or 0 for r in receivers), default=0),
        stale_s=None if None in stale else max((s for s in stale if s is not None), default=0.0),
        trainers=Trainers(ranks=status.trainers, world=status.trainer_world, hosts=list(status.trainer_hosts)),
        receivers=receivers + [_gone(name, gone) for name, gone in sorted(status.departed.items())],
        transfers=[] if status.update is None else [_transfer(status.update)],
        outcomes=[_outcome(o) for o in status.outcomes],
    )


def _known(version: int) -> int | None:
    return None if version < 0 else version


def _receiver(name: str, e: report.EngineStatus) -> Receiver:
    state: ReceiverState = "incomplete" if e.ranks < e.world and e.state != "poisoned" else e.state
    return Receiver(
        name=name, state=state, why="", version=_known(e.version), behind=e.behind, stale_s=e.stale_s, since_s=e.since_s,
        silent_s=e.silent_s, ranks=e.ranks, world=e.world, hosts=list(e.hosts),
    )  # fmt: skip


def _gone(name: str, gone: report.Departed) -> Receiver:
    return Receiver(
        name=name, state="gone" if gone.why else "left", why=gone.why, version=_known(gone.version), behind=None, stale_s=None,
        since_s=gone.ago_s, silent_s=gone.ago_s, ranks=0, world=0, hosts=[],
    )  # fmt: skip


def _transfer(u: report.Update) -> Transfer:
    rate = u.moved_bytes / u.stage_s if u.stage_s > 0 else None
    return Transfer(
        what=u.what, version=u.version, mode=u.mode, phase=u.phase, receivers=sorted(u.engines), moved_bytes=u.moved_bytes,
        total_bytes=u.total_bytes, bytes_per_s=rate, seconds=u.seconds,
    )  # fmt: skip


def _outcome(o: report.Outcome) -> Outcome:
    r = o.report
    return Outcome(
        what=o.what, version=r.version, mode=r.mode, error=o.error, ago_s=o.ago_s, seconds=o.seconds, pause_s=r.pause_s, nbytes=r.nbytes,
        receivers=sorted(r.engines), lost=dict(r.lost), fallbacks=list(r.fallbacks),
    )  # fmt: skip


def _versions(group: GroupStatus | None, store: Iterable[StoredVersion]) -> list[Version]:
    """Those that there are, that somebody serves, or that were published lately."""
    published = {} if group is None else {v.version: v for v in group.versions}
    stored = {v.version: v for v in store}
    served: dict[int, list[str]] = {}
    for name, e in sorted(({} if group is None else group.engines).items()):
        if e.version >= 0:
            served.setdefault(e.version, []).append(name)
    return [_version(n, published.get(n), stored.get(n), served) for n in sorted({*published, *stored, *served}, reverse=True)]


def _version(n: int, published: report.VersionStatus | None, stored: StoredVersion | None, served: Mapping[int, list[str]]) -> Version:
    return Version(
        version=n,
        nbytes=_first(stored and stored.nbytes, published and published.nbytes),
        age_s=_first(published and published.ago_s, stored and stored.age_s),
        places=[
            *(["pool"] if published is not None and published.kept else []),
            *([] if stored is None else ["store"] if stored.whole else ["deltas"]),
        ],
        pins=[] if stored is None else list(stored.pins),
        readers=0 if stored is None else stored.readers,
        receivers=served.get(n, []),
    )


def _first(*values: T | None) -> T | None:
    return next((v for v in values if v is not None), None)


def _node(n: NodePool) -> Node:
    s = n.pool
    if s is None:
        return Node(host=n.host, node=n.node, error=n.error)
    return Node(
        host=n.host, node=n.node, error=n.error, capacity_bytes=s.capacity_bytes, used_bytes=s.used_bytes, pinned_bytes=s.pinned_bytes,
        clean_bytes=s.clean_bytes, spilled_bytes=s.spilled_bytes, objects=s.objects, processes=len({x.pid for x in s.sessions}),
        waiting=s.waiting, spill_error=s.spill_error,
    )  # fmt: skip
