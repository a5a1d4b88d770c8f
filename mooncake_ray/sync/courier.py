"""One version's way, step by step: trainers publish it, engines stage it, what they have is compared, engines take it over."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_ray.errors import (
    ChecksumError,
    DeltaBaseError,
    PlanError,
    StaleVersionError,
    SyncAbortedError,
    SyncTimeoutError,
    WeightSyncError,
)
from mooncake_ray.objects.blobs import Blob
from mooncake_ray.sync.mailbox import Mailbox, MemberLostError
from mooncake_ray.sync.messages import Contents, GivenUpError, Manifest, Member, Published
from mooncake_ray.sync.plans import Origin, Plans, Route, check
from mooncake_ray.sync.report import Phase, SyncReport
from mooncake_ray.sync.roster import Roster, Unit
from mooncake_ray.sync.versions import Edition
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.weights.plan import Publication

__all__ = ["Courier"]

logger = logging.getLogger("mooncake_ray")

_RESUME_S = 3.0
_OWN_KINDS = (ChecksumError, DeltaBaseError, PlanError, SyncTimeoutError, StaleVersionError)


@dataclass(frozen=True)
class _Part:
    """Some of the engines, which get a version in the same way."""

    mode: str
    engines: list[Unit]
    patches: Mapping[int, Blob] | None = None


class _Rooms:
    """Where a version is going to be."""

    def __init__(self, epoch: int, missing: set[str]) -> None:
        """`missing`: who has to say."""
        self.epoch, self._missing = epoch, missing
        self.blobs: dict[int, Blob] = {}
        self.told = asyncio.Event()

    def add(self, id: str, blobs: Mapping[int, Blob]) -> None:
        self.blobs |= blobs
        self._missing.discard(id)
        if not self._missing:
            self.told.set()


class Courier:
    """For coroutines of one loop, one update at a time."""

    def __init__(self, mail: Mailbox, roster: Roster, plans: Plans, verify: bool, enter: Callable[[Phase], None]) -> None:
        """`enter`: told how far an update has come."""
        self._mail, self._roster, self._plans, self._verify, self._enter = mail, roster, plans, verify, enter
        self._rooms = _Rooms(-1, set())
        self._epoch = -1
        self._followers: dict[int, list[Member]] = {}
        self._leads: dict[str, set[int]] = {}  # by member: units it has not got yet
        self._bytes = self.total = 0
        """Of all units, once; and for every rank that gets them, as `moved` counts."""
        self._moved: dict[str, int] = {}  # by member

    # ---- publishing

    async def publish(self, version: int, operation: str, trainers: Unit, epoch: int, delta: bool, deadline: Deadline) -> Edition:
        """Has each trainer rank make room for what it owns, and returns; then write it, and if `delta`, find out what changed. Once that
        failed, no rank keeps anything of it.

        Raises:
            WeightSyncError: one could not make room; none has kept any.
        """
        origin, plan = await self._origin(trainers)
        publication = origin.publication
        what = {"version": version, "operation": operation, "plan": plan, "digest": publication.digest, "delta": delta}
        rooms = self._rooms = _Rooms(epoch, {m.id for m in trainers.members})

        async def write() -> Contents:
            values, errors = await self._mail.ask(trainers.members, epoch, "publish", _left(deadline, "publishing"), lambda _: what)
            if errors:
                self._mail.tell_all(trainers.members, epoch, "withdraw", version=version)
                raise _together(f"version {version} was not published", errors)
            for member, published in values.items():
                self._roster.note(member, published=published)
                rooms.add(member.id, published.blobs)
            return _contents(publication, {m.name: v for m, v in values.items()})

        writing = asyncio.get_running_loop().create_task(write())
        told = asyncio.get_running_loop().create_task(rooms.told.wait())
        await asyncio.wait((writing, told), return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if writing.done():
            writing.result()
        return Edition(_manifest(version, publication, rooms.blobs), writing)

    def reserved(self, id: str, epoch: int, blobs: Mapping[int, Blob]) -> None:
        """A trainer rank has room for its objects, by number, and begins to write them."""
        if epoch == self._rooms.epoch:
            self._rooms.add(id, blobs)

    async def recall(self, trainers: Unit) -> Edition | None:
        """The version that all trainers have published, by what they said when they joined."""
        parts = {join.member.name: join.published for join in trainers.joined.values() if join.published is not None}
        same = {(p.version, p.plan) for p in parts.values()}
        if len(parts) != trainers.world or len(same) != 1:
            return None
        version, plan = same.pop()
        origin, _ = self._plans.known(plan) or await self._origin(trainers)
        if origin.publication.digest != plan:
            return None
        blobs = {number: blob for part in parts.values() for number, blob in part.blobs.items()}
        contents: asyncio.Future[Contents] = asyncio.get_running_loop().create_future()
        contents.set_result(_contents(origin.publication, parts))
        return Edition(_manifest(version, origin.publication, blobs), contents)

    async def _origin(self, trainers: Unit) -> tuple[Origin, Blob]:
        what = trainers.placement, trainers.hosts, [e.placement for e in self._roster.engines.values() if e.whole]
        return self._plans.origin_again(*what) or await asyncio.to_thread(self._plans.origin, *what)

    # ---- delivering

    async def deliver(
        self, edition: Edition, engines: Sequence[Unit], mode: str, epoch: int, report: SyncReport, deadline: Deadline
    ) -> None:
        """Brings engines to a version; with mode `p2p`, that may be still written. Those that die meanwhile are left out, and noted in the
        report as lost.

        Raises:
            WeightSyncError: nothing has changed for any engine.
        """
        manifest, trainers = edition.manifest, self._roster.trainers
        if trainers is None or not trainers.whole:
            raise SyncAbortedError(f"version {manifest.version}: the trainers that published it are gone")
        if (found := self._plans.known(manifest.plan)) is None:
            raise StaleVersionError(f"version {manifest.version} was published by a plan that is not known any more")
        origin, plan = found
        engine_of = {m: e for e in engines for m in e.members}

        def give_up() -> None:
            self._mail.tell_all((*engine_of, *(trainers.members if mode == "nccl" else ())), epoch, "abort")

        lost: dict[str, str] = {}
        try:
            for part in await self._parts(manifest, engines, mode, trainers, epoch, report, deadline):
                begin = time.monotonic()
                hosts = trainers.hosts | {rank: host for e in part.engines for rank, host in e.hosts.items()}
                whereto = origin.publication, [e.placement for e in part.engines], hosts, trainers.aliases
                route, to = self._plans.route_again(*whereto) or await asyncio.to_thread(self._plans.route, *whereto)
                report.plan_s += time.monotonic() - begin
                members = {m: e for m, e in engine_of.items() if e in part.engines}
                self._note_units(epoch, route, members)
                self._enter("staging")
                begin = time.monotonic()
                what = {"manifest": manifest, "origin": plan, "route": to, "digest": route.delivery.digest, "patches": part.patches}
                if part.mode == "nccl":
                    prepared, errors = await self._broadcast(epoch, trainers, list(members), what, route.delivery.ranks, deadline, give_up)
                else:
                    prepared, errors = await self._mail.ask(
                        members, epoch, "stage", _left(deadline, "staging"), lambda _, w=what: w, give_up
                    )
                gone = {members[m].name: str(e) for m, e in errors.items() if isinstance(e, MemberLostError) and m in members}
                if failed := {m: e for m, e in errors.items() if m not in members or members[m].name not in gone}:
                    raise _together(f"version {manifest.version} was not staged", failed)
                lost |= gone
                contents = await edition.contents
                if self._verify:
                    self._enter("verifying")
                    staged = {m.name: v for m, v in prepared.items()}
                    for engine in part.engines:
                        if engine.name not in gone:
                            ranks = [m.name for m, e in members.items() if e is engine]
                            await asyncio.to_thread(check, origin.publication, route, contents.digests, staged, ranks)
                report.stage_s += time.monotonic() - begin
                report.nbytes += self._bytes if part.patches is None else sum(b.nbytes for b in part.patches.values())
        except BaseException:
            give_up()
            raise
        report.lost.update(lost)
        await self._commit(manifest.version, engine_of, [e.name for e in engines if e.name not in lost], epoch, report, deadline)

    async def _parts(
        self, manifest: Manifest, engines: Sequence[Unit], mode: str, trainers: Unit, epoch: int, report: SyncReport, deadline: Deadline
    ) -> list[_Part]:
        """Which engines get it how. With `delta`, those that have no version to start from, or one that is too old, get all of it."""
        if mode != "delta":
            return [_Part(mode, list(engines))]
        out, whole = [], []
        for base in sorted({e.version for e in engines}):
            these = [e for e in engines if e.version == base]
            if base < 0:
                whole += these
                continue
            what = {"base": base, "version": manifest.version}
            made, errors = await self._mail.ask(trainers.members, epoch, "patch", _left(deadline, "patches"), lambda _, w=what: w)
            if errors:
                report.fallbacks.append(f"delta: {len(these)} engines at version {base} get all of it: {next(iter(errors.values()))}")
                logger.warning("mooncake_ray: %s", report.fallbacks[-1])
                whole += these
            else:
                out.append(_Part("delta", these, {number: blob for blobs in made.values() for number, blob in blobs.items()}))
        return out + ([_Part("p2p", whole)] if whole else [])

    async def _broadcast(
        self,
        epoch: int,
        trainers: Unit,
        engines: Sequence[Member],
        what: dict[str, Any],
        ranks: Sequence[str],
        deadline: Deadline,
        give_up: Callable[[], None],
    ) -> tuple[dict[Member, Any], dict[Member, WeightSyncError]]:
        """Has the trainers send and the engines receive. Returns what the engines answered, and everybody's errors."""
        met, errors = await self._mail.ask(trainers.members[:1], epoch, "meet", _left(deadline, "meeting"))
        if errors:
            return {}, errors
        (meeting,) = met.values()
        said = {"meeting": meeting, "version": what["manifest"].version, "receivers": len(ranks)}
        left = _left(deadline, "the broadcast")
        (_, failed), (prepared, errors) = await asyncio.gather(
            self._mail.ask(trainers.members, epoch, "broadcast", left, lambda _: said, give_up, True),
            self._mail.ask(
                engines, epoch, "stage", left, lambda m: what | {"meeting": meeting, "seat": ranks.index(m.name)}, give_up, True
            ),
        )
        return prepared, failed | errors

    async def _commit(
        self, version: int, engine_of: Mapping[Member, Unit], ready: list[str], epoch: int, report: SyncReport, deadline: Deadline
    ) -> None:
        """Every rank of an engine applies; the engine serves again when all of them have."""
        self._enter("committing")
        begin = time.monotonic()
        taking = [m for m, e in engine_of.items() if e.name in ready]
        for member in engine_of.keys() - set(taking):
            self._mail.tell(member, epoch, "abort")
        paused, errors = await self._mail.ask(taking, epoch, "commit", _left(deadline, "the commit"), lambda _: {"version": version})
        for member in errors:
            self._roster.note(member, state="poisoned")
        bad = {engine_of[m].name: str(e) for m, e in errors.items()}
        whole = [m for m in taking if engine_of[m].name not in bad]
        left = max(deadline.at - time.monotonic(), _RESUME_S)  # whoever has it is not left paused because another was late
        resumed, errors = await self._mail.ask(whole, epoch, "resume", left)
        bad.update((engine_of[m].name, str(e)) for m, e in errors.items())
        for member in whole:
            if engine_of[member].name not in bad:
                self._roster.note(member, version=version, state="serving")
        report.commit_s += time.monotonic() - begin
        report.pause_s = max([report.pause_s, *paused.values(), *resumed.values()])
        report.lost.update(bad)
        report.engines += [name for name in ready if name not in bad]

    # ---- units that several ranks want

    def _note_units(self, epoch: int, route: Route, members: Iterable[Member]) -> None:
        delivery, by_name = route.delivery, {m.name: m for m in members}
        ranks = [by_name[name] for name in delivery.ranks]
        self._epoch, self._moved = epoch, {}
        self._bytes = int(delivery.unit_nbytes.sum())
        self.total = int(np.dot(delivery.unit_nbytes, delivery.sets.lengths[delivery.unit_set]))
        self._followers, self._leads = {}, {m.id: set() for m in ranks}
        for unit in range(delivery.units):
            leader = delivery.leader[unit]
            self._leads[ranks[leader].id].add(unit)
            self._followers[unit] = [ranks[r] for r in delivery.members(unit).tolist() if r != leader]

    def staged(self, id: str, epoch: int, unit: int, blob: Blob) -> None:
        """A leader has a unit: the others get it from there."""
        if epoch == self._epoch and unit in self._leads.get(id, ()):
            self._leads[id].discard(unit)
            self._tell_followers(unit, blob)

    @property
    def moved(self) -> int:
        """Bytes that ranks have staged of the update that is under way, or the last one."""
        return sum(self._moved.values())

    def progress(self, id: str, epoch: int, nbytes: int) -> None:
        """A rank has staged so much."""
        if epoch == self._epoch:
            self._moved[id] = nbytes

    def lost(self, id: str) -> None:
        """What a member leads and has not got, the others get from the trainers."""
        for unit in self._leads.pop(id, ()):
            self._tell_followers(unit, None)

    def _tell_followers(self, unit: int, blob: Blob | None) -> None:
        followers = self._followers.get(unit, ())
        of_host = Counter(member.host for member in followers)
        for member in followers:
            self._mail.tell(member, self._epoch, "unit", unit=unit, blob=blob, shared=of_host[member.host] > 1)


