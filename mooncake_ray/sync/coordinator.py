"""The actor that takes a group from one version to the next. It moves no weights; members do, and tell it.

It may be killed at any moment: Ray starts it again, members join anew and say what they have, and what was under way is begun anew by whoever
asked for it. What must not be forgotten, the numbers of the last epoch and version, lies in Ray's key-value store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from mooncake_ray.counters import count, took
from mooncake_ray.errors import SyncAbortedError, SyncTimeoutError, WeightSyncError
from mooncake_ray.objects.blobs import Blob
from mooncake_ray.sync import lives
from mooncake_ray.sync.choice import Choice
from mooncake_ray.sync.choice import check as check_mode
from mooncake_ray.sync.chronicle import Chronicle
from mooncake_ray.sync.courier import Courier
from mooncake_ray.sync.mailbox import Mailbox, MemberLostError
from mooncake_ray.sync.messages import Command, Join, Member, Report
from mooncake_ray.sync.offers import Offers
from mooncake_ray.sync.plans import Plans
from mooncake_ray.sync.report import GroupStatus, SyncReport
from mooncake_ray.sync.roster import Roster, Unit
from mooncake_ray.sync.versions import Versions
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.weights.meta import ParamMeta

__all__ = ["Coordinator", "Settings"]

logger = logging.getLogger("mooncake_ray")

_POLL_S = 5.0
_LOOK_EVERY_S = 0.5
_CATCH_UP_S = 300.0
_END_S = 5.0
_LEFT = "left the group"


@dataclass(frozen=True)
class Settings:
    """Of a group."""

    name: str
    job: str
    mode: str
    liveness_s: float
    """A member that has not been heard of for so long is taken for dead."""
    bucket_bytes: int
    ignore: tuple[str, ...]
    verify: bool


class Coordinator:
    """An asynchronous actor: one loop, and one update at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._roster, self._mail = Roster(), Mailbox()
        self._chronicle = Chronicle()
        plans = Plans(settings.bucket_bytes, settings.ignore)
        self._courier = Courier(self._mail, self._roster, plans, settings.verify, self._chronicle.enter)
        self._choice = Choice(settings.mode)
        self._heard: dict[str, float] = {}
        self._versions = Versions(settings.name, settings.job)
        self._expected = set(self._versions.engines)  # that were there before a restart, and have not joined again
        self._patience = time.monotonic() + settings.liveness_s
        self._updating = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._offers = Offers(self._wait)
        self._watcher: asyncio.Task[None] | None = None

    # ---- members

    async def join(self, what: Join) -> int:
        """Returns the version the group is at."""
        self._watch_from_now_on()
        before = self._roster.join(what)
        if before is not None:
            self._heard.pop(before.id, None)
            self._mail.close(before.id, f"{before} was replaced by another process")
            self._courier.lost(before.id)
        member = what.member
        self._mail.open(member.id)
        self._heard[member.id] = time.monotonic()
        logger.info("mooncake_ray: group %s: %s joined from %s", self._settings.name, member, member.host)
        trainers = self._roster.trainers
        if (
            trainers is not None
            and trainers.whole
            and not self._versions.editions
            and (edition := await self._courier.recall(trainers)) is not None
        ):
            self._versions.editions.setdefault(edition.manifest.version, edition)
        if member.role == "engine":
            self._chronicle.joined(member.unit)
            self._versions.remember({*self._roster.engines, *self._expected})
        await self._notify()
        return self._versions.current

    async def poll(self, id: str) -> list[Command] | None:
        """What that member is to do next; None: it is not known, and must join."""
        self._heard[id] = time.monotonic()
        commands = await self._mail.take(id, min(_POLL_S, self._settings.liveness_s / 4))
        if id in self._roster:
            self._heard[id] = time.monotonic()
        return commands

    async def answer(self, report: Report) -> None:
        self._mail.answered(report)

    async def leave(self, id: str) -> None:
        if (member := self._roster.by_id(id)) is not None:
            await self._lose(member, _LEFT)

    async def end(self) -> None:
        """Has every member leave, and forgets the group. The actor is killed after that."""
        self._mail.tell_all(list(self._roster), self._versions.epoch, "end")
        self._versions.forget()
        deadline = time.monotonic() + _END_S
        while self._heard and time.monotonic() < deadline:
            with contextlib.suppress(SyncTimeoutError):
                await self._wait(Deadline(_END_S), "the end")

    async def reserved(self, id: str, epoch: int, blobs: Mapping[int, Blob]) -> None:
        self._courier.reserved(id, epoch, blobs)

    async def staged(self, id: str, epoch: int, unit: int, blob: Blob) -> None:
        self._courier.staged(id, epoch, unit, blob)

    async def progress(self, id: str, epoch: int, nbytes: int) -> None:
        self._courier.progress(id, epoch, nbytes)

    async def _lose(self, member: Member, why: str) -> None:
        logger.warning("mooncake_ray: group %s: %s %s", self._settings.name, member, why)
        self._roster.leave(member)
        self._heard.pop(member.id, None)
        self._mail.close(member.id, f"{member} {why}")
        self._courier.lost(member.id)
        if member.role == "engine":
            if member.unit not in self._roster.engines:
                self._chronicle.left(member.unit, "" if why == _LEFT else why)
            self._versions.remember({*self._roster.engines, *self._expected})
        await self._notify()

    def _watch_from_now_on(self) -> None:
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        """Finds who is dead, and brings who is behind up to the version. Ends with the job."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self._bury()
                if not self._updating.locked() and self._behind():
                    await self._catch_up()
                if not self._heard and await asyncio.to_thread(lives.is_over, self._settings.job):
                    self._versions.forget()
                    await asyncio.to_thread(lives.end_this_actor)
            except Exception:  # Ray's control store is away for a moment, say: whoever waits has a deadline
                logger.exception("mooncake_ray: group %s", self._settings.name)

    async def _bury(self) -> None:
        """Loses the members that are dead."""
        now = time.monotonic()
        for member in self._roster:
            if now - self._heard.get(member.id, now) > self._settings.liveness_s:
                await self._lose(member, f"was not heard of for {self._settings.liveness_s:g} s")
        actors = [m for m in self._roster if m.actor]
        for member, dead in zip(actors, await asyncio.to_thread(lives.dead, [m.actor for m in actors]), strict=True):
            if dead and member.id in self._roster:
                await self._lose(member, "died")

    # ---- versions

    @ray.method(max_task_retries=-1)
    async def publish(self, version: int | None, operation: str, timeout_s: float) -> int:
        """Has the trainers publish what they hold now; their weights may change afterwards. Returns the version's number."""
        deadline = Deadline(timeout_s)
        async with self._updating:
            number = self._number(version, operation, fresh=True)
            if number not in self._versions.editions:
                with self._chronicle.update("publish", SyncReport(number, "")):
                    await self._publish(number, operation, deadline)
                    await self._written(number)
            return number

    async def offer(self, id: str, version: int | None, timeout_s: float) -> int:
        """As `publish`, asked for by each trainer rank for itself: begins when all have."""
        member = self._roster.by_id(id)
        if member is None:
            raise MemberLostError("this trainer is not in the group any more")
        deadline = Deadline(timeout_s)
        number = self._versions.latest + 1 if version is None else version
        if version is not None and version not in self._offers and version <= self._versions.latest:
            raise self._versions.stale(version)
        await self._offers.join(number, member.rank, member.world, deadline, lambda: self._publish_offered(number, deadline))
        return number

    async def _publish_offered(self, version: int, deadline: Deadline) -> None:
        async with self._updating:
            if version not in self._versions.editions:
                with self._chronicle.update("publish", SyncReport(version, "")):
                    await self._publish(version, f"offer {version} {self._versions.epoch}", deadline)
                    await self._written(version)
        await self._notify()

    @ray.method(max_task_retries=-1)
    async def sync(self, version: int | None, operation: str, mode: str, timeout_s: float) -> SyncReport:
        """Publishes a version unless it is, and brings every engine to it."""
        try:
            report = await self._sync(version, operation, mode, Deadline(timeout_s))
        except WeightSyncError as e:
            count(f"weights_failures:{type(e).__name__}")
            raise
        count(f"weights_syncs:{report.mode}")
        count("weights_bytes", report.nbytes)
        count("weights_fallbacks", len(report.fallbacks))
        count("weights_lost", len(report.lost))
        for kind, seconds in (("publish", report.publish_s), ("stage", report.stage_s), ("pause", report.pause_s)):
            if seconds:
                took(kind, seconds)
        logger.info("mooncake_ray: group %s: %s", self._settings.name, report)
        await self._notify()
        return report

    async def _sync(self, version: int | None, operation: str, mode: str, deadline: Deadline) -> SyncReport:
        async with self._updating:
            if mode:
                check_mode(mode)
            number = self._number(version, operation, fresh=False)
            report = SyncReport(number, mode)
            with self._chronicle.update("sync", report):
                await self._publish_and_deliver(number, report, operation, mode, deadline)
            self._versions.at(number)
            self._mail.tell_all(
                self._roster.trainers.members if self._roster.trainers else (), self._versions.epoch, "forget", before=number
            )
            return report

    async def _publish_and_deliver(self, version: int, report: SyncReport, operation: str, mode: str, deadline: Deadline) -> None:
        if version not in self._versions.editions:
            begin = time.monotonic()
            await self._publish(version, operation, deadline, mode)
            if self._choice.wants_deltas(mode):
                await self._written(version)
            report.publish_s = time.monotonic() - begin
        try:
            await self._deliver(version, report, deadline)
        finally:  # if it was not published, that is why it was not delivered
            await self._written(version)
        if not report.engines and report.lost:
            raise SyncAbortedError(f"version {version}: no engine is left to have it: {report.lost}")

    def _number(self, version: int | None, operation: str, *, fresh: bool) -> int:
        held = -1 if self._roster.trainers is None else self._roster.trainers.published
        return self._versions.number(version, operation, fresh=fresh, held=held)

    async def _publish(self, version: int, operation: str, deadline: Deadline, mode: str = "") -> None:
        """Has the trainers begin to."""
        trainers = await self._trainers(deadline, f"version {version}")
        self._chronicle.enter("publishing")
        edition = self._versions.editions[version] = await self._courier.publish(
            version, operation, trainers, self._versions.next_epoch(), self._choice.wants_deltas(mode), deadline
        )
        self._chronicle.writing(edition)

    async def _trainers(self, deadline: Deadline, what: str) -> Unit:
        """All of them."""
        while (trainers := self._roster.trainers) is None or not trainers.whole:
            there = 0 if trainers is None else len(trainers.joined)
            await self._wait(deadline, f"{what}: {there} of {trainers.world if trainers else '?'} trainer ranks have joined")
        return trainers

    async def _written(self, version: int) -> None:
        """Once all of it is published. If it could not be, there is no such version."""
        try:
            await self._versions.editions[version].contents
        except BaseException:
            del self._versions.editions[version]
            raise
        await self._notify()

    async def _deliver(self, version: int, report: SyncReport, deadline: Deadline, only: Sequence[str] | None = None) -> None:
        """Brings the engines that are not at the version to it; without those that die meanwhile, and by another mode if there is one."""
        while missing := self._missing():
            await self._wait(
                deadline, f"version {version}: engines {missing[:5]} have not joined again after the coordinator was restarted"
            )
        edition = self._versions.editions[version]
        patch_bytes = edition.contents.result().patch_bytes if edition.contents.done() else -1
        modes, report.why = self._choice.order(report.mode, patch_bytes, edition.manifest.nbytes)
        while engines := [e for e in self._behind(version) if (only is None or e.name in only) and e.name not in report.lost]:
            names = {e.name for e in engines}
            report.mode = modes[0]
            self._chronicle.enter("planning", names)
            if report.mode != "p2p":
                await edition.contents
            try:
                await self._courier.deliver(edition, engines, modes[0], self._versions.next_epoch(), report, deadline)
                self._choice.took(modes[0], report.publish_s + report.stage_s)
                self._chronicle.serves(report.engines, version)
                return
            except WeightSyncError as e:
                await self._bury()
                there = {e.name for e in self._behind(version)}
                if gone := names - there:
                    report.lost |= dict.fromkeys(gone, f"died: {e}")
                elif len(modes) > 1 and not deadline.over:
                    logger.warning("mooncake_ray: group %s: %s failed, %s is next: %s", self._settings.name, modes[0], modes[1], e)
                    report.fallbacks.append(f"{modes.pop(0)}: {e}")
                else:
                    raise

    def _missing(self) -> list[str]:
        """Engines that a coordinator before this one knew, and that may still come back."""
        whole = {e.name for e in self._roster.engines.values() if e.whole}
        self._expected = self._expected - whole if time.monotonic() < self._patience else set()
        return sorted(self._expected)

    def _behind(self, version: int | None = None) -> list[Unit]:
        """Engines that are whole, not at that version (the group's), and could be."""
        wanted = self._versions.current if version is None else version
        behind = [e for e in self._roster.engines.values() if e.whole and e.version != wanted]
        return behind if wanted in self._versions.editions else []

    async def _catch_up(self) -> None:
        async with self._updating:
            for name in [e.name for e in self._behind()]:
                report = SyncReport(self._versions.current, "p2p")
                try:
                    with self._chronicle.update("catch up", report):
                        await self._deliver(self._versions.current, report, Deadline(_CATCH_UP_S), [name])
                    logger.info("mooncake_ray: group %s: %s is at version %d now", self._settings.name, name, self._versions.current)
                except (WeightSyncError, TimeoutError) as e:
                    logger.warning("mooncake_ray: group %s: %s stays behind: %s", self._settings.name, name, e)
        await self._notify()

    # ---- looking

    @ray.method(max_task_retries=-1)
    async def status(self) -> GroupStatus:
        return self._chronicle.status(self._roster, self._versions, self._heard, self._courier.moved, self._courier.total)

    @ray.method(max_task_retries=-1)
    async def metas(self, timeout_s: float) -> tuple[ParamMeta, ...]:
        return (await self._trainers(Deadline(timeout_s), "tensors of the model")).placement.metas

    @ray.method(max_task_retries=-1)
    async def wait_for(self, version: int, engines: list[str] | None, timeout_s: float) -> int:
        """Until those engines (all that there are) serve that version, or a newer one. Returns the oldest that one of them serves."""
        deadline = Deadline(timeout_s)
        while True:
            there = self._roster.engines
            versions = {name: there[name].version if name in there else -1 for name in (there if engines is None else engines)}
            if versions and min(versions.values()) >= version:
                return min(versions.values())
            behind = {name: v for name, v in versions.items() if v < version}
            await self._wait(deadline, f"version {version}: engines behind, and at: {dict(list(behind.items())[:5]) or 'there are none'}")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, deadline: Deadline, what: str) -> None:
        """Until something changed. Raises SyncTimeoutError."""
        left = deadline.at - time.monotonic()
        if left <= 0:
            raise SyncTimeoutError(f"{what} (waited {deadline.timeout_s:g} s)")
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
