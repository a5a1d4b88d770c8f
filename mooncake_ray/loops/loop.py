"""What both loops have in common: rollout workers, learners, weights and a buffer between them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import ray

from mooncake_ray.errors import ConfigError, LearnerLostError, ObjectLostError, StoreError
from mooncake_ray.loops.exported import Exported
from mooncake_ray.loops.learners import Learners
from mooncake_ray.loops.metrics import LoopReport, StepReport, Timeline
from mooncake_ray.loops.producers import Producers
from mooncake_ray.loops.settings import LoopSettings
from mooncake_ray.loops.snapshots import LoopSnapshot, LoopSnapshots
from mooncake_ray.loops.weights import Weights
from mooncake_ray.rollout.buffer import RolloutBuffer
from mooncake_ray.rollout.lent import Share
from mooncake_ray.sync.group import WeightSyncGroup

__all__ = ["Loop"]

logger = logging.getLogger("mooncake_ray")

Actor = ray.actor.ActorHandle
_LOOK_S = 0.25  # between looks at everything else, while the learner waits for samples


class Loop(ABC):
    """In the driver, in one thread. `with` it, or `close` it."""

    limited: bool
    """Whether rollout workers make what a step needs, and no more."""

    def __init__(
        self,
        buffer: RolloutBuffer,
        weights: WeightSyncGroup,
        rollouts: Sequence[Actor],
        learners: Sequence[Actor],
        prompts: Callable[[int], Any],
        settings: LoopSettings,
        *,
        rewards: Sequence[Actor] = (),
        on_step: Callable[[StepReport], None] | None = None,
        snapshots: LoopSnapshots | None = None,
        resume: LoopSnapshot | None = None,
    ) -> None:
        """
        Args:
            buffer: An empty one, or that of the snapshot that is resumed. Its `capacity_groups` has room for a step's groups: the loop makes no
                more than these at a time.
            weights: Whose trainers are the learners' processes, and whose engines the rollout workers'.
            rollouts, learners, rewards: Actors with the methods that `mooncake_ray.loops.tasks` shows. Rollout workers and rewards that die are
                waited for if Ray starts them again, and done without otherwise.
            prompts: What the n-th group (from 0) is made from. It is asked again for a group that is made again.
            on_step: Called after every step.
            snapshots: Where one is written before the first step, and every `snapshot_every` steps: what learners save, the buffer, where the
                loop is. With these, learners may die: all ranks are started again (Ray must be allowed to) and go on from the last one; what
                was learned since is forgotten, its steps are done again with other groups, and no group is learned from twice. Without, their
                death is the end of `run`.
            resume: Where it goes on. `RolloutBuffer.create(…, restore=resume.buffer)` makes the buffer of it.

        Raises:
            ConfigError: something is missing, or the buffer has no room for a step.
        """
        if snapshots is not None and (newest := snapshots.latest()) is not None and (resume is None or resume.state.step < newest):
            raise ConfigError(
                f"there is a snapshot of step {newest} in {snapshots.directory} already: go on from it, or choose another folder"
            )
        asked = buffer.settings
        room = asked.capacity_groups
        if room is None or room < settings.groups_per_step:
            raise ConfigError(f"the buffer's capacity_groups must be at least {settings.groups_per_step}, for a step; it is {room}")
        self._buffer, self._settings, self._on_step = buffer, settings, on_step
        self._timeline = Timeline()
        self._learners = Learners(learners, buffer, settings, self._timeline)
        self._weights = Weights(weights, self._timeline, self._learners.check, settings.sync_timeout_s, settings.retries)
        self._snapshots, self._resumed = snapshots, resume
        self._falls = 0  # one after the other
        self.falls = 0
        """How often learners were lost, and went on from a snapshot."""
        self._producers = Producers(
            buffer,
            rollouts,
            rewards,
            prompts,
            settings,
            self._timeline,
            self._weights.are_everywhere,
            group_size=asked.group_size,
            first=0 if resume is None else resume.state.group,
            limited=self.limited,
        )
        self._exported = Exported(buffer.name)
        self._step = 0 if resume is None else resume.state.step
        self._stop = False
        self._has_begun = self._is_closed = False

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self._step

    @property
    def groups(self) -> int:
        """How many were begun."""
        return self._producers.next

    def run(self, steps: int) -> LoopReport:
        """Does so many steps, or fewer if `stop` is called. May be called again to go on.

        Raises:
            StoreError: the loop, or its buffer, is closed.
            WeightSyncError: weights could not be sent, `retries` times one after the other.
            LearnerLostError: a learner has died, or has not answered in time; and there are no snapshots, or it was so `retries` times one after
                the other. What the step had is for whoever takes that step again.
            ray.exceptions.RayError: a learner has failed; rollout workers, or rewards, have failed too often, or are all gone.
            OSError: a snapshot cannot be written.
        """
        if self._is_closed:
            raise StoreError("the loop is closed")
        report, begin, before = LoopReport(), self._timeline.now_s, self._counts()
        self._stop = False
        try:
            self._begin()
            end = self._step + steps
            while self._step < end and not self._stop:
                if not self._do_or_recover(report):
                    break
        finally:
            after = self._counts()
            after.subtract(before)
            report.seconds = self._timeline.now_s - begin
            report.stalls = {name: after[name] for name in ("samples", "weights", "room")}
            report.skipped, report.failures = int(after["skipped"]), int(after["failures"])
            report.pauses_s = self._weights.pauses_s[int(before["versions"]) :]
            report.timeline = [span for span in self._timeline.spans if span.end_s > begin]
        return report

    def _begin(self) -> None:
        if self._has_begun:
            return
        last = self._resumed
        self._learners.begin(None if last is None else last.learners)
        self._weights.begin(0 if last is None else last.state.version)
        if self._snapshots is not None and last is None:
            self._save()
        self._producers.start()
        self._has_begun = True

    def _do_or_recover(self, report: LoopReport) -> bool:
        """False: there is nothing to do any more."""
        try:
            if (done := self._do(self._step)) is None:
                return False
            self._step += 1
            if self._snapshots is not None and self._step % self._settings.snapshot_every == 0:
                self._save()
        except LearnerLostError as e:
            self._recover(e)
            report.steps = [step for step in report.steps if step.step < self._step]
            return True
        self._falls = 0
        report.steps.append(done)
        self._exported.step(done)
        self._exported.totals(self._timeline.stalls, self._weights.pauses_s, self._failures, self._weights.skipped)
        if self._on_step is not None:
            self._on_step(done)
        return True

    def _save(self) -> None:
        """Between two steps. Samples that are lost meanwhile are made again, and the snapshot is written when the next one is due."""
        step, seconds = self._step, self._settings.snapshot_timeout_s
        with self._timeline.span("learner", "snapshot"):
            try:
                self._snapshots.save(
                    step,
                    self._weights.version,
                    self._learners.save,
                    lambda folder: self._buffer.save(folder, step, timeout_s=seconds).groups_begun,
                )
            except ObjectLostError as e:
                logger.warning("mooncake_ray: there is no snapshot of step %d: %s", step, e)

    def _recover(self, error: LearnerLostError) -> None:
        """All learners go on from the last snapshot. Engines have had later weights, so what they have from now on is a later version, too."""
        while True:
            self._falls += 1
            self.falls += 1
            if self._snapshots is None or self._falls > self._settings.retries:
                raise error
            try:
                with self._timeline.span("learner", "recovery"), self._snapshots.open() as last:
                    logger.warning("mooncake_ray: the learners go on from step %d instead of %d: %s", last.state.step, self._step, error)
                    self._learners.begin_again(last.learners)
                    self._buffer.rewind(last.state.step)
                    self._step = last.state.step
                    self._weights.begin()
                return
            except LearnerLostError as e:
                error = e

    def stop(self) -> None:
        """`run` ends after the present step. From any thread."""
        self._stop = True

    def close(self) -> None:
        """Ends what is under way: groups that are not done are given back, and the last weights are with all engines. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._has_begun:
            self._producers.stop()
            self._weights.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif not self._is_closed:  # weights that could not be sent would hide what the block raised
            self._is_closed = True
            self._producers.stop()

    # ---- within

    @abstractmethod
    def _do(self, step: int) -> StepReport | None:
        """One step. None: there is nothing to learn from any more."""

    def _take(self, step: int) -> list[Share] | None:
        """Waits for samples; None if no more come, or `stop` was called."""
        begin = self._timeline.now_s
        try:
            while not self._stop:
                self._producers.check()
                if (shares := self._learners.take(step, self._weights.version, _LOOK_S)) is not None:
                    return shares if len(shares[0]) else None
                self._meanwhile()
            return None
        finally:
            self._timeline.stalled("samples", self._timeline.now_s - begin)

    @abstractmethod
    def _meanwhile(self) -> None:
        """What is looked after while there are no samples."""

    def _learn(self, step: int, shares: list[Share], waited: dict) -> StepReport:
        version, begin = self._weights.version, self._timeline.now_s
        ages = Counter(int(age) for share in shares for age in share.ages)
        queued = self._buffer.stats()["groups_queued"]
        said = self._learners.update(shares)
        update_s = self._timeline.now_s - begin
        self._weights.trained()
        return StepReport(step, version, shares[0].samples, dict(sorted(ages.items())), queued, update_s, waited, said)

    @property
    def _failures(self) -> int:
        return self._weights.failures + self._producers.failures + self.falls

    def _counts(self) -> Counter:
        numbers = {"skipped": self._weights.skipped, "failures": self._failures, "versions": len(self._weights.pauses_s)}
        return Counter({**self._timeline.stalls, **numbers})
