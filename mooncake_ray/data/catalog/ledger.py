"""The books of a catalog: which rows there are, where their fields lie, who has them, and when they go.

A state machine without threads, clocks or data. A *fragment* is a name for something stored that rows lie in. Time is whatever `now` says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from mooncake_ray.data.catalog.records import Lease, LeasedRow, Listed, NoRoom, Published
from mooncake_ray.data.catalog.rows import ACKNOWLEDGED, Partition, Row
from mooncake_ray.data.catalog.stock import Publication, Stock
from mooncake_ray.data.catalog.where import Where
from mooncake_ray.errors import LeaseLostError, SchemaError

__all__ = ["Ledger"]

_REMEMBERED = 1 << 16  # operations, and ended leases, that a retry is told the same about
_EVERY = Where()


@dataclass(slots=True)
class _Held:
    group: int
    consumer: str
    deadline: float
    rows: list[Row]


@dataclass
class _Totals:
    rows_published: int = 0
    rows_taken: int = 0
    rows_acknowledged: int = 0
    rows_finished: int = 0
    rows_dropped: int = 0
    rows_returned: int = 0  # released, or of a lease that was lost
    leases_lost: int = 0
    operations_repeated: int = 0


@dataclass
class Ledger:
    """Not thread-safe. What a call refuses, it leaves as it was."""

    groups: Sequence[str] = ("train",)
    """Of consumers: each group gets every row once. A row goes when all have acknowledged it."""
    capacity_rows: int | None = None
    capacity_bytes: int | None = None
    lease_s: float = 60.0
    _leases: dict[int, _Held] = field(default_factory=dict)
    _ended: OrderedDict[int, tuple[str, int]] = field(default_factory=OrderedDict)  # leases: how, and with how many rows
    _operations: OrderedDict[str, tuple[int, Published]] = field(default_factory=OrderedDict)  # with a digest of what was published
    _totals: _Totals = field(default_factory=_Totals)
    _last: int = 0  # number of a lease

    def __post_init__(self) -> None:
        if not self.groups or len(set(self.groups)) < len(self.groups):
            raise ValueError(f"groups must be at least one, each once, got {list(self.groups)}")
        for name, limit in (("capacity_rows", self.capacity_rows), ("capacity_bytes", self.capacity_bytes), ("lease_s", self.lease_s)):
            if limit is not None and limit <= 0:
                raise ValueError(f"{name} must be positive, got {limit}")
        self.groups = tuple(self.groups)
        self._numbers = {name: number for number, name in enumerate(self.groups)}
        self._stock = Stock(self.groups, self.capacity_rows, self.capacity_bytes)

    # ---- rows come

    def published(self, operation: str, digest: int) -> Published | None:
        """What the operation was answered, if it was done before.

        Raises:
            SchemaError: it was, with other keys or fields.
        """
        done = self._operations.get(operation)
        if done is None:
            return None
        if done[0] != digest:
            raise SchemaError(f"operation {operation!r} was done before with other keys or fields; a retry must publish the same")
        self._totals.operations_repeated += 1
        return done[1]

    def publish(self, operation: str, what: Publication) -> Published | NoRoom:
        """Adds rows, or further fields of rows: all or nothing.

        Args:
            operation: names this publication: a retry with the same name changes nothing and is answered the same.

        Returns:
            NoRoom where new rows have to wait. Fields of rows that are there never wait: rows could not be completed, and so not leave.

        Raises:
            SchemaError: a key is there twice, a row has a field already, is unknown or would have none, a field is of another kind, a tag is
                no scalar, there are not as many tags as keys.
            StoreError: the partition is closed, and a row is new.
            StoreFullError: the new rows would not fit if nothing else was there.
        """
        if (done := self.published(operation, what.digest)) is not None:
            return done
        answer = self._stock.add(what)
        if isinstance(answer, Published):
            self._totals.rows_published += answer.new
            _remember(self._operations, operation, (what.digest, answer))
        return answer

    def close(self, partition: str | None) -> None:
        """No new rows come to the partition; None: to any. Who waits for more than there are gets what there is, and then nothing."""
        self._stock.close(partition)

    # ---- rows go

    def drop(self, partition: str) -> int:
        """Forgets a partition, also that it was closed: its rows go, whoever has them. Returns how many. Idempotent."""
        home = self._stock.partitions.get(partition)
        rows = list(home.rows.values()) if home is not None else []
        self._stock.remove(rows)
        self._stock.reopen(partition)
        self._totals.rows_dropped += len(rows)
        return len(rows)

    def retired(self) -> list[str]:
        """The fragments that no row uses any more. Each is told once."""
        return self._stock.retired()

    # ---- leases

    def take(
        self,
        group: str,
        consumer: str,
        now: float,
        *,
        fields: Collection[str] | None = None,
        partitions: Sequence[str] | None = None,
        at_least: int = 1,
        at_most: int | None = None,
        where: Where = _EVERY,
    ) -> Lease | None:
        """Leases rows that have all of the fields and that nobody of the group has or has acknowledged, in the order of their publication.

        Args:
            fields: None: those that the first of the rows has by now.
            partitions: one after the other; None: all.
            at_least: with fewer nothing is taken, unless the partitions are closed and no other rows can become ready.
            at_most: None: as many as there are.

        Returns:
            None if there are not enough by now; a lease without rows if there are none any more: the partitions are closed, and every row
            that meets the condition was acknowledged.

        Raises:
            ValueError: the group is unknown, or the numbers contradict each other.
            SchemaError: a tag cannot be compared with the condition.
        """
        if group not in self._numbers:
            raise ValueError(f"there is no group {group!r}; the groups are {list(self.groups)}")
        if at_least < 1 or (at_most is not None and at_most < at_least):
            raise ValueError(f"at_least must be positive and not more than at_most, got {at_least} and {at_most}")
        number, known = self._numbers[group], self._stock.partitions
        names = list(known) if partitions is None else list(dict.fromkeys(partitions))
        homes = [known[name] for name in names if name in known]
        closed = self._stock.is_closed(None) if partitions is None else all(map(self._stock.is_closed, names))
        if fields is None:
            first = _first(homes, number, frozenset(), 1, where)
            names = tuple(first[0].at) if first else ()
        else:
            names = tuple(fields)
        needed = frozenset(names)
        few = not closed and sum(len(home.view(number, needed)) for home in homes) < at_least
        chosen = [] if few else _first(homes, number, needed, at_most, where)
        if len(chosen) < at_least:
            waited_for = needed if fields is not None else frozenset()
            if not closed or _more_may_come(homes, number, waited_for, bool(chosen), where):
                return None
        return self._lease(number, consumer, now, names, chosen)

    def _lease(self, group: int, consumer: str, now: float, fields: tuple[str, ...], rows: list[Row]) -> Lease:
        deadline = now + self.lease_s
        if not rows:
            return Lease(0, self.groups[group], consumer, deadline, ())
        self._last += 1
        self._leases[self._last] = _Held(group, consumer, deadline, rows)
        for row in rows:
            row.held[group] = self._last
        for home, leaving in self._stock.by_partition(rows):
            home.withdraw(leaving, group)
        self._totals.rows_taken += len(rows)
        told = tuple(LeasedRow(row.partition, row.key, {name: row.at[name] for name in fields}, dict(row.tags)) for row in rows)
        return Lease(self._last, self.groups[group], consumer, deadline, told)

    def renew(self, lease: int, now: float) -> float:
        """The lease's new deadline.

        Raises:
            LeaseLostError: it has ended.
        """
        held = self._leases.get(lease)
        if held is None:
            raise self._lost(lease)
        held.deadline = now + self.lease_s
        return held.deadline

    def ack(self, lease: int) -> int:
        """The group needs the rows no more. Returns how many; a second time the same.

        Raises:
            LeaseLostError: the lease has ended otherwise, and others may have its rows.
        """
        how, rows = self._ended.get(lease, ("", 0))
        if how == "acknowledged":
            return rows
        if lease not in self._leases:
            raise self._lost(lease)
        held = self._leases.pop(lease)
        mine = _still_of(lease, held)
        for row in mine:
            row.held[held.group] = ACKNOWLEDGED
        finished = [row for row in mine if all(state == ACKNOWLEDGED for state in row.held)]
        self._stock.remove(finished)
        self._totals.rows_acknowledged += len(mine)
        self._totals.rows_finished += len(finished)
        _remember(self._ended, lease, ("acknowledged", len(mine)))
        return len(mine)

    def release(self, lease: int) -> int:
        """Gives the rows back, in their places. Returns how many; 0 if the lease has ended before."""
        return self._end(lease, "released") if lease in self._leases else 0

    def expire(self, now: float) -> int:
        """Ends the leases whose deadline has passed. Returns how many rows are free again."""
        return self._lose([lease for lease, held in self._leases.items() if held.deadline <= now], "past its deadline")

    def drop_consumer(self, consumer: str) -> int:
        """Ends the leases of a consumer that is gone. Returns how many rows are free again."""
        return self._lose([lease for lease, held in self._leases.items() if held.consumer == consumer], "its consumer was gone")

    def consumers(self) -> set[str]:
        """Those that have leases."""
        return {held.consumer for held in self._leases.values()}

    def _lose(self, leases: Collection[int], how: str) -> int:
        self._totals.leases_lost += len(leases)
        return sum(self._end(lease, how) for lease in leases)

    def _end(self, lease: int, how: str) -> int:
        held = self._leases.pop(lease)
        back = _still_of(lease, held)
        for row in back:
            row.held[held.group] = None
            self._stock.partitions[row.partition].offer(row, held.group)
        self._totals.rows_returned += len(back)
        _remember(self._ended, lease, (how, len(back)))
        return len(back)

    def _lost(self, lease: int) -> LeaseLostError:
        if lease not in self._ended:
            return LeaseLostError(f"lease {lease} is unknown, or has ended long ago: others may have its rows")
        how, rows = self._ended[lease]
        return LeaseLostError(f"lease {lease} of {rows} rows has ended ({how}): others may have its rows")

    # ---- looking

    def uses(self, fragment: str) -> bool:
        """Whether a row uses it."""
        return self._stock.uses(fragment)

    def list(self, partition: str | None = None) -> list[Listed]:
        """The rows of a partition, or of all, in the order of their publication."""
        return self._stock.list(partition)

    def stats(self) -> dict[str, int | None]:
        """Numbers of now, and totals since the beginning."""
        now = {
            "rows": self._stock.rows,
            "bytes": self._stock.nbytes,
            "capacity_rows": self.capacity_rows,
            "capacity_bytes": self.capacity_bytes,
            "partitions": len(self._stock.partitions),
            "fragments": self._stock.fragments,
            "leases": len(self._leases),
            "rows_leased": sum(len(_still_of(lease, held)) for lease, held in self._leases.items()),
        }
        return now | vars(self._totals)


def _first(homes: Sequence[Partition], group: int, needed: frozenset[str], most: int | None, where: Where) -> list[Row]:
    """The first rows that are ready and meet the condition."""
    out: list[Row] = []
    for home in homes:
        for row in home.view(group, needed):
            if len(out) == most:
                return out
            if where.holds(row.tags):
                out.append(row)
    return out


def _more_may_come(homes: Sequence[Partition], group: int, needed: frozenset[str], some: bool, where: Where) -> bool:
    """Whether a row waits for fields; or, unless some are ready, is in a lease that may give it back."""
    for row in (row for home in homes for row in home.rows.values()):
        held = row.held[group]
        waits = not needed <= row.at.keys() if held is None else held != ACKNOWLEDGED and not some
        if waits and where.holds(row.tags):
            return True
    return False


def _still_of(lease: int, held: _Held) -> list[Row]:
    """Without the rows that went meanwhile with their partition."""
    return [row for row in held.rows if row.held[held.group] == lease]


def _remember(answers: OrderedDict, name: object, answer: object) -> None:
    answers[name] = answer
    if len(answers) > _REMEMBERED:
        answers.popitem(last=False)
