"""`GET /v1/overview`: versions, receivers, transfers and pools at a glance. Put together from plain data, so that it can be tested as such."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from mooncake_ray.serve.fill import NodePool
from mooncake_ray.serve.overview_model import (
    Group,
    Node,
    Outcome,
    Overview,
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

router = APIRouter(prefix="/v1", tags=["overview"])


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
    nbytes: int
    age_s: float
    pins: tuple[str, ...]


def assemble(
    time: float,
    name: str | None,
    group: GroupStatus | None,
    store: Iterable[StoredVersion],
    nodes: Iterable[NodePool],
    shortfalls: Sequence[Shortfall],
) -> Overview:
    """
    Args:
        time: Now; seconds since 1970.
        name: Of the group; None: there is none.
    """
    return Overview(
        time=time,
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
        name=name, state="gone", why=gone.why, version=_known(gone.version), behind=None, stale_s=None, since_s=gone.ago_s,
        silent_s=gone.ago_s, ranks=0, world=0, hosts=[],
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
        nbytes=stored.nbytes if stored is not None else published.nbytes if published is not None else None,
        age_s=published.ago_s if published is not None and published.ago_s is not None else stored.age_s if stored is not None else None,
        places=[*(["pool"] if published is not None and published.kept else []), *(["store"] if stored is not None else [])],
        pins=[] if stored is None else list(stored.pins),
        receivers=served.get(n, []),
    )


def _node(n: NodePool) -> Node:
    s = n.pool
    if s is None:
        return Node(host=n.host, node=n.node, error=n.error)
    return Node(
        host=n.host, node=n.node, error=n.error, capacity_bytes=s.capacity_bytes, used_bytes=s.used_bytes, pinned_bytes=s.pinned_bytes,
        clean_bytes=s.clean_bytes, spilled_bytes=s.spilled_bytes, objects=s.objects, processes=len({x.pid for x in s.sessions}),
        waiting=s.waiting, spill_error=s.spill_error,
    )  # fmt: skip
