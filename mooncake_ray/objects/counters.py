"""What this process routed, counted."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = ["count", "snapshot"]

_lock = threading.Lock()
_counts: Counter[str] = Counter()
_NAMES = ("adopted", "bytes_copied", "bytes_passed_on", "fallbacks", "opened", "routed")


def count(name: str, n: int = 1) -> None:
    with _lock:
        _counts[name] += n


def snapshot() -> dict[str, int]:
    """Totals of this process since it started; `fallbacks:<reason>` splits the fallbacks."""
    with _lock:
        return {**dict.fromkeys(_NAMES, 0), **_counts}
