"""How tests wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["DEADLINE_S", "eventually"]

DEADLINE_S = 200.0


def eventually(condition: Callable[[], Any], what: object = "the condition") -> Any:
    """Polls until the condition holds, and returns what it returned. The deadline only turns a hang into a failure."""
    end = time.monotonic() + DEADLINE_S
    while not (result := condition()):
        assert time.monotonic() < end, f"never came true: {what() if callable(what) else what}"
        time.sleep(0.002)
    return result
