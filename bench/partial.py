"""Two of the fields of a stored batch, and an eighth of its rows: how many bytes are read for them, and how long it takes.

The rows are neighbours (`slice`) or every eighth one (`scattered`). `pool` is what is read, `needed` the bytes of exactly those rows of those
fields as they are stored, told from the rows and not by the store, and `whole` the same for a get of all rows of all fields. A get ends when
every page of what came back has been read.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench import plans
from bench.fleet import Fleet, note
from bench.partial_server import SUBJECTS
from bench.report import Result, Target, compare, summarize

__all__ = ["BASELINES", "Step", "plan", "run", "targets"]

NAME = "partial"
BASELINES = ("needed", "whole")
SELECTIONS = ("slice", "scattered")
_ROUNDS, _QUICK_ROUNDS, _WARM_UPS = 15, 3, 2
_SPARE = 1.5  # that a share of a batch may take longer than that share of the time


@dataclass(frozen=True)
class Step:
    """One batch."""

    workload: str
    rounds: int


def plan(sizes: Sequence[str] | None = None, *, quick: bool = False, runs: int | None = None) -> list[Step]:
    """What to run.

    Raises:
        ValueError: there is no workload of that name, or more than one is asked for.
    """
    workload = plans.one_workload(NAME, sizes) or ("S64" if quick else "M1G")
    return [Step(workload, runs or (_QUICK_ROUNDS if quick else _ROUNDS))]


def run(steps: Sequence[Step]) -> Iterator[list[Result]]:
    """Runs the steps; yields what each found."""
    for step in steps:
        with Fleet("bench.partial_server", SUBJECTS) as fleet:
            fleet.start(list(SUBJECTS))
            needed = fleet.ask("pool", do="load", workload=step.workload)
            read, seconds = defaultdict(list), defaultdict(list)
            began = time.monotonic()
            for n in range(-_WARM_UPS, step.rounds):
                for what in (*SELECTIONS, "whole"):
                    took, nbytes = fleet.ask("pool", do="get", what=what)
                    if n >= 0:
                        seconds[what].append(took)
                        read[what].append(nbytes)
            note(f"{step.workload}, {step.rounds} rounds in {time.monotonic() - began:.0f} s")
        for what in SELECTIONS:
            found = {"pool": read[what], "needed": [needed[what]] * step.rounds, "whole": read["whole"]}
            yield [summarize(NAME, f"bytes/{what}", s, values, unit="bytes") for s, values in found.items()]
        for what in SELECTIONS:
            yield [summarize(NAME, f"time/{what}", s, values) for s, values in (("pool", seconds[what]), ("whole", seconds["whole"]))]


def targets(results: Sequence[Result]) -> list[Target]:
    """What is asked of the package, and how near it came."""
    found = {(r.case, r.subject): r for r in results}
    out = [
        compare(f"pool / needed, bytes/{w}", found.get((f"bytes/{w}", "pool")), found.get((f"bytes/{w}", "needed")), 1.05)
        for w in SELECTIONS
    ]
    for what in SELECTIONS:
        name = f"pool / whole in time : needed / whole in bytes, {what}"
        cases = [(f"time/{what}", "pool"), (f"time/{what}", "whole"), (f"bytes/{what}", "needed"), (f"bytes/{what}", "whole")]
        if any(case not in found for case in cases):
            out.append(Target(name, None, _SPARE))
            continue
        pool, whole, needed, all_bytes = (found[case] for case in cases)
        share = needed.value / all_bytes.value
        detail = f"{pool.value / whole.value:.3f} : {share:.3f}"
        out.append(Target(name, pool.value / whole.value / share, _SPARE, best=pool.best / whole.best / share, detail=detail))
    return out
