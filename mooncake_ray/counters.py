"""What this process routed, counted and timed. Cheap: whoever exports it (see `metrics`) fetches it from time to time."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque

__all__ = ["count", "snapshot", "take", "timed", "timing", "took"]

_lock = threading.Lock()
_counts: Counter[str] = Counter()
_NAMES = ("adopted", "batch_bytes_read", "batch_bytes_written", "bytes_copied", "bytes_from_devices", "bytes_passed_on", "bytes_to_devices")
_NAMES += ("fallbacks", "opened", "routed")

_TIMES = 1 << 14  # kept of each kind until they are fetched; then the oldest go
_times: dict[str, deque[float]] = {
    "put": deque(maxlen=_TIMES),
    "get": deque(maxlen=_TIMES),
    "room": deque(maxlen=_TIMES),
    "remote": deque(maxlen=_TIMES),
    "publish": deque(maxlen=_TIMES),
    "stage": deque(maxlen=_TIMES),
    "pause": deque(maxlen=_TIMES),
}
_on = False


def count(name: str, n: int = 1) -> None:
    with _lock:
        _counts[name] += n


def snapshot() -> dict[str, int]:
    """Totals of this process since it started; `fallbacks:<reason>` splits the fallbacks."""
    with _lock:
        return {**dict.fromkeys(_NAMES, 0), **_counts}


class timed:
    """Notes how long a block took: a `put` or a `get` if it succeeds, the wait for `room` in any case."""

    __slots__ = ("_kind", "_started")

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if _on and (kind is None or self._kind == "room"):
            _times[self._kind].append(time.perf_counter() - self._started)


def took(kind: str, seconds: float) -> None:
    """Notes a time that is known already."""
    if _on:
        _times[kind].append(seconds)


def timing(on: bool) -> None:
    """Whether times are noted: only where somebody fetches them. Forgets those noted so far."""
    global _on
    _on = on
    for times in _times.values():
        times.clear()


def take(kind: str) -> list[float]:
    """The times in seconds noted since the last call."""
    times = _times[kind]
    return [times.popleft() for _ in range(len(times))]
