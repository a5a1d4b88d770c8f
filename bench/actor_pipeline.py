"""Eight rollout actors return batches, one trainer reads them all: how long it takes, and how much memory all processes need together.

The driver passes on refs and nothing else. `time` is seconds from the first call to the trainer's last answer. `peak-memory` is the most
that was seen, every 20 ms of the same rounds, of: the private memory of every process of the Ray session (driver, daemons, workers, the
pool's broker), plus the shared memory of Ray's object store and of the pool, counted once (`bench.processes` has the details).
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.fleet import Fleet, note
from bench.pipeline_server import SUBJECTS
from bench.plans import one_step
from bench.processes import PeakMemory
from bench.report import Result, Target, compare, summarize

__all__ = ["BASELINES", "Step", "plan", "run", "targets"]

NAME = "actor_pipeline"
BASELINES = ("ray", "ray-zero-copy")
_ALL = ("ray", "ray-zero-copy", "pool")
_WARM_UPS = 1


@dataclass(frozen=True)
class Step:
    """One pipeline: so many actors, batches in a round, and bytes of a batch."""

    rollouts: int = 8
    batches: int = 32
    size: int = 32 << 20
    rounds: int = 7


def plan(sizes: Sequence[str] | None = None, *, quick: bool = False, runs: int | None = None) -> list[Step]:
    """What to run.

    Raises:
        ValueError: there are no sizes to choose from.
    """
    step = Step(rollouts=2, batches=8, size=1 << 20, rounds=2) if quick else Step()
    return one_step(NAME, step, sizes, runs)


def run(steps: Sequence[Step]) -> Iterator[list[Result]]:
    """Runs the steps; yields what each found."""
    rng = random.Random(1)
    with Fleet("bench.pipeline_server", SUBJECTS) as fleet:
        fleet.start(list(SUBJECTS))
        for step in steps:
            for subject in _ALL:  # one after the other: many processes start
                fleet.all([subject], do="load", rollouts=step.rollouts, size=step.size)
            seconds, peaks, idle = defaultdict(list), defaultdict(list), defaultdict(list)
            for n in range(-_WARM_UPS, step.rounds):
                began = time.monotonic()
                for subject in rng.sample(_ALL, len(_ALL)):
                    with PeakMemory(fleet.pid(subject)) as watch:
                        took = fleet.ask(subject, do="run", batches=step.batches)
                    if n >= 0:
                        seconds[subject].append(took)
                        peaks[subject].append(watch.peak)
                        idle[subject].append(watch.at_first)
                note(f"round {n + 1} of {step.rounds}: {time.monotonic() - began:.0f} s")
            yield [summarize(NAME, "time", s, seconds[s]) for s in _ALL]
            yield [summarize(NAME, "peak-memory", s, peaks[s], {"bytes_before": max(idle[s])}, "bytes") for s in _ALL]


def targets(results: Sequence[Result]) -> list[Target]:
    """What is asked of the package, and how near it came."""
    found = {(r.case, r.subject): r for r in results}

    def ratio(case: str, subject: str, limit: float) -> Target:
        return compare(f"pool / {subject}, {case}", found.get((case, "pool")), found.get((case, subject)), limit)

    return [ratio("time", "ray", 0.3), ratio("peak-memory", "ray", 1.0), ratio("peak-memory", "ray-zero-copy", 1.0)]
