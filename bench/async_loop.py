"""The same job of reinforcement learning, synchronously and asynchronously, and on Ray's store in the form of Miles.

Rollout workers sleep for as long as their longest response takes, drawn from a distribution with a long tail; learners sleep for their tokens.
What they hand on is real: samples, which learners copy into memory of their own, and weights. Subjects `sync` and `async` are this package's
loops; `ray-async` has its samples in a list in one actor, and them and the weights in Ray's store. `samples-per-s` and `utilisation` (the part
of the time that learners' accelerators are busy) are of steps after those that could have been waiting. `overhead` is seconds that a buffer
takes for 1,000 samples, which are tiny and stored before: to make room for them, to put, take and commit them.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.async_rl.job import JOBS
from bench.async_rl.server import SUBJECTS
from bench.fleet import Fleet, note
from bench.report import Result, Target, compare, summarize

__all__ = ["BASELINES", "Step", "plan", "run", "targets"]

NAME = "async_loop"
BASELINES = ("ray-async", "sync")
_ALL = ("sync", "async", "ray-async")
_OVERHEAD_S = 1e-3
_OVERHEAD = "overhead/1000-samples"


@dataclass(frozen=True)
class Step:
    """One job."""

    job: str
    rounds: int = 3
    steps: int = 6
    """Of a round."""


def plan(sizes: Sequence[str] | None = None, *, quick: bool = False, runs: int | None = None) -> list[Step]:
    """What to run.

    Raises:
        ValueError: there is no job of that name.
    """
    if unknown := [size for size in sizes or () if size not in JOBS]:
        raise ValueError(f"no job {unknown[0]!r}; there are {', '.join(JOBS)}")
    if quick:
        return [Step(job, runs or 1, 3) for job in sizes or ("quick",)]
    return [Step(job, runs or Step.rounds) for job in sizes or ("1GB", "24MB")]


def run(steps: Sequence[Step]) -> Iterator[list[Result]]:
    """Runs the jobs; yields what each found."""
    rng = random.Random(1)
    for number, step in enumerate(steps):
        with Fleet("bench.async_rl.server", SUBJECTS, step.job) as fleet:
            fleet.start(list(SUBJECTS))
            for subject in _ALL:  # one after the other: many processes start
                fleet.all([subject], do="load")
            rounds, overheads = defaultdict(list), defaultdict(list)
            for n in range(step.rounds):
                began = time.monotonic()
                for subject in rng.sample(_ALL, len(_ALL)):
                    rounds[subject].append(fleet.ask(subject, do="run", steps=step.steps))
                    if number == 0 and subject != "sync":
                        overheads[subject].append(fleet.ask(subject, do="overhead", times=5))
                note(f"{step.job}, round {n + 1} of {step.rounds}: {time.monotonic() - began:.0f} s")
        yield [
            summarize(NAME, f"samples-per-s/{step.job}", s, [r["samples"] / r["seconds"] for r in rounds[s]], unit="samples/s")
            for s in _ALL
        ]
        yield [
            summarize(NAME, f"utilisation/{step.job}", s, [r["busy_s"] / r["seconds"] for r in rounds[s]], unit="fraction") for s in _ALL
        ]
        if overheads:
            yield [summarize(NAME, _OVERHEAD, s, overheads[s]) for s in _ALL if s in overheads]


def targets(results: Sequence[Result]) -> list[Target]:
    """What is asked of the package, and how near it came."""
    found = {(r.case, r.subject): r for r in results}
    jobs = dict.fromkeys(r.case.partition("/")[2] for r in results if r.case.startswith("samples-per-s/"))
    out = []
    for job in jobs:
        sync, ours, ray = (found[f"samples-per-s/{job}", s] for s in _ALL)
        out.append(compare(f"async / sync, samples/s, {job}", ours, sync, 1.6, at_least=True))
        if job == "1GB":
            out.append(compare(f"async / ray-async, samples/s, {job}", ours, ray, 2.0, at_least=True))
    allowed = Result(NAME, _OVERHEAD, "1 ms", _OVERHEAD_S, _OVERHEAD_S, 1, unit="s")
    return [*out, compare("overhead / 1 ms for 1,000 samples", found.get((_OVERHEAD, "async")), allowed, 1.0)]
