"""`AsyncLoop`: rollout workers, learners and weights each go on as fast as they can, within the buffer's bounds."""

from __future__ import annotations

from mooncake_ray.loops.loop import Loop
from mooncake_ray.loops.metrics import StepReport

__all__ = ["AsyncLoop"]


class AsyncLoop(Loop):
    """Rollout workers sample while learners learn and weights move; engines are paused only while they take a version over. One version is on
    its way at a time: of those that are trained meanwhile, the last one is the next. How old samples may be, the buffer's `max_staleness` says.

    With `capacity_groups` of `groups_per_step * (max_staleness + 1)` hardly any sample becomes too old while it waits; with more, some are made
    for nothing. See `Loop`.
    """

    limited = False

    def _do(self, step: int) -> StepReport | None:
        begin = self._timeline.now_s
        self._weights.send_if_idle()
        waited = {"weights": self._timeline.now_s - begin}
        self._timeline.stalled("weights", waited["weights"])
        begin = self._timeline.now_s
        if (shares := self._take(step)) is None:
            return None
        waited["samples"] = self._timeline.now_s - begin
        done = self._learn(step, shares, waited)
        return done

    def _meanwhile(self) -> None:
        self._weights.send_if_idle()
