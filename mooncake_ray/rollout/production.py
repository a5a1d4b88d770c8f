"""`Production`: what producers ask of a buffer's books."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from mooncake_ray.errors import SchemaError, StoreError
from mooncake_ray.rollout.group import Group, Parcel
from mooncake_ray.rollout.making import Making
from mooncake_ray.rollout.memory import remember
from mooncake_ray.rollout.records import Brought, NoRoom, Waiting, Work
from mooncake_ray.rollout.stock import Stock

__all__ = ["Production"]


class Production:
    """Not thread-safe. What a call refuses, it leaves as it was."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._making = Making()
        self._operations: OrderedDict[str, Any] = OrderedDict()

    def reserve(self, operation: str, producer: str, uids: Sequence[str], now: float) -> int | NoRoom:
        """A ticket to make these groups, which are on their way from now on.

        Args:
            operation: names this: a retry of that name changes nothing and is answered the same.

        Raises:
            SchemaError: one is on its way already, or is there twice.
            StoreError: the buffer is closed.
            StoreFullError: they never fit.
        """
        if (done := self._operations.get(operation)) is not None:
            return done
        if self._stock.closed:
            raise StoreError("the buffer is closed: no more groups are wanted")
        if not uids or len(set(uids)) < len(uids):
            raise SchemaError(f"a ticket is for different groups, one at least, got {len(uids)} uids of which {len(set(uids))} differ")
        self._stock.check_new(uids)
        if (refused := self._stock.no_room(len(uids), 0)) is not None:
            return refused
        ticket = self._making.open(producer, {uid: (self._stock.new(uid), None) for uid in uids}, now + self._stock.settings.lease_s)
        remember(self._operations, operation, ticket)
        return ticket

    def resume(self, operation: str, producer: str, most: int, now: float) -> tuple[int, list[Work]] | None:
        """A ticket for groups that wait for a producer: at most so many, and as there is room. None: there are none. `operation`: as in
        `reserve`."""
        if (done := self._operations.get(operation)) is not None:
            return done
        if self._stock.settings.capacity_groups is not None:
            most = min(most, self._stock.settings.capacity_groups - self._stock.on_their_way)
        waiting = [self._stock.waiting.popitem(last=False)[1] for _ in range(min(most, len(self._stock.waiting)))]
        if not waiting:
            return None
        groups, works = {}, []
        for w in waiting:
            if w.group.rows and w.reason == "partial" and self._stock.is_stale(w.group):
                self._stock.leave(w.group)
                self._stock.totals.groups_stale += 1
                w = Waiting(Group(w.group.uid, w.group.number), "stale")
            groups[w.group.uid] = Group(w.group.uid, w.group.number), w
            works.append(Work(w.group.uid, w.reason, tuple(w.group.rows), w.group.oldest))
        answer = self._making.open(producer, groups, now + self._stock.settings.lease_s), works
        remember(self._operations, operation, answer)
        return answer

    def renewed(self, ticket: int, now: float) -> bool:
        """Whether a ticket has not ended; if so, it has the whole time from now on."""
        return self._making.renewed(ticket, now + self._stock.settings.lease_s)

    def be_patient(self, now: float) -> None:
        self._making.renew_all(now + self._stock.settings.lease_s)

    def put(self, operation: str, parcel: Parcel, ticket: int | None = None) -> Brought | NoRoom:
        """Adds samples: all or none.

        Args:
            operation: as in `reserve`.
            ticket: by which its groups were reserved, or resumed: each comes in as many parcels as its producer likes, which never wait, and
                comes whole (what there was of it before it was resumed is not counted). None: the parcel brings groups that are new, and
                whole.

        Raises:
            LeaseLostError: a group is not of the ticket, or not any more.
            SchemaError: a group has more samples than it may, fewer without a ticket, or samples with different tags; or is on its way.
            StoreError: the buffer is closed, and groups are new.
            StoreFullError: new groups never fit.
        """
        if (done := self._operations.get(operation)) is not None:
            return done
        parts = list(parcel.by_uid())
        uids = [uid for uid, _ in parts]
        if ticket is not None:
            self._making.check(ticket, uids)
        elif self._stock.closed:
            raise StoreError("the buffer is closed: no new groups are wanted")
        else:
            self._stock.check_new(uids)
        grown = [self._grown(parcel, uid, rows) for uid, rows in parts]
        whole = [group.size == self._stock.settings.group_size for group in grown]
        if ticket is None and not all(whole):
            few = grown[whole.index(False)]
            raise SchemaError(
                f"group {few.uid!r} has {few.size} of {self._stock.settings.group_size} samples: without a ticket they come at once"
            )
        good = [w and all(passes(group) for passes in self._stock.settings.filters) for group, w in zip(grown, whole, strict=True)]
        if ticket is None and (refused := self._stock.no_room(len(uids), parcel.nbytes)) is not None:
            return refused
        for group, is_whole, is_good in zip(grown, whole, good, strict=True):
            self._replace(group, is_whole)
            if is_good:
                self._stock.queue.add(group)
            elif is_whole:
                self._stock.forget(group)
        self._stock.sweep()
        brought = Brought(len(parcel.uids), sum(good), sum(whole) - sum(good))
        self._stock.totals.samples_put += brought.samples
        self._stock.totals.groups_whole += brought.whole
        self._stock.totals.groups_filtered += brought.filtered
        remember(self._operations, operation, brought)
        return brought

    def park(self, operation: str, parcel: Parcel, ticket: int) -> Brought:
        """Gives back groups of a ticket that are not done, with all there is of each of them. Raises LeaseLostError."""
        if (done := self._operations.get(operation)) is not None:
            return done
        parts = list(parcel.by_uid())
        self._making.check(ticket, [uid for uid, _ in parts])
        for uid, rows in parts:
            group = self._making.groups[uid]
            so_far = Group(uid, group.number)
            so_far.add(parcel, rows)
            self._stock.enter(so_far)
            self._unmake(uid, Waiting(so_far, "partial"))
        remember(self._operations, operation, brought := Brought(len(parcel.uids), 0, 0))
        return brought

    def give_back(self, ticket: int, uids: Collection[str] | None = None) -> None:
        """Lets others make groups of a ticket (None: all), from what there is of them. Nothing happens to those that it has not got."""
        for uid in self._making.uids_of(ticket, uids):
            self._orphan(uid)

    def cancel(self, ticket: int, uids: Collection[str] | None = None) -> None:
        """Forgets groups of a ticket (None: all): nobody is to make them. Nothing happens to those that it has not got."""
        for uid in self._making.uids_of(ticket, uids):
            self._unmake(uid, None)
            self._stock.remove(uid)

    def take_back(self) -> None:
        """Ends all tickets as `give_back` does, and forgets what calls were answered: whoever made them is not there any more."""
        for ticket in self._making.tickets():
            self.give_back(ticket)
        self._operations.clear()

    @property
    def last_ticket(self) -> int:
        """The highest number of one."""
        return self._making.last

    @last_ticket.setter
    def last_ticket(self, number: int) -> None:
        self._making.last = number

    def overdue(self, now: float) -> list[int]:
        """Tickets whose deadline has passed."""
        return self._making.overdue(now)

    def tickets_of(self, producer: str) -> list[int]:
        return self._making.tickets_of(producer)

    def producers(self) -> set[str]:
        """Those that have tickets."""
        return self._making.producers()

    def __len__(self) -> int:
        """Groups that are being made."""
        return len(self._making)

    def lost(self, gone: Collection[str]) -> None:
        """These parcels: groups that have some are to be made again."""
        for uid, group in list(self._making.groups.items()):
            backing = self._making.backing(uid)
            if group.uses(gone) or (backing is not None and backing.group.uses(gone)):
                self._unmake(uid, Waiting(Group(uid, group.number), "lost"))
        for uid, waiting in list(self._stock.waiting.items()):
            if waiting.group.uses(gone):
                self._stock.leave(waiting.group)
                self._stock.waiting[uid] = Waiting(Group(uid, waiting.group.number), "lost")
                self._stock.totals.groups_lost += 1

    def _grown(self, parcel: Parcel, uid: str, rows: np.ndarray) -> Group:
        """What a group will be with these samples."""
        before = self._making.groups.get(uid, Group(uid, 0))
        group = before.copy()
        group.add(parcel, rows)
        if group.size > self._stock.settings.group_size:
            raise SchemaError(
                f"group {uid!r} has {before.size} of {self._stock.settings.group_size} samples, and {len(rows)} more are brought"
            )
        return group

    def _replace(self, group: Group, is_whole: bool) -> None:
        """Notes what a group has become. One that is whole is not being made any more."""
        self._stock.enter(group)
        if not group.number:
            group.number = self._stock.new(group.uid).number
            return
        self._stock.leave(self._making.groups[group.uid])
        self._making.groups[group.uid] = group
        if is_whole:
            _, backing = self._making.close(group.uid)
            if backing is not None:
                self._stock.leave(backing.group)

    def _unmake(self, uid: str, instead: Waiting | None) -> None:
        """Nobody makes the group any more. What has come of it, and what there was before, is let go."""
        group, backing = self._making.close(uid)
        if instead is not None:
            self._stock.wait(instead)
        self._stock.leave(group)
        if backing is not None:
            self._stock.leave(backing.group)

    def _orphan(self, uid: str) -> None:
        """Lets others make a group, from what there was of it when its ticket was given, or else from what has come since."""
        group, backing = self._making.groups[uid], self._making.backing(uid)
        instead = backing if backing is not None else Waiting(group, "orphaned")
        self._stock.enter(instead.group)
        self._unmake(uid, instead)
