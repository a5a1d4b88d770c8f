"""What a loop asks of the actors that its user supplies, and what they answer. None of it has samples in it, only refs.

@ray.remote
class Rollout:
    def generate(self, task: RolloutTask) -> Rolled: ...            # any number of calls at once, as its concurrency allows

@ray.remote
class Reward:                                                       # optional
    def score(self, rolled: Rolled) -> Rolled: ...                  # `rolled.scored(…)`

@ray.remote
class Learner:                                                      # one for each rank, all of them called at once
    def update(self, batch: BatchRef, task: LearnerTask) -> Mapping[str, float]: ...
    def save(self, folder: str) -> None: ...                        # for snapshots: all ranks into the same folder, with what else they
    def restore(self, folder: str) -> None: ...                     # need to go on: the optimizer's state, random numbers

They join the loop's `WeightSyncGroup` in their `__init__`: one that Ray starts again is called when its engine has weights again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mooncake_ray.errors import SchemaError
from mooncake_ray.objects.batch_ref import BatchRef
from mooncake_ray.objects.batches import put_batch
from mooncake_ray.rollout.spans import VersionSpans

__all__ = ["LearnerTask", "Rolled", "RolloutTask"]


@dataclass(frozen=True)
class RolloutTask:
    """Groups to make, each of them whole."""

    uids: tuple[str, ...]
    prompts: tuple[Any, ...]
    """Of each group: what the loop's `prompts` gave for it."""
    begun: tuple[BatchRef | None, ...]
    """Of each group: the samples that somebody gave back before they were done. None: there are none."""
    group_size: int
    """Samples of a group."""


@dataclass(frozen=True)
class Rolled:
    """Samples that a rollout worker made. The batch is stored by whoever makes this, in its own node's pool."""

    batch: Any
    """What `put_batch` takes; it is stored at once, and this is its `BatchRef` then. A row for each sample."""
    uids: Sequence[str]
    """Of the group of each sample."""
    version: int | Sequence[int] | np.ndarray | VersionSpans
    """Of the weights that made it: see `RolloutBuffer.put`."""
    tokens: Sequence[int] | np.ndarray | None = None
    """What each sample costs to learn from."""
    tags: Mapping[str, Any] | None = None
    """Of each sample: for filters, metrics and reports. The mean of each is in the report of the step that learns from it."""
    priority: Sequence[float] | np.ndarray | None = None
    unfinished: frozenset[str] = frozenset()
    """Groups that are not done, as new weights came between, say: what there is of them goes back into the buffer, and whoever makes them
    further gets it as `RolloutTask.begun`."""

    def __post_init__(self) -> None:
        if not isinstance(self.batch, BatchRef):
            object.__setattr__(self, "batch", put_batch(self.batch))
        if len(self.batch) != len(self.uids):
            raise SchemaError(f"there are {len(self.uids)} uids and {len(self.batch)} rows")
        if unknown := self.unfinished - set(self.uids):
            raise SchemaError(f"groups are unfinished that have no rows: {sorted(unknown)}")

    def scored(self, columns: Any, tags: Mapping[str, Any] | None = None) -> Rolled:
        """With more columns (what `put_batch` takes, a row for each sample) and more tags. What is stored already is not copied."""
        return replace(self, batch=self.batch.append(columns), tags={**(self.tags or {}), **(tags or {})})

    def rows_of(self, uids: frozenset[str]) -> np.ndarray:
        """Numbers of the samples of these groups."""
        return np.flatnonzero([uid in uids for uid in self.uids])

    def take(self, rows: np.ndarray) -> Rolled:
        """Only these samples."""
        return replace(
            self,
            batch=self.batch[rows],
            uids=[self.uids[row] for row in rows],
            version=_rows(self.version, rows),
            tokens=_rows(self.tokens, rows),
            tags={name: np.asarray(column)[rows] for name, column in (self.tags or {}).items()},
            priority=_rows(self.priority, rows),
            unfinished=frozenset(),
        )


def _rows(values: Any, rows: np.ndarray) -> Any:
    if values is None or np.isscalar(values):
        return values
    return values.select(rows) if isinstance(values, VersionSpans) else np.asarray(values)[rows]


@dataclass(frozen=True)
class LearnerTask:
    """One rank's part of a step."""

    step: int
    version: int
    """Of the weights before the step; after it they are of the next one."""
    uids: tuple[str, ...]
    """Of the group of each sample of the rank's batch."""
    ages: np.ndarray
    """Of each sample: how many versions older than `version` the oldest token of its group is, int64."""
    replayed: np.ndarray
    """Whether each was learned from before, bool."""
    rank: int
    world: int
