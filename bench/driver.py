"""Eight producers make an eighth of a batch each, eight consumers take an eighth each, and every consumer needs rows of all producers.

`pool`: producers put their batches, the driver joins the refs, selects rows and passes refs on. `verl`, on plain Ray: the driver gets the
batches, joins them, reorders the rows, cuts them and passes the pieces on, as verl's trainer does. Consumers get verl batches either way, and
read every tensor. `end-to-end` is seconds from the first call to the last consumer's answer. `driver-bytes` is what the driver got and passed
on, as bytes of what Ray pickles of it; beside it, by how much the driver's memory, private and shared, had risen since before the first batch.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench import plans, workloads
from bench.driver_server import SUBJECTS
from bench.fleet import Fleet, note
from bench.report import Result, Target, compare, summarize

__all__ = ["BASELINES", "Step", "plan", "run", "targets"]

NAME = "driver"
BASELINES = ("verl",)
_ALL = ("verl", "pool")
_WARM_UPS = 1
_DRIVER_BYTES = 1 << 20


@dataclass(frozen=True)
class Step:
    """One batch, between so many producers and as many consumers."""

    workload: str = "M256"
    workers: int = 8
    rounds: int = 7


def plan(sizes: Sequence[str] | None = None, *, quick: bool = False, runs: int | None = None) -> list[Step]:
    """What to run.

    Raises:
        ValueError: there is no workload of that name, or more than one is asked for.
    """
    workload = plans.one_workload(NAME, sizes)
    step = Step("S64", workers=2, rounds=2) if quick else Step()
    return [Step(workload or step.workload, step.workers, runs or step.rounds)]


def run(steps: Sequence[Step]) -> Iterator[list[Result]]:
    """Runs the steps; yields what each found."""
    rng = random.Random(1)
    for step in steps:
        largest = workloads.padded_bytes(workloads.WORKLOADS[step.workload])
        with Fleet("bench.driver_server", SUBJECTS, largest) as fleet:
            fleet.start(list(SUBJECTS))
            for subject in _ALL:  # one after the other: many processes start
                fleet.all([subject], do="load", workload=step.workload, workers=step.workers)
            rounds = defaultdict(list)
            for n in range(-_WARM_UPS, step.rounds):
                began = time.monotonic()
                for subject in rng.sample(_ALL, len(_ALL)):
                    found = fleet.ask(subject, do="run")
                    if n >= 0:
                        rounds[subject].append(found)
                note(f"round {n + 1} of {step.rounds}: {time.monotonic() - began:.0f} s")
        yield [summarize(NAME, "end-to-end", s, [r["seconds"] for r in rounds[s]]) for s in _ALL]
        yield [
            summarize(
                NAME, "driver-bytes", s, [r["bytes"] for r in rounds[s]], {"memory_growth": max(r["growth"] for r in rounds[s])}, "bytes"
            )
            for s in _ALL
        ]


def targets(results: Sequence[Result]) -> list[Target]:
    """What is asked of the package, and how near it came."""
    found = {(r.case, r.subject): r for r in results}
    passed = found.get(("driver-bytes", "pool"))
    allowed = Result(NAME, "driver-bytes", "1 MiB", _DRIVER_BYTES, _DRIVER_BYTES, 1, unit="bytes")
    verl, pool = (found.get(("end-to-end", s)) for s in _ALL)
    return [
        compare("pool / 1 MiB, driver-bytes", passed, allowed, 1.0),
        compare("verl / pool, end-to-end", verl, pool, 1.0, at_least=True),
    ]
