"""A working set of four times the store's memory: all of it is put, then all of it is got and read, by one process.

Throughput is that of the working set: its bytes over the seconds of putting, of getting, or of both. Every subject has the same memory,
and spills to a directory of its own on the same disk: the system's for temporary files, or TMPDIR. Ray writes through the page cache, so what
it reads back may come from memory beside its store; the pool goes past the cache where the file system lets it.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.fleet import Fleet, note
from bench.plans import one_step
from bench.report import Result, Target, compare, summarize
from bench.spill_server import SUBJECTS

__all__ = ["BASELINES", "Step", "plan", "run", "targets"]

NAME = "spill"
BASELINES = ("ray", "ray-numpy")
_ALL = ("ray", "ray-numpy", "store", "pool")
_WARM_UPS = 1


@dataclass(frozen=True)
class Step:
    """So many objects of `size` bytes, through a store of `capacity` bytes."""

    capacity: int = 256 << 20
    objects: int = 64
    size: int = 16 << 20
    rounds: int = 7


def plan(sizes: Sequence[str] | None = None, *, quick: bool = False, runs: int | None = None) -> list[Step]:
    """What to run.

    Raises:
        ValueError: there are no sizes to choose from.
    """
    step = Step(capacity=80 << 20, objects=80, size=4 << 20, rounds=2) if quick else Step()  # Ray wants 75 MiB at least
    return one_step(NAME, step, sizes, runs)


def run(steps: Sequence[Step]) -> Iterator[list[Result]]:
    """Runs the steps; yields what each found."""
    for step in steps:
        with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as directory:
            times = _times(step, directory)
        size = step.objects * step.size
        for case, keys in (("put", ("put",)), ("get", ("get",)), ("putget", ("put", "get"))):
            yield [summarize(NAME, case, s, [size / sum(t[k] for k in keys) for t in times[s]], unit="bytes/s") for s in _ALL]


def _times(step: Step, directory: str) -> dict[str, list[dict[str, float]]]:
    """Seconds of each round of each subject."""
    rng, times = random.Random(1), defaultdict(list)
    with Fleet("bench.spill_server", SUBJECTS, step.capacity, directory) as fleet:
        fleet.start(list(SUBJECTS))
        for n in range(-_WARM_UPS, step.rounds):
            began = time.monotonic()
            for subject in rng.sample(_ALL, len(_ALL)):
                measured = fleet.ask(subject, do="run", objects=step.objects, size=step.size)
                if n >= 0:
                    times[subject].append(measured)
            note(f"round {n + 1} of {step.rounds}: {time.monotonic() - began:.0f} s")
    return times


def targets(results: Sequence[Result]) -> list[Target]:
    """What is asked of the package, and how near it came."""
    found = {(r.case, r.subject): r for r in results}
    return [compare("pool / ray, putget", found.get(("putget", "pool")), found.get(("putget", "ray")), 2.0, at_least=True)]
