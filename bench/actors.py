"""The actors between which batches move. Imported by Ray's workers too."""

from __future__ import annotations

from typing import Any

from bench import payloads

__all__ = ["Consumer", "Producer", "Rollout", "Trainer"]


class Producer:
    """Holds a payload, and returns it whenever asked."""

    _value: Any = None
    _arrays: Any = None

    def load(self, name: str | None) -> float:
        """Builds the payload of that name, and returns its probe; None lets go of the last one."""
        self._value = self._arrays = None
        if name is None:
            return 0.0
        self._value = payloads.build(name)
        self._arrays = payloads.as_numpy(self._value)
        return payloads.probe(self._value)

    def batch(self, arrays: bool) -> Any:
        return self._arrays if arrays else self._value


class Consumer:
    """Takes a batch."""

    def probe(self, batch: Any) -> float:
        return payloads.probe(batch)


class Rollout:
    """Makes batches, each with rewards of its own."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._batch = payloads.rollout(size, 0)

    def generate(self, number: int) -> Any:
        return {**self._batch, "rewards": payloads.rewards(self._size, number)}


class Trainer:
    """Reads batches as a trainer does: all of them."""

    def train(self, batch: Any) -> float:
        return payloads.total(batch)