def _manifest(version: int, publication: Publication, blobs: Mapping[int, Blob]) -> Manifest:
    return Manifest(version, publication.digest, tuple(blobs[i] for i in range(len(blobs))))


def _contents(publication: Publication, parts: Mapping[str, Published]) -> Contents:
    """Of what each rank has published."""
    digests = np.zeros(len(publication.tensor), np.uint64)
    for rank, part in parts.items():
        digests[publication.owner == publication.ranks.index(rank)] = part.digests
    patched = [part.patch_bytes for part in parts.values()]
    return Contents(digests, -1 if -1 in patched else sum(patched))


def _left(deadline: Deadline, what: str) -> float:
    left = deadline.at - time.monotonic()
    if left <= 0:
        raise SyncTimeoutError(f"{what}: not done within {deadline.timeout_s:g} s")
    return left


def _together(what: str, errors: Mapping[Member, WeightSyncError]) -> WeightSyncError:
    """One error for those of several members, of the kind they have in common."""
    own = {m: e for m, e in errors.items() if not isinstance(e, GivenUpError)} or errors  # the others ended because of these
    text = "; ".join(f"{m}: {e}" for m, e in list(own.items())[:3])
    kinds = {type(e) for e in own.values()}
    kind = kinds.pop() if len(kinds) == 1 else SyncAbortedError
    return (kind if kind in _OWN_KINDS else SyncAbortedError)(f"{what} ({len(own)} ranks failed): {text}")
