"""`Stock`: the groups of a buffer that are on their way, and what all parts of its books know of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from mooncake_ray.errors import LeaseLostError, SchemaError, StoreFullError
from mooncake_ray.rollout.group import Group
from mooncake_ray.rollout.holdings import Holdings
from mooncake_ray.rollout.queue import Queue
from mooncake_ray.rollout.records import NoRoom, Waiting
from mooncake_ray.rollout.settings import BufferSettings

__all__ = ["Stock", "Totals"]


@dataclass
class Totals:
    """Since the beginning."""

    samples_put: int = 0
    groups_whole: int = 0
    groups_filtered: int = 0
    groups_stale: int = 0
    """Too old when they were to be learned from, or to be made further."""
    groups_returned: int = 0
    """That had to wait for a producer, for whatever reason."""
    groups_lost: int = 0
    """What was stored of them is gone."""
    groups_trained: int = 0
    samples_trained: int = 0
    tokens_trained: int = 0
    groups_replayed: int = 0
    leases_lost: int = 0


class Stock:
    """Not thread-safe. The uids of groups that are on their way differ."""

    def __init__(self, settings: BufferSettings) -> None:
        self.settings = settings
        self.version = 0
        """The newest that was trained from, as far as is known here."""
        self.closed = False
        """No new groups come."""
        self.totals = Totals()
        self.queue = Queue(settings.order)
        """Whole groups that wait to be learned from."""
        self.waiting: OrderedDict[str, Waiting] = OrderedDict()
        """Groups that wait for a producer, by uid; the first one first."""
        self.holdings = Holdings()
        self.nbytes = 0
        """Of all groups that were not learned from."""
        self.last_group = 0
        """The highest number of a group."""
        self._uids: set[str] = set()

    @property
    def on_their_way(self) -> int:
        """Groups that are being made, wait to be learned from, or are being learned from."""
        return len(self._uids) - len(self.waiting)

    def new(self, uid: str) -> Group:
        """A group without samples, on its way from now on."""
        self._uids.add(uid)
        self.last_group += 1
        return Group(uid, self.last_group)

    def again(self, group: Group) -> None:
        """A group that was on its way before, with what there is of it."""
        self._uids.add(group.uid)
        self.enter(group)

    def check_new(self, uids: Collection[str]) -> None:
        """
        Raises:
            LeaseLostError: one was on its way, and is to be made again by whoever resumes it.
            SchemaError: one is on its way.
        """
        known = next((uid for uid in uids if uid in self._uids), None)
        if known in self.waiting:
            raise LeaseLostError(f"group {known!r} is to be made again, by whoever resumes it: {self.waiting[known].reason}")
        if known is not None:
            raise SchemaError(f"group {known!r} is on its way already: uids of groups differ until they were learned from")

    def no_room(self, groups: int, nbytes: int) -> NoRoom | None:
        """Why so many more have to wait. Raises StoreFullError: they never fit."""
        settings = self.settings
        limits = ((groups, self.on_their_way, settings.capacity_groups, "groups"), (nbytes, self.nbytes, settings.capacity_bytes, "bytes"))
        for more, _, limit, what in limits:
            if limit is not None and more > limit:
                raise StoreFullError(f"{more} {what} at once never fit into a buffer of {limit} {what}")
        if all(limit is None or used + max(1, more) <= limit for more, used, limit, _ in limits):
            return None
        return NoRoom(groups, self.on_their_way, settings.capacity_groups, nbytes, self.nbytes, settings.capacity_bytes)

    def enter(self, group: Group) -> None:
        """What is stored of a group is needed."""
        self.holdings.hold(group)
        self.nbytes += group.nbytes

    def leave(self, group: Group) -> None:
        """What is stored of a group is not needed here."""
        self.holdings.let_go(group)
        self.nbytes -= group.nbytes

    def forget(self, group: Group) -> None:
        """A group is not on its way any more."""
        self.leave(group)
        self.remove(group.uid)

    def remove(self, uid: str) -> None:
        self._uids.discard(uid)

    def wait(self, waiting: Waiting) -> None:
        """Has a group wait for a producer."""
        self.waiting[waiting.group.uid] = waiting
        self.totals.groups_returned += 1
        self.totals.groups_lost += waiting.reason == "lost"

    def is_stale(self, group: Group) -> bool:
        most = self.settings.max_staleness
        return most is not None and self.version - group.oldest > most

    def advance(self, version: int) -> None:
        """Weights of that version are trained from now on. Older ones are ignored."""
        if version > self.version:
            self.version = version
            self.sweep()

    def sweep(self) -> None:
        """Takes what is too old out of the queue."""
        if self.settings.max_staleness is None:
            return
        for group in self.queue.older_than(self.version - self.settings.max_staleness):
            self.queue.remove(group)
            self.totals.groups_stale += 1
            if self.settings.stale == "return":
                self.wait(Waiting(group, "stale"))
            else:
                self.forget(group)
