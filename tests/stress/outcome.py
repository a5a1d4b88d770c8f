"""What a long run did, and what it found wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.fleet import note

__all__ = ["Outcome", "eventually", "note"]

_SETTLE_S = 60.0


def eventually(condition: Callable[[], Any], within_s: float = _SETTLE_S) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@dataclass
class Outcome:
    """Counts of one run. It was good if nothing is among the violations."""

    name: str
    seed: int
    counts: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    interrupted: bool = False

    def demand(self, holds: object, otherwise: str) -> None:
        """Notes a violation unless something holds."""
        if not holds:
            self.violations.append(otherwise)
            note(f"VIOLATION: {otherwise}")

    def as_json(self) -> str:
        ok = not self.violations and not self.interrupted
        return json.dumps(
            {"run": self.name, "ok": ok, "interrupted": self.interrupted, "seed": self.seed, **self.counts, "violations": self.violations}
        )

    def summary(self) -> str:
        how = "interrupted" if self.interrupted else "FAILED" if self.violations else "ok"
        lines = [f"{self.name}: {how} (seed {self.seed})"]
        lines += [f"  {name:<24} {value:,}" if isinstance(value, int) else f"  {name:<24} {value}" for name, value in self.counts.items()]
        lines += [f"  violation: {text}" for text in self.violations]
        return "\n".join(lines)

    @property
    def status(self) -> int:
        """For the shell."""
        return 130 if self.interrupted else 1 if self.violations else 0
