"""`Learners`: the ranks of a loop's learner, which all do a step at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import ray

from mooncake_ray.errors import ConfigError, GetTimeoutError
from mooncake_ray.loops.metrics import Timeline
from mooncake_ray.loops.settings import LoopSettings
from mooncake_ray.loops.tasks import LearnerTask
from mooncake_ray.rollout.buffer import RolloutBuffer
from mooncake_ray.rollout.lent import Share

__all__ = ["Learners"]


class Learners:
    """Of one thread."""

    def __init__(self, actors: Sequence[ray.actor.ActorHandle], buffer: RolloutBuffer, settings: LoopSettings, timeline: Timeline) -> None:
        if not actors:
            raise ConfigError("a loop needs at least one learner")
        self._actors, self._buffer, self._settings, self._timeline = list(actors), buffer, settings, timeline

    def take(self, step: int, version: int, timeout_s: float) -> list[Share] | None:
        """Each rank's share of what the step learns from. None: there is not enough within the time."""
        world = len(self._actors)
        shares = []
        for rank in range(world):
            try:
                shares.append(
                    self._buffer.take(
                        step,
                        version,
                        self._settings.groups_per_step,
                        rank=rank,
                        world=world,
                        replay=self._settings.replay,
                        timeout_s=timeout_s if rank == 0 else self._settings.update_timeout_s,
                    )
                )
            except GetTimeoutError:
                if rank:
                    raise
                return None
        return shares

    def update(self, shares: Sequence[Share]) -> Mapping[str, float]:
        """All ranks learn, and the step is committed. Returns the means of what they say.

        Raises:
            GetTimeoutError: a rank has not answered in time. The step is not committed.
            ray.exceptions.RayError: a rank has failed, or died. The step is not committed.
        """
        with self._timeline.span("learner", f"step {shares[0].step}"):
            world = len(shares)
            refs = [self._actors[rank].update.remote(share.ref, _task(share, rank, world)) for rank, share in enumerate(shares)]
            try:
                said = ray.get(refs, timeout=self._settings.update_timeout_s)
            except ray.exceptions.GetTimeoutError:
                late = [rank for rank, ref in enumerate(refs) if not ray.wait([ref], timeout=0)[0]]
                raise GetTimeoutError(
                    f"step {shares[0].step}: learner ranks {late} have not answered within {self._settings.update_timeout_s:g} s"
                ) from None
        self._buffer.commit(shares[0])
        names = dict.fromkeys(name for answer in said for name in answer or ())
        return {name: float(np.mean([answer[name] for answer in said if answer and name in answer])) for name in names}


def _task(share: Share, rank: int, world: int) -> LearnerTask:
    return LearnerTask(share.step, share.version, tuple(share.uids), share.ages, share.replayed, rank, world)
