"""What a loop does, through `ray.util.metrics`, and so through Ray's own Prometheus endpoint on the driver's node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray.util.metrics import Counter, Gauge, Histogram

from mooncake_ray.loops.metrics import Stall, StepReport

__all__ = ["Exported"]

_BUCKETS_S = [1e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0]
_PREFIX = "mooncake_ray_loop_"


class Exported:
    """Of one loop, told by its tag `Loop`. For one thread."""

    def __init__(self, loop: str) -> None:
        tags = ("Loop",)

        def made(kind: type, name: str, text: str, *more: object, own: tuple[str, ...] = ()) -> Counter | Gauge | Histogram:
            return kind(f"{_PREFIX}{name}", text, *more, (*tags, *own)).set_default_tags({"Loop": loop})

        self._steps = made(Counter, "steps", "Steps that learners have done")
        self._samples = made(Counter, "samples", "Samples that they learned from, by their age in versions", own=("age",))
        self._stalls = made(
            Counter, "stalled_seconds", "Waiting: learners for samples or weights, rollout workers for room, by why", own=("why",)
        )
        self._failures = made(Counter, "failures", "Calls of workers, versions and steps that were begun again")
        self._skipped = made(Counter, "skipped_versions", "Versions that no engine got, as the one before was on its way")
        self._version = made(Gauge, "version", "Of the weights that learners have")
        self._queued = made(Gauge, "queued_groups", "Groups that waited when the last step had taken its own")
        self._update = made(Histogram, "update_seconds", "Time that learners took for a step", _BUCKETS_S)
        self._pause = made(Histogram, "pause_seconds", "The longest that an engine was paused for a version", _BUCKETS_S)
        self._told: dict[str, float] = {}
        self._pauses = 0

    def step(self, step: StepReport) -> None:
        """It is done."""
        self._steps.inc()
        for age, samples in step.staleness.items():
            self._samples.inc(samples, {"age": str(age)})
        self._version.set(step.version + 1)
        self._queued.set(step.queued)
        self._update.observe(step.update_s)

    def totals(self, stalls: Mapping[Stall, float], pauses_s: Sequence[float], failures: int, skipped: int) -> None:
        """Since the loop began."""
        for why, seconds in stalls.items():
            if (more := self._more(f"stalls:{why}", seconds)) > 0:
                self._stalls.inc(more, {"why": why})
        for counter, name, total in ((self._failures, "failures", failures), (self._skipped, "skipped", skipped)):
            if (more := self._more(name, total)) > 0:
                counter.inc(more)
        for seconds in pauses_s[self._pauses :]:
            self._pause.observe(seconds)
        self._pauses = len(pauses_s)

    def _more(self, name: str, total: float) -> float:
        """Than there was the last time."""
        before, self._told[name] = self._told.get(name, 0.0), total
        return total - before
