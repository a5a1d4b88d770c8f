"""The actor that takes a group from one version to the next. It moves no weights; members do, and tell it.

It may be killed at any moment: Ray starts it again, members join anew and say what they have, and what was under way is begun anew by whoever
asked for it. What must not be forgotten, the number of the last epoch and the last version, lies in Ray's key-value store.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray._private import state as ray_state
from ray.experimental import internal_kv

from mooncake_ray.errors import ChecksumError, StaleVersionError, SyncAbortedError, SyncTimeoutError, WeightSyncError
from mooncake_ray.objects.blobs import Blob
from mooncake_ray.sync.mailbox import Mailbox, MemberLostError
from mooncake_ray.sync.messages import Command, Join, Manifest, Member, Published, Report
from mooncake_ray.sync.plans import Plans, check
from mooncake_ray.sync.report import EngineStatus, GroupStatus, SyncReport
from mooncake_ray.sync.roster import Roster, Unit
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.weights.plan import Publication

__all__ = ["Coordinator", "Settings"]

logger = logging.getLogger("mooncake_ray")

_SPACE = b"mooncake_ray"
_POLL_S = 5.0
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Settings:
    """Of a group."""

    name: str
    mode: str
    liveness_s: float
    """A member that has not been heard of for so long is taken for dead."""
    bucket_bytes: int
    ignore: tuple[str, ...]
    verify: bool


class Coordinator:
    """An asynchronous actor: one loop, no locks but for updates, of which there is one at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._key = b"sync:" + settings.name.encode()
        self._roster, self._mail, self._plans = Roster(), Mailbox(), Plans(settings.bucket_bytes, settings.ignore)
        self._heard: dict[str, float] = {}
        known = json.loads(internal_kv._internal_kv_get(self._key, namespace=_SPACE) or b"{}")
        self._epoch, self._version = int(known.get("epoch", 0)), int(known.get("version", -1))
        self._operations: dict[str, int] = known.get("operations", {})
        self._manifests: dict[int, Manifest] = {}
        self._updating = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._offers: dict[int, set[int]] = {}
        self._progress: dict[str, Any] = {}
        self._tasks = [asyncio.get_running_loop().create_task(self._watch())] if _running() else []

    # ---- members

    async def join(self, what: Join) -> int:
        """Returns the version the group is at."""
        self._start()
        before = self._roster.join(what)
        if before is not None:
            self._mail.close(before.id, f"{before} was replaced by another process")
        member = what.member
        self._mail.open(member.id)
        self._heard[member.id] = time.monotonic()
        logger.info("mooncake_ray: group %s: %s joined from %s", self._settings.name, member, member.host)
        if member.role == "trainer":
            self._recall()
        await self._notify()
        return self._version

    async def poll(self, id: str) -> list[Command] | None:
        """What that member is to do next; None: it is not known, and must join."""
        self._start()
        self._heard[id] = time.monotonic()
        commands = await self._mail.take(id, _POLL_S)
        self._heard[id] = time.monotonic()
        return commands

    async def answer(self, report: Report) -> None:
        self._mail.answered(report)

    async def leave(self, id: str) -> None:
        if (member := self._roster.by_id(id)) is not None:
            await self._lose(member, "left the group")

    async def staged(self, id: str, epoch: int, unit: int, blob: Any) -> None:
        """A leader has a unit; the others get it from there."""
        if epoch != self._epoch:
            return
        self._progress["bytes"] = self._progress.get("bytes", 0) + blob.nbytes
        for member in self._progress.get("followers", {}).get(unit, ()):
            self._mail.tell(member, epoch, "unit", unit=unit, blob=blob)

    async def _lose(self, member: Member, why: str) -> None:
        logger.warning("mooncake_ray: group %s: %s %s", self._settings.name, member, why)
        self._roster.leave(member)
        self._heard.pop(member.id, None)
        self._mail.close(member.id, f"{member} {why}")
        await self._notify()

    def _start(self) -> None:
        if not self._tasks:
            self._tasks.append(asyncio.get_running_loop().create_task(self._watch()))

    async def _watch(self) -> None:
        """Finds who is dead, and brings who is behind up to the version."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now = time.monotonic()
            for member in self._roster:
                if now - self._heard.get(member.id, now) > self._settings.liveness_s:
                    await self._lose(member, f"was not heard of for {self._settings.liveness_s:g} s")
            actors = [m for m in self._roster if m.actor]
            try:
                dead = await asyncio.get_running_loop().run_in_executor(None, _dead, [m.actor for m in actors])
            except Exception as e:  # Ray's control store is away for a moment
                logger.debug("mooncake_ray: actors cannot be looked up: %s", e)
                continue
            for member, is_dead in zip(actors, dead, strict=True):
                if is_dead and member.id in self._roster:
                    await self._lose(member, "died")
            if not self._updating.locked() and self._behind():
                await self._catch_up()

    # ---- updates

    async def publish(self, version: int | None, operation: str, timeout_s: float) -> int:
        """Has the trainers publish what they hold now; their weights may change afterwards. Returns the version's number."""
        async with self._updating:
            deadline = Deadline(timeout_s)
            number = self._number(version, operation)
            if number not in self._manifests:
                await self._publish(number, deadline)
            return number

    async def offer(self, id: str, version: int | None, timeout_s: float) -> int:
        """As `publish`, asked for by each trainer rank for itself: begins when all have."""
        member = self._roster.by_id(id)
        if member is None:
            raise MemberLostError("this trainer is not in the group any more")
        number = self._latest() + 1 if version is None else version
        self._offers.setdefault(number, set()).add(member.rank)
        deadline = Deadline(timeout_s)
        while True:
            if number in self._manifests:
                self._offers.pop(number, None)
                return number
            missing = set(range(member.world)) - self._offers.get(number, set())
            if not missing and not self._updating.locked():
                await self.publish(number, "", deadline.left(f"version {number}"))
                continue
            await self._wait(deadline, f"version {number}: trainer ranks {sorted(missing)[:5]} have not published")

    async def sync(self, version: int | None, operation: str, mode: str | None, timeout_s: float) -> SyncReport:
        """Publishes a version unless it is, and brings every engine to it."""
        async with self._updating:
            deadline = Deadline(timeout_s)
            number = self._number(version, operation)
            report = SyncReport(number, mode or self._settings.mode)
            if number not in self._manifests:
                begin = time.monotonic()
                await self._publish(number, deadline)
                report.publish_s = time.monotonic() - begin
            engines = [e for e in self._roster.engines.values() if e.whole]
            behind = [e for e in engines if e.version != number]
            await self._deliver(self._manifests[number], behind, report, deadline)
            if not report.engines and behind:
                raise SyncAbortedError(f"version {number}: no engine is left to have it: {report.lost}")
            if number > self._version:
                self._version = number
                self._save()
            self._forget(number)
            await self._notify()
            return report

    def _latest(self) -> int:
        return max([self._version, *self._manifests])

    def _number(self, version: int | None, operation: str) -> int:
        """The version an operation is about. An operation that is asked for again is about the same."""
        if operation in self._operations:
            return self._operations[operation]
        newest = self._latest()
        if version is None:
            number = newest if newest > self._version and newest in self._manifests and operation.startswith("sync") else newest + 1
        elif version < self._version or (version < newest and version not in self._manifests):
            raise StaleVersionError(f"version {version} is not newer than {newest}, the last one of group {self._settings.name}")
        else:
            number = version
        if operation:
            self._operations = dict(list(self._operations.items())[-15:]) | {operation: number}
            self._save()
        return number

    def _save(self) -> None:
        state = {"epoch": self._epoch, "version": self._version, "operations": self._operations}
        internal_kv._internal_kv_put(self._key, json.dumps(state).encode(), overwrite=True, namespace=_SPACE)

    def _next_epoch(self) -> int:
        self._epoch += 1
        self._save()
        return self._epoch

    async def _publish(self, version: int, deadline: Deadline) -> None:
        trainers = self._roster.trainers
        while trainers is None or not trainers.whole:
            there = 0 if trainers is None else len(trainers.joined)
            await self._wait(deadline, f"version {version}: {there} of {trainers.world if trainers else '?'} trainer ranks have joined")
            trainers = self._roster.trainers
        epoch = self._next_epoch()
        members = trainers.members
        origin, plan = await self._in_thread(self._plans.origin, trainers.placement)
        publication = origin.publication
        values, errors = await self._mail.ask(
            members,
            epoch,
            "publish",
            deadline.left("publishing"),
            lambda _: {"version": version, "plan": plan, "digest": publication.digest},
        )
        if errors:
            for member in members:
                self._mail.tell(member, epoch, "withdraw", version=version)
            raise _aborted(f"version {version} was not published", errors)
        self._keep(version, publication, {m.name: v for m, v in values.items()})
        for member, published in values.items():
            self._roster.note(member, published=published)

    def _keep(self, version: int, publication: Publication, parts: Mapping[str, Published]) -> None:
        """Makes the manifest of what each rank has published."""
        blobs: dict[int, Blob] = {}
        digests = np.zeros(len(publication.tensor), np.uint64)
        for rank, part in parts.items():
            blobs.update(part.blobs)
            digests[publication.owner == publication.ranks.index(rank)] = part.digests
        self._manifests[version] = Manifest(version, publication.digest, tuple(blobs[i] for i in range(len(blobs))), digests)

    def _recall(self) -> None:
        """After a restart: the trainers still have what they published."""
        trainers = self._roster.trainers
        if trainers is None or not trainers.whole or self._manifests:
            return
        parts = {join.member.name: join.published for join in trainers.joined.values() if join.published is not None}
        same = {(p.version, p.plan) for p in parts.values()}
        if len(parts) != trainers.world or len(same) != 1:
            return
        version, plan = same.pop()
        origin, _ = self._plans.origin(trainers.placement)
        if origin.publication.digest == plan:
            self._keep(version, origin.publication, parts)

    async def _deliver(self, manifest: Manifest, engines: list[Unit], report: SyncReport, deadline: Deadline) -> None:
        """Stages a version at those engines, and commits it at all that are still there."""
        if not engines:
            return
        epoch = self._next_epoch()
        begin = time.monotonic()
        trainers = self._roster.trainers
        if trainers is None or not trainers.whole:
            raise SyncAbortedError(f"version {manifest.version}: trainers that published it are gone")
        origin, source = self._plans.origin(trainers.placement)
        publication = origin.publication
        if publication.digest != manifest.plan:
            raise StaleVersionError(f"version {manifest.version} was published by trainers of another layout")
        route, plan = await self._in_thread(self._plans.route, publication, [e.placement for e in engines])
        delivery = route.delivery
        report.plan_s = time.monotonic() - begin
        members = {m: e for e in engines for m in e.members}
        by_name = {m.name: m for m in members}
        followers = {
            unit: [by_name[delivery.ranks[r]] for r in delivery.members(unit) if r != delivery.leader[unit]]
            for unit in range(delivery.units)
        }
        self._progress = {"version": manifest.version, "bytes": 0, "total": int(delivery.unit_nbytes.sum()), "followers": followers}
        begin = time.monotonic()
        try:
            prepared, errors = await self._mail.ask(
                members,
                epoch,
                "stage",
                deadline.left("staging"),
                lambda _: {"manifest": manifest, "origin": source, "route": plan, "digest": delivery.digest},
            )
            report.stage_s = time.monotonic() - begin
            lost = {members[m].name: str(e) for m, e in errors.items() if isinstance(e, MemberLostError)}
            failed = {m: e for m, e in errors.items() if members[m].name not in lost}
            if failed:
                raise _aborted(f"version {manifest.version} was not staged", failed)
            ready = [e for e in engines if e.name not in lost]
            if self._settings.verify:
                staged = {m.name: v for m, v in prepared.items()}
                for engine in ready:
                    check(publication, route, manifest.digests, staged, [m.name for m in engine.members])
        except WeightSyncError:
            for member in members:
                self._mail.tell(member, epoch, "abort")
            raise
        report.lost.update(lost)
        await self._commit(manifest.version, ready, members, epoch, report, deadline)

    async def _commit(
        self, version: int, engines: list[Unit], members: Mapping[Member, Unit], epoch: int, report: SyncReport, deadline: Deadline
    ) -> None:
        """Every rank of an engine applies; the engine serves again when all of them have."""
        begin = time.monotonic()
        ready = [m for m, e in members.items() if e in engines]
        for member in members:
            if member not in ready:
                self._mail.tell(member, epoch, "abort")
        values, errors = await self._mail.ask(ready, epoch, "commit", deadline.left("the commit"), lambda _: {"version": version})
        bad = {members[m].name: str(e) for m, e in errors.items()}
        for member in errors:
            self._roster.note(member, state="poisoned")
        good = [e for e in engines if e.name not in bad]
        resume = [m for m in ready if members[m] in good]
        _, errors = await self._mail.ask(resume, epoch, "resume", deadline.left("resuming"))
        bad.update((members[m].name, str(e)) for m, e in errors.items())
        for member in resume:
            if members[member].name not in bad:
                self._roster.note(member, version=version, state="serving")
        report.commit_s = time.monotonic() - begin
        report.pause_s = max((v for v in values.values()), default=0.0)
        report.lost.update(bad)
        report.engines += [e.name for e in good if e.name not in bad]
        report.nbytes += self._progress.get("total", 0)

    def _behind(self) -> list[Unit]:
        """Engines that are not at the group's version, and can be."""
        if self._version not in self._manifests:
            return []
        return [e for e in self._roster.engines.values() if e.whole and e.version != self._version]

    async def _catch_up(self) -> None:
        async with self._updating:
            for engine in self._behind():
                report = SyncReport(self._version, "p2p")
                try:
                    await self._deliver(self._manifests[self._version], [engine], report, Deadline(_CATCH_UP_S))
                    logger.info("mooncake_ray: group %s: %s is at version %d now", self._settings.name, engine.name, self._version)
                except (WeightSyncError, TimeoutError) as e:
                    logger.warning("mooncake_ray: group %s: %s stays behind: %s", self._settings.name, engine.name, e)
            await self._notify()

    def _forget(self, version: int) -> None:
        """Older versions are of no use to anybody."""
        for old in [v for v in self._manifests if v < version]:
            del self._manifests[old]
        for member in self._roster.trainers.members if self._roster.trainers else ():
            self._mail.tell(member, self._epoch, "forget", before=version)

    # ---- looking

    async def status(self) -> GroupStatus:
        return GroupStatus(
            version=self._version,
            published=self._latest(),
            epoch=self._epoch,
            trainers=0 if self._roster.trainers is None else len(self._roster.trainers.joined),
            engines={e.name: EngineStatus(e.version, e.state, len(e.joined), e.world) for e in self._roster.engines.values()},
            moved_bytes=int(self._progress.get("bytes", 0)),
            total_bytes=int(self._progress.get("total", 0)),
        )

    async def wait_for(self, version: int, engines: list[str] | None, timeout_s: float) -> int:
        """Until those engines (all that there are) serve that version, or a newer one. Returns the oldest that one of them serves."""
        deadline = Deadline(timeout_s)
        while True:
            there = self._roster.engines
            wanted = list(there) if engines is None else engines
            versions = {name: there[name].version if name in there else -1 for name in wanted}
            if versions and min(versions.values()) >= version:
                return min(versions.values())
            behind = {name: v for name, v in versions.items() if v < version}
            await self._wait(deadline, f"version {version}: engines behind (and at): {dict(list(behind.items())[:5]) or 'there are none'}")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, deadline: Deadline, what: str) -> None:
        """Until something changed. Raises SyncTimeoutError."""
        left = deadline.at - time.monotonic()
        if left <= 0:
            raise SyncTimeoutError(f"{what} within {deadline.timeout_s:g} s")
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, 1.0))

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


_CATCH_UP_S = 300.0


def _running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _dead(actors: list[str]) -> list[bool]:
    return [ray_state.actors(actor).get("State") == "DEAD" for actor in actors]


def _aborted(what: str, errors: Mapping[Member, WeightSyncError]) -> WeightSyncError:
    """One error for those of several members, of the kind they have in common."""
    text = "; ".join(f"{m}: {e}" for m, e in list(errors.items())[:3])
    kinds = {type(e) for e in errors.values()}
    kind = kinds.pop() if len(kinds) == 1 else SyncAbortedError
    if kind not in (ChecksumError, SyncTimeoutError, StaleVersionError):
        kind = SyncAbortedError
    return kind(f"{what} ({len(errors)} ranks): {text}")
