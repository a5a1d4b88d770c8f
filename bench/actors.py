"""The actors between which batches move. Imported by Ray's workers too."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench import payloads, workloads

__all__ = ["BatchConsumer", "BatchProducer", "Consumer", "Producer", "Rollout", "Trainer"]


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


class BatchProducer:
    """Has some neighbouring rows of a batch."""

    def load(self, workload: str, number: int, workers: int) -> list[float]:
        """Makes the rows. Returns what identifies each."""
        batch = workloads.padded(workloads.build(workload))
        rows = len(batch) // workers
        self._batch = batch[np.arange(number * rows, (number + 1) * rows)]  # copies, so that the other rows can go
        return _marks(self._batch)

    def batch(self) -> Any:
        return self._batch

    def put(self) -> Any:
        import mooncake_ray

        return mooncake_ray.put_batch(self._batch)


class BatchConsumer:
    """Takes rows, reads all that is in them, and says which they are."""

    def take(self, batch: Any) -> list[float]:
        payloads.total(dict(batch.batch.items()))
        return _marks(batch)

    def get(self, ref: Any) -> list[float]:
        import mooncake_ray

        return self.take(mooncake_ray.get(ref))


def _marks(batch: Any) -> list[float]:
    """A number for each row that tells it from the others."""
    ids, log_probs = (batch.batch[name].numpy() for name in ("input_ids", "old_log_probs"))
    return (ids.sum(1, dtype=np.int64) + log_probs.sum(1, dtype=np.float64)).tolist()
