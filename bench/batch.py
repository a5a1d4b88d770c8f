"""Whole batches of a GRPO step, put and got: the pool, plain Ray, Mooncake's structured store, TransferQueue, and pickling alone.

`stored` is bytes: what each store needs for the batch, and what its content needs at least (`ideal`). `put`, `get` and `putget` are seconds
for verl's padded batch of 14 tensor columns; `putget-lists` for the same rows as Python lists. A get ends when every page of what came back
has been read. `ray-lists` has lists in every case, and so no padding. `pool` gives columns without padding, and typed rows for lists;
`pool-padded` gives all 14 columns padded again, `pool-lists` Python lists again. `fastest-peer` is the fastest of those that are not ours.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import plans, workloads
from bench.batch_server import SUBJECTS
from bench.fleet import Fleet, ServerError, note
from bench.report import Result, Target, compare, quantity, summarize

__all__ = ["BASELINES", "PEERS", "Step", "plan", "run", "targets"]

NAME = "batch"
PEERS = ("ray-verl", "ray-lists", "mooncake", "transferqueue", "pickle5")
BASELINES = ("ray-verl", "ray-lists", "fastest-peer", "ideal")
_PADDED = (*PEERS, "pool", "pool-padded")
_LISTS = ("ray-lists", "mooncake", "transferqueue", "pickle5", "pool", "pool-lists")
_STORED = (*PEERS, "pool")
_CHOSEN, _QUICK = ("S64", "M1G", "L8G"), ("S64",)
_ROUNDS = {"XS": 9, "S64": 9, "M256": 7, "M1G": 5, "L8G": 3}
_QUICK_ROUNDS = 2
_WARM_UPS = 1
_COPIES = 12  # of the padded batch that are there at most: one in each of the five processes, and what is made to put and to get it


@dataclass(frozen=True)
class Step:
    """One workload in one form, and who takes it."""

    workload: str
    lists: bool
    rounds: int

    @property
    def subjects(self) -> tuple[str, ...]:
        return _LISTS if self.lists else _PADDED


def plan(sizes: Sequence[str] | None = None, *, quick: bool = False, runs: int | None = None) -> list[Step]:
    """What to run, in order.

    Raises:
        ValueError: there is no workload of that name.
    """
    plans.known_workloads(sizes)
    chosen = [s for s in workloads.NAMES if s in (sizes or (_QUICK if quick else _CHOSEN))]
    return [Step(w, lists, runs or (_QUICK_ROUNDS if quick else _ROUNDS[w])) for w in chosen for lists in (False, True)]


def run(steps: Sequence[Step]) -> Iterator[list[Result]]:
    """Runs the steps; yields what each found. What cannot be run is said on stderr."""
    steps = [step for step in steps if _fits(step)]
    if not steps:
        return
    rng, largest = random.Random(1), max(workloads.padded_bytes(workloads.WORKLOADS[step.workload]) for step in steps)
    with Fleet("bench.batch_server", SUBJECTS, largest) as fleet:
        running = _Running(fleet)
        for number, step in enumerate(steps, 1):
            start = time.monotonic()
            results = _run_step(running, step, rng)
            what = f"{step.workload}{' in lists' if step.lists else ''}"
            note(f"{number} of {len(steps)}: {what}, {step.rounds} rounds in {time.monotonic() - start:.0f} s")
            yield results


def _fits(step: Step) -> bool:
    """Whether there is memory for the step; says it if there is not."""
    needed, available = _COPIES * workloads.padded_bytes(workloads.WORKLOADS[step.workload]), _available()
    if needed > available and not step.lists:
        note(
            f"{step.workload}: not run, as it needs {quantity(needed, 'bytes')} of memory and {quantity(available, 'bytes')} are available"
        )
    return needed <= available


def _available() -> int:
    """Bytes of memory that nobody uses."""
    words = next(line.split() for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(words[1]) << 10


class _Running:
    """The subjects that work. One that fails is said to on stderr, with the reason, and asked no more."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._failed: set[str] = set()
        for kind, subjects in SUBJECTS.items():
            try:
                fleet.start([kind])
            except ServerError as e:
                self._fail(subjects, e)

    def _fail(self, subjects: Sequence[str], reason: Exception) -> None:
        self._failed.update(subjects)
        note(f"{', '.join(subjects)}: not run: {_last_line(reason)}\n{reason}")

    def ask(self, subject: str, **request: object) -> object:
        """None if the subject does not work."""
        if subject in self._failed:
            return None
        try:
            return self._fleet.ask(subject, **request)
        except ServerError as e:
            self._fail([subject], e)
            return None

    def works(self, subject: str) -> bool:
        return subject not in self._failed


def _last_line(e: Exception) -> str:
    return str(e).strip().splitlines()[-1]


def _run_step(running: _Running, step: Step, rng: random.Random) -> list[Result]:
    """Each round has every subject put and get the batch, in an order of its own."""
    times: dict[str, list[dict[str, float]]] = defaultdict(list)
    for subject in step.subjects:  # one after the other: each needs memory for it
        running.ask(subject, do="load", workload=step.workload, lists=step.lists)
    results = [] if step.lists else _stored(running, step)
    for n in range(-_WARM_UPS, step.rounds):
        for subject in rng.sample(step.subjects, len(step.subjects)):
            measured = running.ask(subject, do="time")
            if n >= 0 and measured is not None:
                times[subject].append(measured)
    for key in ("putget",) if step.lists else ("put", "get", "putget"):
        case = f"{key}-lists/{step.workload}" if step.lists else f"{key}/{step.workload}"
        found = [summarize(NAME, case, s, [t[key] for t in times[s]]) for s in step.subjects if running.works(s)]
        results += [*found, *_fastest(found)]
    return results


def _stored(running: _Running, step: Step) -> list[Result]:
    nbytes = {subject: running.ask(subject, do="stored") for subject in _STORED}
    nbytes["ideal"] = workloads.ideal(workloads.build(step.workload))
    return [summarize(NAME, f"stored/{step.workload}", s, [n], unit="bytes") for s, n in nbytes.items() if n is not None]


def _fastest(found: Sequence[Result]) -> list[Result]:
    peers = [r for r in found if r.subject in PEERS]
    if not peers:
        return []
    first = min(peers, key=lambda r: r.value)
    return [Result(NAME, first.case, "fastest-peer", first.value, first.best, first.runs, {"peer": first.subject}, first.unit)]


def targets(results: Sequence[Result]) -> list[Target]:
    """What is asked of the package, and how near it came."""
    found = {(r.case, r.subject): r for r in results}

    def ratio(above: str, below: str, case: str, limit: float, *, at_least: bool = False) -> Target:
        return compare(f"{above} / {below}, {case}", found.get((case, above)), found.get((case, below)), limit, at_least=at_least)

    out = [ratio("pool", "ideal", f"stored/{w}", 1.05) for w in _CHOSEN]
    out += [ratio("fastest-peer", "pool", f"putget/{w}", 5, at_least=True) for w in _CHOSEN]
    out += [ratio("fastest-peer", "pool", f"putget-lists/{w}", 10, at_least=True) for w in _CHOSEN]
    return out
