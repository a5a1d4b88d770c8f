"""What a loop has done, and who did what when."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["LoopReport", "Span", "Stall", "StepReport", "Timeline"]

Stall = Literal["samples", "weights", "room"]
"""Why somebody waited: the learner for samples; the learner for weights to be published, or (synchronously) to be everywhere; rollout workers
for room in the buffer."""

_MOST_SPANS = 100_000


@dataclass(frozen=True)
class Span:
    who: str
    """`rollout 3`, `learner`, `weights`."""
    what: str
    begin_s: float
    """Since the loop began."""
    end_s: float


@dataclass(frozen=True)
class StepReport:
    step: int
    version: int
    """Of the weights that it changed."""
    samples: int
    staleness: Mapping[int, int]
    """How many samples there were by the age of the oldest token of their group, in versions."""
    queued: int
    """Groups that waited in the buffer when the step had got its own."""
    update_s: float
    waited_s: Mapping[Stall, float]
    metrics: Mapping[str, float]
    """What the learners returned: the mean of all ranks."""


@dataclass
class LoopReport:
    """Of all steps of a loop, or of one `run` of it."""

    steps: list[StepReport] = field(default_factory=list)
    seconds: float = 0.0
    stalls: dict[Stall, float] = field(default_factory=dict)
    """Seconds. `room` is of all rollout workers' calls together."""
    pauses_s: list[float] = field(default_factory=list)
    """For each version that engines were brought to, the longest that one was paused."""
    skipped: int = 0
    """Versions that no engine got, as the one before was still on its way."""
    failures: int = 0
    """Calls of rollout workers, and versions, that were begun again."""
    timeline: list[Span] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return sum(step.samples for step in self.steps)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def utilisation(self) -> float:
        """The part of the time in which learners learned, 0 to 1."""
        return sum(step.update_s for step in self.steps) / self.seconds if self.seconds else 0.0

    @property
    def staleness(self) -> dict[int, int]:
        """How many samples were learned from, by the age of the oldest token of their group in versions."""
        out: dict[int, int] = {}
        for step in self.steps:
            for age, samples in step.staleness.items():
                out[age] = out.get(age, 0) + samples
        return dict(sorted(out.items()))


class Timeline:
    """Thread-safe. Keeps the last 100,000 spans."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._spans: deque[Span] = deque(maxlen=_MOST_SPANS)
        self._stalls: dict[Stall, float] = {}
        self._lock = threading.Lock()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._begin

    def add(self, who: str, what: str, begin_s: float) -> float:
        """What somebody has done since then. Returns how long it took."""
        end = self.now_s
        self._spans.append(Span(who, what, begin_s, end))
        return end - begin_s

    def stalled(self, why: Stall, seconds: float) -> None:
        with self._lock:
            self._stalls[why] = self._stalls.get(why, 0.0) + seconds

    @contextmanager
    def span(self, who: str, what: str) -> Iterator[None]:
        begin = self.now_s
        try:
            yield
        finally:
            self.add(who, what, begin)

    @property
    def spans(self) -> list[Span]:
        return list(self._spans)

    @property
    def stalls(self) -> dict[Stall, float]:
        with self._lock:
            return dict(self._stalls)
