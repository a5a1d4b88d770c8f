"""`Ledger`: the books of a `RolloutBuffer`: which groups there are, who has them, and which are too old.

A state machine without threads, clocks or data: the same calls lead to the same state again. Time is whatever `now` says.
"""

from __future__ import annotations

from collections.abc import Collection

from mooncake_ray.rollout.consumption import Consumption
from mooncake_ray.rollout.group import Group
from mooncake_ray.rollout.production import Production
from mooncake_ray.rollout.records import Waiting
from mooncake_ray.rollout.settings import BufferSettings
from mooncake_ray.rollout.stock import Stock

__all__ = ["Ledger"]


class Ledger:
    """Not thread-safe. What a call refuses, it leaves as it was.

    Attributes:
        stock: The groups that are on their way.
        production: What producers ask.
        consumption: What learners ask.
    """

    def __init__(self, settings: BufferSettings) -> None:
        self.stock = Stock(settings)
        self.production, self.consumption = Production(self.stock), Consumption(self.stock)

    def advance(self, version: int) -> None:
        """Weights of that version are trained from now on. Older ones are ignored."""
        self.stock.advance(version)

    def close(self) -> None:
        """No new groups come. Who wants more than there are gets what there is, and then nothing."""
        self.stock.closed = True

    def overdue(self, now: float) -> tuple[list[int], list[int]]:
        """Tickets and steps whose deadline has passed."""
        return self.production.overdue(now), self.consumption.overdue(now)

    def left_by(self, process: str) -> tuple[list[int], list[int]]:
        """Tickets and steps that nobody has if that process is gone."""
        return self.production.tickets_of(process), self.consumption.left_by(process)

    def end(self, tickets: Collection[int], steps: Collection[int]) -> int:
        """Gives to others what nobody was heard of for. Steps only where they are consumed at least once. Returns how many have ended."""
        if self.stock.settings.consumption == "exactly-once":
            steps = ()
        for ticket in tickets:
            self.production.give_back(ticket)
        for step in steps:
            self.consumption.put_back(step)
        self.stock.totals.leases_lost += len(tickets) + len(steps)
        return len(tickets) + len(steps)

    def take_back(self) -> int:
        """Takes back what producers and learners have, for a life in which none of them is there: groups that are being made wait for others,
        with the samples that have come; those of steps that are not committed are in their place in the queue. A step keeps what has become
        too old since it took it; the queue does not: these go as `stale` says. Returns how many."""
        before = self.stock.totals.groups_stale
        self.production.take_back()
        for step in self.consumption.steps():
            self.consumption.put_back(step)
        return self.stock.totals.groups_stale - before

    def be_patient(self, now: float) -> None:
        """Gives whoever has a ticket or a step the whole time again."""
        self.production.be_patient(now)
        self.consumption.be_patient(now)

    def lost(self, parcels: Collection[str]) -> None:
        """These stored batches are gone. Groups of them are to be made again; steps that have some get something else when they ask again."""
        gone = set(parcels)
        self.consumption.lost(gone)  # what steps have goes back into the queue, or waits
        for group in [group for group in self.stock.queue if group.uses(gone)]:
            self.stock.queue.remove(group)
            self.stock.leave(group)
            self.stock.wait(Waiting(Group(group.uid, group.number), "lost"))
        self.production.lost(gone)

    def processes(self) -> set[str]:
        """Those that have tickets or steps."""
        return self.production.producers() | self.consumption.consumers()

    def retired(self) -> list[str]:
        """Parcels that are not needed any more. Each is told once."""
        return self.stock.holdings.retired()

    def stats(self) -> dict[str, int]:
        """Numbers of now, and totals since the beginning. `last_step` is the one that was committed last, -1 if none was."""
        now = {
            "version": self.stock.version,
            "groups_begun": self.stock.last_group,
            "groups_making": len(self.production),
            "groups_waiting": len(self.stock.waiting),
            "groups_queued": len(self.stock.queue),
            "groups_taken": self.consumption.groups,
            "groups_in_replay": len(self.consumption.replay),
            "steps_taken": len(self.consumption),
            "last_step": next(reversed(self.consumption.committed), -1),
            "bytes": self.stock.nbytes,
            "replay_bytes": self.consumption.replay.nbytes,
            "parcels": len(self.stock.holdings),
        }
        return now | vars(self.stock.totals)
