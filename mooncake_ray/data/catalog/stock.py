"""The rows there are, by partition, and the fragments they lie in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mooncake_ray.data.catalog.records import Listed, NoRoom, Published
from mooncake_ray.data.catalog.rows import ACKNOWLEDGED, GONE, Partition, Row
from mooncake_ray.data.catalog.where import Tag, check_tags
from mooncake_ray.errors import SchemaError, StoreError, StoreFullError

__all__ = ["Publication", "Stock"]


@dataclass(frozen=True)
class Publication:
    """Rows, or further fields of rows."""

    partition: str
    keys: Sequence[str]
    """Of the rows, as they lie in the fragment."""
    fields: Mapping[str, str]
    """What the fragment has of them: name → kind. A field has one kind in all of a catalog."""
    fragment: str
    """A new name."""
    nbytes: int = 0
    """Of the fragment."""
    tags: Mapping[str, Tag] | Sequence[Mapping[str, Tag]] = ()
    """One mapping for all rows, or one for each; added to those that a row has, which they replace where they have one name."""
    overwrite: bool = False
    """Replace fields that a row has. A lease keeps what it was given."""
    create: bool = True
    """False: the rows must be there."""

    @property
    def digest(self) -> int:
        """Differs for other rows or fields."""
        return hash((self.partition, tuple(self.keys), tuple(sorted(self.fields))))

    def tags_of_rows(self) -> Sequence[Mapping[str, Tag]]:
        """One mapping a row. Raises SchemaError where they are not as many, or a tag is no scalar."""
        several = [self.tags] * len(self.keys) if isinstance(self.tags, Mapping) else list(self.tags) or [{}] * len(self.keys)
        if len(several) != len(self.keys):
            raise SchemaError(f"there are tags for {len(several)} rows, and {len(self.keys)} keys")
        for one in [self.tags] if isinstance(self.tags, Mapping) else several:
            check_tags(one)
        return several


@dataclass(slots=True)
class _Fragment:
    nbytes: int
    uses: int = 0  # fields of rows


@dataclass
class Stock:
    """Rows and fragments; who has which rows is not decided here. What a call refuses, it leaves as it was."""

    groups: Sequence[str]
    capacity_rows: int | None = None
    capacity_bytes: int | None = None
    partitions: dict[str, Partition] = field(default_factory=dict)
    """Those that have rows, in the order of their first ones."""
    rows: int = 0
    nbytes: int = 0
    _closed: set[str] = field(default_factory=set)
    _all_closed: bool = False
    _kinds: dict[str, str] = field(default_factory=dict)  # by field
    _fragments: dict[str, _Fragment] = field(default_factory=dict)
    _retired: list[str] = field(default_factory=list)
    _last: int = 0  # number of a row

    # ---- rows come

    def add(self, what: Publication) -> Published | NoRoom:
        """All of it, or nothing. See `Ledger.publish`."""
        told = what.tags_of_rows()
        home = self.partitions.get(what.partition)
        rows = [home.rows.get(key) if home is not None else None for key in what.keys]
        self._check(what, rows)
        new = sum(row is None for row in rows)
        if new and (refused := self._no_room(new, what.nbytes)) is not None:
            return refused
        if home is None:
            home = Partition()
            if new:
                self.partitions[what.partition] = home
        self._kinds.update(what.fields)
        record = self._fragments[what.fragment] = _Fragment(what.nbytes, len(what.keys) * len(what.fields))
        self.nbytes += what.nbytes
        self.rows += new
        for number, (key, row, more) in enumerate(zip(what.keys, rows, told, strict=True)):
            if row is None:
                self._last += 1
                row = home.rows[key] = Row(self._last, what.partition, key, len(self.groups))
            place = (what.fragment, number)
            for name in what.fields:
                if (before := row.at.get(name)) is not None:
                    self._unuse(before[0])
                row.at[name] = place
            row.tags.update(more)
            home.offer(row)
        if not record.uses:
            self._retire(what.fragment)
        return Published(new, len(rows) - new)

    def _check(self, what: Publication, rows: Sequence[Row | None]) -> None:
        if what.fragment in self._fragments:
            raise ValueError(f"fragment {what.fragment!r} is there already")
        for name, kind in what.fields.items():
            if self._kinds.get(name, kind) != kind:
                raise SchemaError(f"field {name!r} is {kind} in what is published, and {self._kinds[name]} in the catalog")
        seen: set[str] = set()
        for key in what.keys:
            if not isinstance(key, str):
                raise SchemaError(f"key {key!r} is a {type(key).__name__}, expected a str")
            if key in seen:
                raise SchemaError(f"key {key!r} is there twice in one publication")
            seen.add(key)
        for key, row in zip(what.keys, rows, strict=True):
            if row is None and not what.create:
                raise SchemaError(f"partition {what.partition!r} has no row {key!r}: it was never published, or has gone")
            if row is None and not what.fields:
                raise SchemaError(f"partition {what.partition!r} has no row {key!r}, and a new one needs a field")
            if row is None and self.is_closed(what.partition):
                raise StoreError(f"partition {what.partition!r} is closed, and row {key!r} would be new")
            if row is not None and not what.overwrite and (twice := what.fields.keys() & row.at.keys()):
                raise SchemaError(
                    f"row {key!r} of partition {what.partition!r} has field {min(twice)!r} already; pass overwrite=True to replace it"
                )

    def _no_room(self, rows: int, nbytes: int) -> NoRoom | None:
        counted = ((rows, self.rows, self.capacity_rows, "rows"), (nbytes, self.nbytes, self.capacity_bytes, "bytes"))
        for more, _, capacity, what in counted:
            if capacity is not None and more > capacity:
                raise StoreFullError(f"{more} {what} in one publication never fit into a catalog of {capacity} {what}")
        if all(capacity is None or used + more <= capacity for more, used, capacity, _ in counted):
            return None
        return NoRoom(rows, self.rows, self.capacity_rows, nbytes, self.nbytes, self.capacity_bytes)

    def close(self, partition: str | None) -> None:
        """No new rows come to the partition; None: to any."""
        if partition is None:
            self._all_closed = True
        else:
            self._closed.add(partition)

    def is_closed(self, partition: str | None) -> bool:
        """None: whether all are, those too that are not there."""
        return self._all_closed or partition in self._closed

    def reopen(self, partition: str) -> None:
        """Forgets that a partition was closed."""
        self._closed.discard(partition)

    # ---- rows go

    def remove(self, rows: Collection[Row]) -> None:
        """Takes rows out: some that every group has acknowledged, or all of a partition."""
        for row in rows:
            row.held = [GONE] * len(self.groups)
            for fragment, _ in row.at.values():
                self._unuse(fragment)
        for home, leaving in self.by_partition(rows):
            for row in leaving:  # in no view: a row goes when nobody can have it any more, or with its partition
                del home.rows[row.key]
            if not home.rows:
                del self.partitions[leaving[0].partition]
        self.rows -= len(rows)

    def by_partition(self, rows: Collection[Row]) -> Iterator[tuple[Partition, list[Row]]]:
        """Rows with the partitions they are in."""
        found: dict[str, list[Row]] = {}
        for row in rows:
            found.setdefault(row.partition, []).append(row)
        return ((self.partitions[name], several) for name, several in found.items())

    def _unuse(self, fragment: str) -> None:
        record = self._fragments[fragment]
        record.uses -= 1
        if not record.uses:
            self._retire(fragment)

    def _retire(self, fragment: str) -> None:
        self.nbytes -= self._fragments.pop(fragment).nbytes
        self._retired.append(fragment)

    def retired(self) -> list[str]:
        """The fragments that no row uses any more. Each is told once."""
        out, self._retired = self._retired, []
        return out

    # ---- looking

    def uses(self, fragment: str) -> bool:
        """Whether a row uses it."""
        return fragment in self._fragments

    @property
    def fragments(self) -> int:
        return len(self._fragments)

    def list(self, partition: str | None) -> list[Listed]:
        """See `Ledger.list`."""
        homes = self.partitions.values() if partition is None else [self.partitions.get(partition, Partition())]
        return [
            Listed(row.partition, row.key, dict(row.tags), tuple(row.at), dict(zip(self.groups, map(_state, row.held), strict=True)))
            for home in homes
            for row in home.rows.values()
        ]


def _state(held: int | None) -> str:
    return "free" if held is None else "acknowledged" if held == ACKNOWLEDGED else "leased"
