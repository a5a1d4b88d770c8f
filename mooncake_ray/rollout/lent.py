"""`Ticket` and `Share`: what a buffer lends to producers and to learners."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mooncake_ray.errors import MooncakeRayError
from mooncake_ray.objects.batch_ref import BatchRef
from mooncake_ray.objects.renewals import Kept
from mooncake_ray.rollout.answers import GivenShare, GivenWork, joined
from mooncake_ray.rollout.records import Brought, Reason

if TYPE_CHECKING:
    from mooncake_ray.rollout.buffer import RolloutBuffer, Version

__all__ = ["Share", "Ticket", "Work"]

logger = logging.getLogger("mooncake_ray")


@dataclass(frozen=True)
class Work:
    """A group to make again, or further."""

    uid: str
    reason: Reason
    ref: BatchRef | None
    """What there is of it. None: nothing."""
    oldest: int
    """The version that made the oldest token of that."""


class Ticket(Kept):
    """Groups that this process makes. `with` it: what was not brought at the end is given back, for others. Of this process alone."""

    def __init__(self, buffer: RolloutBuffer, number: int, uids: tuple[str, ...], works: tuple[GivenWork, ...]) -> None:
        super().__init__(buffer)
        self.buffer, self.number, self.uids = buffer, number, uids
        self.works = tuple(Work(work.uid, work.reason, joined(work.pieces), work.oldest) for work in works)
        """What there was of the groups before, where they were resumed. They are brought whole, nevertheless."""
        self._left = len(uids)  # groups of which it is not known that they have ended
        self._counted: set[str] = set()
        self._lock = threading.Lock()

    @property
    def lease(self) -> tuple[str, int, int]:
        return "ticket", self.number, 0

    def __repr__(self) -> str:
        return f"Ticket({self.number}, {len(self.uids)} groups)"

    def put(
        self,
        batch: Any,
        *,
        uids: Sequence[str],
        version: Version,
        tokens: Sequence[int] | np.ndarray | None = None,
        priority: Sequence[float] | np.ndarray | None = None,
        tags: Mapping[str, Any] | None = None,
        operation_id: str | None = None,
    ) -> Brought:
        """Brings samples of its groups, each group in as many parts as is convenient. Never waits for room. Arguments: see `RolloutBuffer.put`.

        Raises:
            LeaseLostError: a group is not this ticket's, or not any more.
            SchemaError: see `RolloutBuffer.put`.
        """
        parcel = self.buffer._parcel(batch, uids, version, tokens, priority, tags, operation_id)
        brought = self.buffer._put(parcel, self.number, None)
        self._ended(parcel[0], brought.whole + brought.filtered)
        return brought

    def park(
        self,
        batch: Any,
        *,
        uids: Sequence[str],
        version: Version,
        operation_id: str | None = None,
    ) -> None:
        """Gives back groups that are not done, with all there is of each: whoever resumes them goes on from that.

        Raises:
            LeaseLostError: a group is not this ticket's, or not any more.
        """
        parcel = self.buffer._parcel(batch, uids, version, None, None, None, operation_id)
        self.buffer._call("park", *parcel, self.number)
        self._ended(parcel[0], len(set(uids)))

    def give_back(self, uids: Sequence[str] | None = None) -> None:
        """Lets others make groups (None: all that were not brought). Idempotent."""
        self._end("give_back", uids)

    def cancel(self, uids: Sequence[str] | None = None) -> None:
        """Nobody is to make groups (None: all that were not brought). Idempotent."""
        self._end("cancel", uids)

    def _ended(self, operation: str, groups: int) -> None:
        """So many of them; a second call of that name has ended no more. A ticket that all groups have left is over."""
        with self._lock:
            if operation not in self._counted:
                self._counted.add(operation)
                self._left -= groups
                self.over = self.over or self._left <= 0

    def _end(self, how: str, uids: Sequence[str] | None) -> None:
        before, self.over = self.over, self.over or uids is None
        try:
            self.buffer._call("do", "production", how, self.number, None if uids is None else list(uids))
        except BaseException:
            self.over = before
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.over:
            return
        try:
            self.give_back()
        except MooncakeRayError as e:
            if kind is None:
                raise
            logger.warning("mooncake_ray: %r could not be given back: %s", self, e)  # what the block raised is what counts


class Share(Kept):
    """What one learner rank learns from in a step. Of this process alone; its `ref` may go anywhere."""

    def __init__(self, buffer: RolloutBuffer, given: GivenShare) -> None:
        super().__init__(buffer, over=not given.samples)
        self.buffer = buffer
        self.step, self.version, self.attempt, self.samples = given.step, given.version, given.attempt, given.samples
        self.uids, self.groups, self.ages, self.replayed = given.uids, given.groups, given.ages, given.replayed
        self.ref: BatchRef | None = joined(given.pieces)
        """The samples. None if there are none: no more come."""

    @property
    def lease(self) -> tuple[str, int, int]:
        return "step", self.step, self.attempt

    def __len__(self) -> int:
        return len(self.uids)

    def __repr__(self) -> str:
        return f"Share({len(self)} of {self.samples} samples, step={self.step}, version={self.version})"
