"""`Lookout`: looks at the group, the store and the nodes for however many people watch, and waits for none of them long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from mooncake_ray.serve.fill import node_pools
from mooncake_ray.serve.overview import StoredVersion, assemble
from mooncake_ray.serve.overview_model import Overview, Pin, Shortfall
from mooncake_ray.sync.group import WeightSyncGroup
from mooncake_ray.sync.report import GroupStatus
from mooncake_ray.weights.draft import MANIFEST
from mooncake_ray.weights.versions import version_name

if TYPE_CHECKING:
    from mooncake_ray.serve.desk import Desk

__all__ = ["Lookout", "Part"]

_FRESH_S = 0.5
_WAIT_S = 1.0
_ANSWER_S = 5.0
_NODES_EVERY_S = 2.0

T = TypeVar("T")


class Part(Generic[T]):
    """One thing that is looked at, by one thread at a time. What it said last stays when it says nothing any more."""

    def __init__(
        self, name: Literal["group", "store", "nodes"], look: Callable[[], T], empty: T, clock: Callable[[], float], every_s: float = 0.0
    ) -> None:
        """`every_s`: it is not looked at more often, as that costs others something."""
        self.name, self.value = name, empty
        self._look, self._clock, self._every_s = look, clock, every_s
        self._at: float | None = None  # when `value` was seen
        self._asked = float("-inf")
        self._error = ""
        self._future: Future[T] | None = None

    def begin(self, executor: ThreadPoolExecutor) -> list[Future[T]]:
        """Has it looked at, unless it is being so, or was just now. Returns what is to be waited for."""
        if self._future is None and self._clock() - self._asked >= self._every_s:
            self._asked = self._clock()
            self._future = executor.submit(self._look)
        return [] if self._future is None else [self._future]

    def settle(self) -> Shortfall | None:
        """Takes what was seen, if it was. Returns why it was not."""
        if self._future is not None and self._future.done():
            error = self._future.exception()
            if error is None:
                self.value, self._at, self._error = self._future.result(), self._asked, ""
            else:
                self._error = str(error) or type(error).__name__
            self._future = None
        late = self._future is not None
        if not late and not self._error:
            return None
        now = self._clock()
        why = self._error or f"no answer for {now - self._asked:.0f} s"
        return Shortfall(what=self.name, why=why, age_s=None if self._at is None else now - self._at)


class Lookout:
    """One of a replica. Thread-safe."""

    def __init__(self, desk: Callable[[], Desk], clock: Callable[[], float] = time.monotonic) -> None:
        """`desk`: the one that the replica has now."""
        self._desk, self._clock, self._name = desk, clock, desk().settings.group
        self._found: WeightSyncGroup | None = None
        self._sizes: dict[tuple[int, int], int] = {}  # bytes, by version and when it was made
        self._group: Part[GroupStatus | None] = Part("group", self._status, None, clock)
        self._store: Part[list[StoredVersion]] = Part("store", self._stored, [], clock)
        self._nodes: Part[Any] = Part("nodes", lambda: node_pools(_ANSWER_S), [], clock, _NODES_EVERY_S)
        self._executor = ThreadPoolExecutor(4, "mooncake_ray.lookout")
        self._lock = threading.Lock()
        self._seen: Future[Overview] | None = None
        self._seen_at = float("-inf")

    def look(self) -> Future[Overview]:
        """What is to be seen now, or was half a second ago: all who ask at once get the same."""
        with self._lock:
            if self._seen is None or (self._seen.done() and self._clock() - self._seen_at > _FRESH_S):
                self._seen = self._executor.submit(self._gather)
            return self._seen

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _gather(self) -> Overview:
        parts: list[Part[Any]] = [self._store, self._nodes, *([self._group] if self._name is not None else [])]
        wait([future for part in parts for future in part.begin(self._executor)], timeout=_WAIT_S)
        shortfalls = [s for part in parts if (s := part.settle()) is not None]
        self._seen_at = self._clock()
        values = self._group.value, self._store.value, self._nodes.value
        return assemble(time.time(), self._desk().name, self._name, *values, shortfalls)

    def _status(self) -> GroupStatus:
        found, self._found = self._found or WeightSyncGroup.find(self._name or ""), None
        status = found.status(timeout_s=_ANSWER_S)
        self._found = found  # until it fails: there may be another of that name then
        return status

    def _stored(self) -> list[StoredVersion]:
        desk, now = self._desk(), time.time()
        leases = {lease.pin: Pin(name=lease.holder or "a lease", left_s=lease.expires - now) for lease in desk.leases.of()}
        readers, found, sizes = desk.shelf.readers(), [], {}
        for entry in desk.listing():
            if not entry.whole:
                found.append(StoredVersion(entry.version, False))
                continue
            path = desk.store.directory / version_name(entry.version)
            try:
                made = (path / MANIFEST).stat().st_mtime_ns
                key = entry.version, made
                sizes[key] = self._sizes.get(key) or sum(f.stat().st_size for f in path.iterdir())
            except FileNotFoundError:
                continue  # it was deleted this moment
            pins = tuple(leases.get(pin) or Pin(name=pin, left_s=None) for pin in desk.store.pins(entry.version))
            age_s = max(0.0, now - made / 1e9)
            found.append(StoredVersion(entry.version, True, sizes[key], age_s, pins, readers.get(entry.version, 0)))
        self._sizes = sizes
        return found
