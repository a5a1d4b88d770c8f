"""`Making`: groups that producers are at."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from mooncake_ray.errors import LeaseLostError
from mooncake_ray.rollout.group import Group
from mooncake_ray.rollout.records import Waiting

__all__ = ["Making"]


@dataclass(slots=True)
class _Ticket:
    producer: str
    deadline: float
    backed: dict[str, Waiting | None] = field(default_factory=dict)
    """Its groups by uid, with what there was of them when it was given."""


class Making:
    """Not thread-safe. A group is with one ticket."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        """By uid: the samples that have come, of groups that are not whole."""
        self._tickets: dict[int, _Ticket] = {}
        self._ticket_of: dict[str, int] = {}
        self.last = 0
        """The highest number of a ticket."""

    def __len__(self) -> int:
        return len(self.groups)

    def open(self, producer: str, groups: Mapping[str, tuple[Group, Waiting | None]], deadline: float) -> int:
        """A ticket for groups by uid, of which nothing has come; some with what there was of them before."""
        self.last += 1
        self._tickets[self.last] = _Ticket(producer, deadline, {uid: backing for uid, (_, backing) in groups.items()})
        self.groups.update({uid: group for uid, (group, _) in groups.items()})
        self._ticket_of.update(dict.fromkeys(groups, self.last))
        return self.last

    def renewed(self, ticket: int, deadline: float) -> bool:
        """Whether it has not ended."""
        if ticket in self._tickets:
            self._tickets[ticket].deadline = deadline
        return ticket in self._tickets

    def renew_all(self, deadline: float) -> None:
        for ticket in self._tickets.values():
            ticket.deadline = deadline

    def check(self, ticket: int, uids: Collection[str]) -> None:
        """Whether who has that ticket may bring samples of these groups.

        Raises:
            LeaseLostError: they are not of the ticket, or not any more.
        """
        held = self._of(ticket).backed
        if other := next((uid for uid in uids if uid not in held), None):
            raise LeaseLostError(f"group {other!r} is not of ticket {ticket}, or not any more: somebody else may be making it")

    def close(self, uid: str) -> tuple[Group, Waiting | None]:
        """Takes a group out: it is whole, or nobody makes it any more; with what there was of it before. A ticket without groups ends."""
        number = self._ticket_of.pop(uid)
        backed = self._tickets[number].backed
        backing = backed.pop(uid)
        if not backed:
            del self._tickets[number]
        return self.groups.pop(uid), backing

    def backing(self, uid: str) -> Waiting | None:
        """What there was of a group when its ticket was given."""
        return self._tickets[self._ticket_of[uid]].backed[uid]

    def uids_of(self, ticket: int, among: Collection[str] | None = None) -> list[str]:
        """The groups of a ticket, or those of some; none if it has ended."""
        mine = self._tickets[ticket].backed if ticket in self._tickets else {}
        return list(mine) if among is None else [uid for uid in among if uid in mine]

    def overdue(self, now: float) -> list[int]:
        """Tickets."""
        return [number for number, ticket in self._tickets.items() if ticket.deadline <= now]

    def tickets_of(self, producer: str) -> list[int]:
        return [number for number, ticket in self._tickets.items() if ticket.producer == producer]

    def tickets(self) -> list[int]:
        """Those that have not ended."""
        return list(self._tickets)

    def producers(self) -> set[str]:
        """Those that have tickets."""
        return {ticket.producer for ticket in self._tickets.values()}

    def _of(self, ticket: int) -> _Ticket:
        if ticket not in self._tickets:
            raise LeaseLostError(f"ticket {ticket} has ended: its groups were brought, given back, or given to others")
        return self._tickets[ticket]
