"""`Learners`: the ranks of a loop's learner, which all do a step at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from mooncake_ray.errors import ConfigError, GetTimeoutError, LearnerLostError, ObjectLostError
from mooncake_ray.loops.metrics import Timeline
from mooncake_ray.loops.settings import LoopSettings
from mooncake_ray.loops.tasks import LearnerTask
from mooncake_ray.objects.processes import this_process
from mooncake_ray.rollout.buffer import RolloutBuffer
from mooncake_ray.rollout.lent import Share

__all__ = ["Learners"]

logger = logging.getLogger("mooncake_ray")

_GRACE_S = 10.0  # for the other ranks to say why they failed
_LOOK_S = 0.5
_LOST = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ObjectLostError)


class Learners:
    """Of one thread."""

    def __init__(self, actors: Sequence[ray.actor.ActorHandle], buffer: RolloutBuffer, settings: LoopSettings, timeline: Timeline) -> None:
        if not actors:
            raise ConfigError("a loop needs at least one learner")
        self._actors, self._buffer, self._settings, self._timeline = list(actors), buffer, settings, timeline
        self._processes: list[str] = []

    def begin(self, folder: Path | None) -> None:
        """Waits until all are there, and have restored what is in a snapshot's folder. From now on they are not to be others.

        Raises:
            LearnerLostError: one has died, or does not answer.
        """
        self._processes = []
        self._processes = self._all(
            "to begin", [actor.__ray_call__.remote(_who) for actor in self._actors], self._settings.snapshot_timeout_s
        )
        if folder is not None:
            restored = [actor.restore.remote(str(folder)) for actor in self._actors]
            self._all("to restore what it had", restored, self._settings.snapshot_timeout_s)

    def begin_again(self, folder: Path) -> None:
        """Has Ray start all of them again, also those that live: they may wait for a dead one for ever. Raises as `begin`."""
        for actor in self._actors:
            ray.kill(actor, no_restart=False)
        end = time.monotonic() + self._settings.snapshot_timeout_s
        while True:
            try:
                return self.begin(folder)
            except LearnerLostError as e:
                if not isinstance(e.__cause__, ray.exceptions.ActorUnavailableError) or time.monotonic() > end:
                    raise
            time.sleep(_LOOK_S)  # it is being started

    def check(self) -> None:
        """Raises LearnerLostError: Ray has started one again, and nobody has told it what it had."""
        self._all("to say who it is", [], _GRACE_S)

    def save(self, folder: Path) -> None:
        """All write what they have. Raises LearnerLostError."""
        self._all("to save what it has", [actor.save.remote(str(folder)) for actor in self._actors], self._settings.snapshot_timeout_s)

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
            LearnerLostError: the step is not committed.
            ray.exceptions.RayTaskError: a rank's own error. The step is not committed.
        """
        step, world = shares[0].step, len(shares)
        with self._timeline.span("learner", f"step {step}"):
            refs = [self._actors[rank].update.remote(share.ref, _task(share, rank, world)) for rank, share in enumerate(shares)]
            said = self._all(f"to learn, step {step}", refs, self._settings.update_timeout_s)
        self._buffer.commit(shares[0])
        names = dict.fromkeys(name for answer in said for name in answer or ())
        return {name: float(np.mean([answer[name] for answer in said if answer and name in answer])) for name in names}

    def _all(self, what: str, refs: list[ray.ObjectRef], timeout_s: float) -> list[Any]:
        """What all ranks answer, if they are who they were; a new one has begun with something else, and answers all the same."""
        asked = [*refs, *(actor.__ray_call__.remote(_who) for actor in self._actors if self._processes)]
        try:
            said = ray.get(asked, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as e:
            late = sorted({n % len(self._actors) for n, ref in enumerate(asked) if not ray.wait([ref], timeout=0)[0]})
            raise LearnerLostError(f"learner ranks {late} had {timeout_s:g} s {what}, and have not answered") from e
        except ray.exceptions.RayError as e:
            if (death := _death(asked, e)) is None:
                raise
            raise LearnerLostError(f"a learner rank died, or lost what it needed, {what}: {death}") from death
        if self._processes and said[len(refs) :] != self._processes:
            raise LearnerLostError(f"learner ranks {self._processes} are {said[len(refs) :]} now, and have not got what those had")
        return said[: len(refs)]


def _death(asked: Sequence[ray.ObjectRef], first: ray.exceptions.RayError) -> Exception | None:
    """Why an answer is missing, if a rank has died or lost its samples: others may have failed because of it. None: nothing like that."""
    errors = [first]
    for ref in ray.wait(list(asked), num_returns=len(asked), timeout=_GRACE_S)[0]:
        try:
            ray.get(ref)
        except ray.exceptions.RayError as e:
            errors.append(e)
    causes = [e.cause if isinstance(e, ray.exceptions.RayTaskError) else e for e in errors]
    return next((e for e in causes if isinstance(e, _LOST)), None)


def _who(_: Any) -> str:
    return this_process()


def _task(share: Share, rank: int, world: int) -> LearnerTask:
    return LearnerTask(share.step, share.version, tuple(share.uids), share.ages, share.replayed, rank, world)
