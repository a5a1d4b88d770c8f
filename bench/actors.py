"""The two actors between which a batch moves. Imported by Ray's workers too."""

from __future__ import annotations

from typing import Any

from bench import payloads

__all__ = ["Consumer", "Producer"]


class Producer:
    """Holds a payload, and returns it whenever asked."""

    def load(self, name: str | None) -> None:
        """Builds the payload of that name; None lets go of the last one."""
        self._value = None
        self._value = payloads.build(name) if name else None
        self._arrays = payloads.as_numpy(self._value) if name else None

    def batch(self, arrays: bool) -> Any:
        return self._arrays if arrays else self._value


class Consumer:
    """Takes a batch."""

    def probe(self, batch: Any) -> float:
        return payloads.probe(batch)
