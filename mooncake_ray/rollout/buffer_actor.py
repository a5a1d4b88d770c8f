"""`BufferActor`: the books of a buffer, and who waits for what.

Asynchronous: one loop, no locks. What is done to the books is done at once, and answered when the vault remembers it. Ray may start it again at
any time: it goes on from what the vault knows, and callers ask again.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from mooncake_ray.objects.batch_ref import BatchRef
from mooncake_ray.objects.processes import is_dead
from mooncake_ray.rollout.answers import GivenShare, GivenWork, Piece
from mooncake_ray.rollout.group import Parcel, Rows
from mooncake_ray.rollout.ledger import Ledger
from mooncake_ray.rollout.records import Brought, NoRoom, Want
from mooncake_ray.rollout.saving import Moment
from mooncake_ray.rollout.settings import BufferSettings
from mooncake_ray.rollout.vault import Kept, Memory

__all__ = ["LONGEST_WAIT_S", "BufferActor"]

logger = logging.getLogger("mooncake_ray")

LONGEST_WAIT_S = 10.0
_LOOK_EVERY_S = 0.5  # at deadlines, and at whether processes and nodes live
_ENTRIES = 4096  # in the journal before the books are written whole


class BufferActor:
    """See the module."""

    def __init__(self, name: str, namespace: str, settings: BufferSettings) -> None:
        self._name, self._vault = name, ray.get_actor(f"{name}:vault", namespace=namespace)
        memory: Memory = ray.get(self._vault.recall.remote())
        self._ledger: Ledger = Ledger(settings) if memory.snapshot is None else pickle.loads(memory.snapshot)
        for entry in memory.journal:
            part, method, arguments = pickle.loads(entry)
            getattr(self._part(part), method)(*arguments)
        self._ledger.be_patient(time.monotonic())
        self._parcels: dict[str, Kept] = memory.parcels
        self._arriving: dict[str, BatchRef] = {}
        self._retired: list[str] = self._ledger.retired()
        self._entries: list[bytes] = []  # that the vault has not got
        self._done = self._safe = 0  # how many there were, and how many of them the vault has got
        self._journal = len(memory.journal)  # that it has since the last snapshot
        self._writing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        if memory.snapshot is not None or memory.journal:
            logger.warning("mooncake_ray: buffer %r begins again with %d groups on their way", name, self._ledger.stock.on_their_way)

    async def settings(self) -> BufferSettings:
        self._watch_from_now_on()
        return self._ledger.stock.settings

    # ---- producers

    async def reserve(self, operation: str, producer: str, uids: Sequence[str], wait_s: float) -> int | NoRoom:
        return await self._patiently("production", "reserve", (operation, producer, uids, time.monotonic()), wait_s)

    async def resume(self, operation: str, producer: str, most: int, wait_s: float) -> tuple[int, list[GivenWork]] | None:
        found = await self._patiently("production", "resume", (operation, producer, most, time.monotonic()), wait_s)
        if found is None:
            return None
        ticket, works = found
        return ticket, [GivenWork(work.uid, work.reason, self._pieces(work.rows), work.oldest) for work in works]

    async def work(self, operation: str, producer: str, uids: Sequence[str], wait_s: float) -> tuple[int, list[GivenWork]] | NoRoom:
        """What is to be made again, or further, if there is any; else new groups of these uids."""
        found = await self.resume(f"{operation}-again", producer, len(uids), 0.0)
        if found is not None:
            return found
        ticket = await self.reserve(operation, producer, uids, wait_s)
        return ticket if isinstance(ticket, NoRoom) else (ticket, [])

    async def renew(self, tickets: Sequence[int], steps: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """Returns those that have ended. Of steps by their attempts."""
        self._watch_from_now_on()
        now = time.monotonic()
        return (
            [ticket for ticket in tickets if not self._ledger.production.renewed(ticket, now)],
            [step for step, attempt in steps.items() if not self._ledger.consumption.renewed(step, attempt, now)],
        )

    async def put(self, operation: str, parcel: Parcel, ref: BatchRef, ticket: int | None, wait_s: float) -> Brought | NoRoom:
        return await self._patiently("production", "put", (operation, parcel, ticket), wait_s, lambda: self._came(parcel, ref))

    async def park(self, operation: str, parcel: Parcel, ref: BatchRef, ticket: int) -> Brought:
        answer = self._do("production", "park", operation, parcel, ticket)
        self._came(parcel, ref)
        await self._remembered()
        return answer

    async def do(self, part: str, method: str, *arguments: Any) -> Any:
        """What waits for nothing."""
        answer = self._do(part, method, *arguments)
        await self._remembered()
        return answer

    # ---- learners

    async def take(self, step: int, version: int, want: Want, consumer: str, rank: int, world: int, wait_s: float) -> GivenShare | None:
        """None: there was not enough meanwhile."""
        if version > self._ledger.stock.version:
            self._do("ledger", "advance", version)
        end = time.monotonic() + wait_s
        while True:
            call = (step, version, want, consumer, time.monotonic())
            draft = await self._patiently("consumption", "take", call, end - time.monotonic())
            if draft is None:
                return None
            if not draft.groups or self._ledger.consumption.draft(step) is draft:  # nothing of it was lost meanwhile
                return GivenShare.of(draft, draft.share(rank, world), self._pieces)

    # ---- looking

    async def stats(self) -> dict[str, Any]:
        self._watch_from_now_on()
        ages = self._ledger.consumption.staleness
        return self._ledger.stats() | {"staleness": [ages.get(age, 0) for age in range(max(ages, default=-1) + 1)]}

    async def moment(self) -> Moment:
        """All as it is now, once the vault has it."""
        self._watch_from_now_on()
        ledger = ray.cloudpickle.dumps(self._ledger)  # filters may be of the driver's own module
        refs = {
            name: ref for name in self._ledger.stock.holdings if (ref := self._ref(name)) is not None
        }  # what is retired meanwhile stays
        await self._remembered()
        refs = {name: self._parcels[name].ref if name in self._parcels else ref for name, ref in refs.items()}
        return Moment(ledger, refs, ray.get_runtime_context().get_node_id())

    # ---- within

    def _ref(self, parcel: str) -> BatchRef | None:
        return self._parcels[parcel].ref if parcel in self._parcels else self._arriving.get(parcel)

    def _part(self, name: str) -> Any:
        return self._ledger if name == "ledger" else getattr(self._ledger, name)

    def _do(self, part: str, method: str, *arguments: Any) -> Any:
        """Does something to the books, and notes it for the vault."""
        self._watch_from_now_on()
        answer = getattr(self._part(part), method)(*arguments)
        self._note(part, method, arguments)
        return answer

    def _note(self, part: str, method: str, arguments: tuple) -> None:
        self._entries.append(pickle.dumps((part, method, arguments)))
        self._done += 1
        self._retired += self._ledger.retired()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _patiently(self, part: str, method: str, call: tuple, wait_s: float, done: Callable[[], None] = lambda: None) -> Any:
        """Does something as soon as it can be done; or returns why it cannot, which changes nothing."""
        self._watch_from_now_on()
        end = time.monotonic() + min(wait_s, LONGEST_WAIT_S)
        while True:
            changed = self._changed
            answer = getattr(self._part(part), method)(*call)
            if answer is not None and not isinstance(answer, NoRoom):
                done()
                self._note(part, method, call)
                await self._remembered()
                return answer
            left = end - time.monotonic()
            if left <= 0:
                return answer
            try:
                await asyncio.wait_for(changed.wait(), left)
            except TimeoutError:
                continue

    def _came(self, parcel: Parcel, ref: BatchRef) -> None:
        """Has the vault own a parcel, unless it does already."""
        if parcel.id in self._ledger.stock.holdings and parcel.id not in self._parcels:
            self._arriving[parcel.id] = ref

    async def _remembered(self) -> None:
        """Waits until the vault has all that was done by now."""
        mine = self._done
        while self._safe < mine:
            if self._writing is None:
                self._writing = asyncio.create_task(self._write())
            await asyncio.shield(self._writing)

    async def _write(self) -> None:
        entries, self._entries = self._entries, []
        arriving = dict(self._arriving)
        retired, self._retired = [name for name in self._retired if name not in self._ledger.stock.holdings], []
        try:
            kept, failed = await self._vault.append.remote(entries, {n: r for n, r in arriving.items() if n not in retired}, retired)
        finally:
            self._writing = None
        self._safe += len(entries)
        self._journal += len(entries)
        self._parcels |= kept
        for name in [*arriving, *retired]:
            self._arriving.pop(name, None)
        for name in retired:
            self._parcels.pop(name, None)
        if failed:
            logger.warning("mooncake_ray: buffer %r: what was brought was gone before it was owned: %s", self._name, failed)
            self._do("ledger", "lost", list(failed))
        if self._journal >= _ENTRIES and not self._entries:
            journal, self._journal = self._journal, 0
            await self._vault.checkpoint.remote(ray.cloudpickle.dumps(self._ledger), journal)

    def _pieces(self, rows: Sequence[Rows]) -> list[Piece]:
        return [(self._parcels[name].ref, numbers) for name, numbers in rows]

    def _watch_from_now_on(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        """Gives to others what those have that are gone."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self._look()
            except (ray.exceptions.RayError, RuntimeError, OSError):  # this task's end would leave groups with the dead
                logger.exception("mooncake_ray: buffer %r could not look at who lives; it tries again", self._name)

    async def _look(self) -> None:
        processes = self._ledger.processes()
        dead = await asyncio.to_thread(lambda: [process for process in processes if is_dead(process)])
        tickets, steps = self._ledger.overdue(time.monotonic())
        for process in dead:
            for found, more in zip((tickets, steps), self._ledger.left_by(process), strict=True):
                found.extend(number for number in more if number not in found)
        if self._ledger.stock.settings.consumption == "exactly-once":
            steps = []
        if tickets or steps:
            self._do("ledger", "end", tickets, steps)
        if len(nodes := {node for kept in self._parcels.values() for node in kept.nodes}) > 0:
            alive = await asyncio.to_thread(lambda: {node["NodeID"] for node in ray.nodes() if node["Alive"]})
            if gone := nodes - alive:
                lost = [name for name, kept in self._parcels.items() if kept.nodes & gone]
                logger.warning("mooncake_ray: buffer %r: %d parcels are lost with nodes %s", self._name, len(lost), ", ".join(sorted(gone)))
                self._do("ledger", "lost", lost)
        await self._remembered()
