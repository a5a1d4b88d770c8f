"""`Versions`: which versions a group has, and which one it is at. What a coordinator must not forget lies in Ray's key-value store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass

from ray.experimental import internal_kv

from mooncake_ray.errors import StaleVersionError
from mooncake_ray.sync.messages import Contents, Manifest

__all__ = ["Edition", "Versions"]

_SPACE = b"mooncake_ray"
_OPERATIONS = 16  # remembered
_EPOCHS = 64  # taken at a time


@dataclass(frozen=True)
class Edition:
    """A version that is published, or is being."""

    manifest: Manifest
    contents: asyncio.Future[Contents]
    """Once all of it is written; or why it is not."""


class Versions:
    """Of one group. For coroutines of one loop."""

    def __init__(self, group: str, job: str) -> None:
        self._group, self._key = group, f"sync:{job}:{group}".encode()
        known = json.loads(internal_kv._internal_kv_get(self._key, namespace=_SPACE) or b"{}")
        self.epoch: int = known.get("epoch", 0)
        """Of the last update."""
        self._epochs = self.epoch  # numbers that are taken, so that a restarted actor begins with a new one
        self.current: int = known.get("version", -1)
        """That engines were brought to."""
        self.engines: frozenset[str] = frozenset(known.get("engines", ()))
        """Names of those that there are, or were when this actor was restarted."""
        self._operations: dict[str, int] = known.get("operations", {})
        self.editions: dict[int, Edition] = {}

    @property
    def latest(self) -> int:
        """The newest version there is."""
        return max([self.current, *self.editions])

    def number(self, version: int | None, operation: str, *, fresh: bool, held: int) -> int:
        """The version an operation is about: the same one if it is asked for again, after this actor was restarted.

        Args:
            version: That it asks for.
            fresh: Unless it asks for one, it is about one that is not published yet.
            held: The version that the trainers who are there have published; -1: none.

        Raises:
            StaleVersionError: it asks for an old one.
        """
        if operation in self._operations:
            return self._operations[operation]
        latest = self.latest
        if version is None:
            number = latest if not fresh and latest > self.current and latest == held else latest + 1
        elif version > latest or version in self.editions or (version == self.current and not fresh):
            number = version
        else:
            raise self.stale(version)
        self._operations = dict(list(self._operations.items())[1 - _OPERATIONS :]) | {operation: number}
        self._save()
        return number

    def stale(self, version: int) -> StaleVersionError:
        return StaleVersionError(f"version {version} is not newer than {self.latest}, the last one of group {self._group}")

    def next_epoch(self) -> int:
        self.epoch += 1
        if self.epoch > self._epochs:
            self._epochs = self.epoch + _EPOCHS
            self._save()
        return self.epoch

    def at(self, version: int) -> None:
        """Engines were brought there: older ones are of no use to anybody."""
        if version > self.current:
            self.current = version
            self._save()
        self.editions = {v: edition for v, edition in self.editions.items() if v >= version}

    def remember(self, engines: Iterable[str]) -> None:
        """That these are there."""
        if (now := frozenset(engines)) != self.engines:
            self.engines = now
            self._save()

    def forget(self) -> None:
        """The group is over."""
        internal_kv._internal_kv_del(self._key, namespace=_SPACE)

    def _save(self) -> None:
        state = {"epoch": self._epochs, "version": self.current, "operations": self._operations, "engines": sorted(self.engines)}
        internal_kv._internal_kv_put(self._key, json.dumps(state).encode(), overwrite=True, namespace=_SPACE)
