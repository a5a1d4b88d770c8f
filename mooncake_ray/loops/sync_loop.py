"""`SyncLoop`: everybody waits for everybody. No sample is older than the weights that learn from it, but for those that a recovery finds in the
buffer: their bound is the buffer's `max_staleness`."""

from __future__ import annotations

from mooncake_ray.loops.loop import Loop
from mooncake_ray.loops.metrics import StepReport

__all__ = ["SyncLoop"]


class SyncLoop(Loop):
    """A step: its groups are made and scored, the learners learn from them, all engines get the weights. See `Loop`."""

    limited = True

    def _do(self, step: int) -> StepReport | None:
        self._buffer.advance(self._weights.version)
        self._ask_for_missing()
        begin = self._timeline.now_s
        if (shares := self._take(step)) is None:
            return None
        waited = {"samples": self._timeline.now_s - begin}
        done = self._learn(step, shares, waited)
        begin = self._timeline.now_s
        self._weights.send_if_idle()
        self._weights.wait()
        waited["weights"] = self._timeline.now_s - begin
        self._timeline.stalled("weights", waited["weights"])
        return done

    def _meanwhile(self) -> None:
        """Groups that filters have refused are made up for."""
        if self._producers.is_idle:
            self._ask_for_missing()

    def _ask_for_missing(self) -> None:
        found = self._buffer.stats()
        missing = self._settings.groups_per_step - found["groups_queued"] - found["groups_making"] - found["groups_waiting"]
        if missing > 0:
            self._producers.ask_for(missing)
