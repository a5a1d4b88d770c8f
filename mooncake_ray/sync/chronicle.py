"""`Chronicle`: what a group is doing and what it has done lately, for those who look at it. Nothing is decided by it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from mooncake_ray.sync.messages import Contents
from mooncake_ray.sync.report import Departed, EngineStatus, GroupStatus, Outcome, Phase, SyncReport, Update, VersionStatus, What
from mooncake_ray.sync.roster import Roster, Unit
from mooncake_ray.sync.versions import Edition, Versions

__all__ = ["Chronicle"]

_OUTCOMES = 16
_VERSIONS = 64
_DEPARTED = 16


@dataclass
class _UnderWay:
    """An update."""

    what: What
    report: SyncReport
    begin: float
    phase: Phase = "waiting"
    engines: tuple[str, ...] = ()
    staging: float | None = None
    """When it began; None: it has not."""


class Chronicle:
    """For coroutines of one loop. Forgotten when the coordinator is restarted: what is told is then "not known", never something wrong."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, rising."""
        self._clock = clock
        self._published: dict[int, tuple[float, int]] = {}  # when, and bytes, by version
        self._served: dict[str, tuple[int, float]] = {}  # version, and since when, by engine
        self._departed: dict[str, tuple[float, str, int]] = {}
        self._outcomes: deque[tuple[float, Outcome]] = deque(maxlen=_OUTCOMES)
        self._under_way: _UnderWay | None = None

    # ---- what happens

    @contextmanager
    def update(self, what: What, report: SyncReport) -> Iterator[None]:
        """Around an update; the report is looked at while it is filled in. One at a time."""
        begin = self._clock()
        self._under_way = _UnderWay(what, report, begin)
        error = "was given up"
        try:
            yield
            error = ""
        except Exception as e:
            error = str(e) or type(e).__name__
            raise
        finally:
            self._under_way = None
            if what != "publish" or error:
                self._outcomes.appendleft((self._clock(), Outcome(what, report, error, self._clock() - begin, 0.0)))

    def enter(self, phase: Phase, engines: Iterable[str] | None = None) -> None:
        """The update has come so far, for these engines (by default the same as before)."""
        if (update := self._under_way) is None:
            return
        update.phase = phase
        if engines is not None:
            update.engines = tuple(engines)
        if phase == "staging":
            update.staging = self._clock()

    def writing(self, edition: Edition) -> None:
        """A version is being published: it is once all of it is written."""

        def written(contents: asyncio.Future[Contents]) -> None:
            if _is_written(contents):
                self.published(edition.manifest.version, edition.manifest.nbytes)

        edition.contents.add_done_callback(written)

    def published(self, version: int, nbytes: int) -> None:
        """All of a version is written."""
        self._published.setdefault(version, (self._clock(), nbytes))
        for old in sorted(self._published)[:-_VERSIONS]:
            del self._published[old]

    def serves(self, engines: Iterable[str], version: int) -> None:
        """From now on."""
        self._served |= dict.fromkeys(engines, (version, self._clock()))

    def joined(self, engine: str) -> None:
        self._departed.pop(engine, None)

    def left(self, engine: str, why: str) -> None:
        """None of its ranks is there any more. `why`: "" if it wanted that."""
        version, _ = self._served.pop(engine, (-1, 0.0))
        self._departed.pop(engine, None)  # so that it is the last
        self._departed[engine] = self._clock(), why, version
        while len(self._departed) > _DEPARTED:
            del self._departed[next(iter(self._departed))]

    # ---- what is told

    def status(self, roster: Roster, versions: Versions, heard: Mapping[str, float], moved_bytes: int, total_bytes: int) -> GroupStatus:
        """
        Args:
            heard: When each member was heard of, by id and this clock.
            moved_bytes, total_bytes: Of what is staged, or was last.
        """
        now, trainers = self._clock(), roster.trainers
        kept = {v: e.manifest.nbytes for v, e in versions.editions.items() if _is_written(e.contents)}
        newest = max(kept, default=-1)
        return GroupStatus(
            version=versions.current,
            published=newest,
            epoch=versions.epoch,
            trainers=0 if trainers is None else len(trainers.joined),
            engines={
                e.name: self._engine(now, e, newest, min([now, *(heard.get(m.id, now) for m in e.members)]))
                for e in roster.engines.values()
            },
            moved_bytes=moved_bytes,
            total_bytes=total_bytes,
            trainer_world=0 if trainers is None else trainers.world,
            trainer_hosts=() if trainers is None else _hosts(trainers),
            update=self._update(now, moved_bytes, total_bytes),
            outcomes=tuple(replace(o, ago_s=now - at) for at, o in self._outcomes),
            versions=self._versions(now, kept),
            departed={name: Departed(why, now - at, version) for name, (at, why, version) in self._departed.items()},
        )

    def _update(self, now: float, moved_bytes: int, total_bytes: int) -> Update | None:
        if (u := self._under_way) is None:
            return None
        staged = u.staging is not None and u.phase in ("staging", "verifying", "committing")
        moved, total, stage_s = (moved_bytes, total_bytes, now - u.staging) if staged else (0, 0, 0.0)
        return Update(u.what, u.report.version, u.report.mode, u.phase, u.engines, moved, total, now - u.begin, stage_s)

    def _versions(self, now: float, kept: Mapping[int, int]) -> tuple[VersionStatus, ...]:
        told = {v: VersionStatus(v, nbytes, now - at, v in kept) for v, (at, nbytes) in self._published.items()}
        told |= {v: VersionStatus(v, nbytes, None, True) for v, nbytes in kept.items() if v not in told}
        return tuple(told[v] for v in sorted(told, reverse=True))

    def _engine(self, now: float, unit: Unit, newest: int, heard: float) -> EngineStatus:
        """`newest`: the newest version all of which is published. `heard`: when the rank was heard of that was not for the longest time."""
        version, since = self._served.get(unit.name, (-1, None))
        newer = [at for v, (at, _) in self._published.items() if v > unit.version]
        behind = max(len(newer), int(newest > unit.version))
        return EngineStatus(
            unit.version,
            unit.state,
            len(unit.joined),
            unit.world,
            _hosts(unit),
            now - since if since is not None and version == unit.version else None,
            behind,
            0.0 if not behind else now - min(newer) if newer else None,
            now - heard,
        )


def _is_written(contents: asyncio.Future[Contents]) -> bool:
    return contents.done() and not contents.cancelled() and contents.exception() is None


def _hosts(unit: Unit) -> tuple[str, ...]:
    return tuple(dict.fromkeys(m.host for m in unit.members))
