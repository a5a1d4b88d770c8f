"""`Books`: what is kept of a ledger beyond the life of its buffer, in a form that does not change with its classes."""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mooncake_ray.errors import ConfigError, SnapshotError
from mooncake_ray.rollout.group import Group
from mooncake_ray.rollout.ledger import Ledger
from mooncake_ray.rollout.records import Waiting
from mooncake_ray.rollout.settings import BufferSettings
from mooncake_ray.rollout.stock import Totals

__all__ = ["Books"]


@dataclass(frozen=True)
class Books:
    """Of a ledger of which nobody has anything. Groups are in the order in which the ledger has them."""

    group_size: int
    version: int
    closed: bool
    last_group: int
    last_ticket: int
    last_attempt: int
    committed: tuple[tuple[int, int], ...]
    """Steps, with how many samples. The last one was committed last."""
    staleness: Mapping[int, int]
    totals: Mapping[str, int]
    queued: tuple[Group, ...]
    waiting: tuple[Waiting, ...]
    replay: tuple[Group, ...]

    @classmethod
    def of(cls, ledger: Ledger) -> Books:
        """Raises ValueError: somebody has something. See `Ledger.take_back`."""
        if len(ledger.production) or len(ledger.consumption):
            raise ValueError(f"{len(ledger.production)} groups are being made, and {len(ledger.consumption)} steps have some")
        stock, consumption = ledger.stock, ledger.consumption
        return cls(
            stock.settings.group_size,
            stock.version,
            stock.closed,
            stock.last_group,
            ledger.production.last_ticket,
            consumption.last_attempt,
            tuple(consumption.committed.items()),
            dict(consumption.staleness),
            asdict(stock.totals),
            tuple(stock.queue),
            tuple(stock.waiting.values()),
            tuple(consumption.replay),
        )

    def ledger(self, settings: BufferSettings) -> Ledger:
        """A ledger that goes on from here. Other settings than those of before hold from now on: what is too old for them leaves the queue, and
        what is too much for the replay leaves that.

        Raises:
            ConfigError: groups are of another size.
        """
        if settings.group_size != self.group_size:
            raise ConfigError(f"the snapshot has groups of {self.group_size} samples, and group_size is {settings.group_size}")
        out = Ledger(settings)
        stock, consumption = out.stock, out.consumption
        stock.version, stock.closed, stock.last_group = self.version, self.closed, self.last_group
        stock.totals = Totals(**self.totals)
        out.production.last_ticket = self.last_ticket
        consumption.last_attempt, consumption.committed = self.last_attempt, OrderedDict(self.committed)
        consumption.staleness = dict(self.staleness)
        for group in self.queued:
            stock.again(group)
            stock.queue.add(group)
        for waiting in self.waiting:
            stock.again(waiting.group)
            stock.waiting[waiting.group.uid] = waiting
        for group in self.replay:
            stock.holdings.hold(group)
            for gone in consumption.replay.add(group):
                stock.holdings.let_go(gone)
        stock.sweep()
        out.retired()  # nobody has them yet
        return out

    def to_json(self) -> dict[str, Any]:
        """Raises SnapshotError: a tag has what cannot be kept."""
        return {
            "group_size": self.group_size,
            "version": int(self.version),
            "closed": self.closed,
            "last": [self.last_group, self.last_ticket, self.last_attempt],
            "committed": [[int(step), int(samples)] for step, samples in self.committed],
            "staleness": [[int(age), int(groups)] for age, groups in self.staleness.items()],
            "totals": {name: int(value) for name, value in self.totals.items()},
            "queued": [_plain(group) for group in self.queued],
            "waiting": [[waiting.reason, _plain(waiting.group)] for waiting in self.waiting],
            "replay": [_plain(group) for group in self.replay],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Books:
        return cls(
            data["group_size"],
            data["version"],
            data["closed"],
            *data["last"],
            tuple((step, samples) for step, samples in data["committed"]),
            dict(data["staleness"]),
            data["totals"],
            tuple(map(_group, data["queued"])),
            tuple(Waiting(_group(group), reason) for reason, group in data["waiting"]),
            tuple(map(_group, data["replay"])),
        )


def _plain(group: Group) -> dict[str, Any]:
    return {
        "uid": group.uid,
        "number": group.number,
        "rows": [[parcel, rows.tolist()] for parcel, rows in group.rows],
        "tokens": [group.tokens.dtype.str, group.tokens.tolist()],
        "oldest": int(group.oldest),
        "priority": float(group.priority),
        "nbytes": int(group.nbytes),
        "tags": {name: _column(column, f"tag {name!r} of group {group.uid!r}") for name, column in group.tags.items()},
    }


def _group(data: Mapping[str, Any]) -> Group:
    return Group(
        data["uid"],
        data["number"],
        [(parcel, np.array(rows, np.int64)) for parcel, rows in data["rows"]],
        np.array(data["tokens"][1], np.dtype(data["tokens"][0])),
        data["oldest"],
        data["priority"],
        data["nbytes"],
        {name: _array(column) for name, column in data["tags"].items()},
    )


def _column(column: np.ndarray, what: str) -> list[Any]:
    """An array as its dtype, its shape, and its bytes, or its objects where these are JSON."""
    if column.dtype == object:
        values = list(column.ravel())
        if (wrong := next((value for value in values if not _is_json(value)), None)) is not None:
            raise SnapshotError(f"{what} has a {type(wrong).__name__}; a snapshot keeps numbers, texts, None, and lists and dicts of them")
        return ["object", column.shape, values]
    if np.dtype(column.dtype.str) != column.dtype:
        raise SnapshotError(f"{what} is of {column.dtype}, which a snapshot cannot name")
    return [column.dtype.str, column.shape, base64.b64encode(column.tobytes()).decode()]


def _array(data: list[Any]) -> np.ndarray:
    dtype, shape, values = data
    if dtype != "object":
        return np.frombuffer(bytearray(base64.b64decode(values)), np.dtype(dtype)).reshape(shape)
    out = np.empty(len(values), object)
    for n, value in enumerate(values):
        out[n] = value
    return out.reshape(shape)


def _is_json(value: object) -> bool:
    """Whether it comes back from JSON as it is."""
    if type(value) is list:
        return all(map(_is_json, value))
    if type(value) is dict:
        return all(type(name) is str and _is_json(inner) for name, inner in value.items())
    return value is None or type(value) in (bool, int, float, str)
