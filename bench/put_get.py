"""Puts, gets and hand-overs of batches: through the pool, through Ray's own store, and what copying the bytes costs."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.fleet import Fleet, note
from bench.payloads import SIZES, SMALL, VERL
from bench.report import Result, Target, duration, summarize
from bench.server import SUBJECTS

__all__ = ["BASELINES", "Step", "plan", "run", "targets"]

NAME = "put_get"
BASELINES = ("memcpy", "ray", "ray-zero-copy")
_ALL = ("memcpy", "store", "ray", "ray-numpy", "ray-zero-copy", "pool")
_WITH_RAY = ("memcpy", "ray", "ray-numpy", "ray-zero-copy", "pool")
_QUICK = ("64KiB", "1MiB", "16MiB")
_ROUNDS = {"64KiB": 20, "1MiB": 12, "16MiB": 10, "256MiB": 9, "1GiB": 4, VERL: 7, SMALL: 40}
_QUICK_ROUNDS = 5
_TURN = {"64KiB": 10, "1MiB": 10, "16MiB": 3}
"""How often a subject does the operation when it is its turn: what is short is timed with caches that know it."""
_WARM_UPS = 3


@dataclass(frozen=True)
class Step:
    """One operation on one payload: its rounds, and the case that each time it yields belongs to."""

    op: str
    payload: str
    rounds: int
    cases: dict[str, str]
    subjects: tuple[str, ...]
    turn: int = 1


def plan(sizes: Sequence[str] | None = None, *, quick: bool = False, runs: int | None = None) -> list[Step]:
    """What to run, in order.

    Raises:
        ValueError: there is no payload of that name.
    """
    known = (*SIZES, VERL)
    if unknown := [s for s in sizes or () if s not in known]:
        raise ValueError(f"no payload {unknown[0]!r}; there are {', '.join(known)}")
    chosen = [s for s in known if s in (sizes or (_QUICK if quick else known))]

    def step(op: str, payload: str, cases: dict[str, str], subjects: tuple[str, ...]) -> Step:
        rounds = runs or (min(_QUICK_ROUNDS, _ROUNDS[payload]) if quick and payload != SMALL else _ROUNDS[payload])
        return Step(op, payload, rounds, cases, subjects, _TURN.get(payload, 1))

    steps = [step("small", SMALL, {"put": "put/small", "get": "get/small"}, ("ray", "pool"))]
    for size in chosen:
        if size == VERL:
            steps.append(step("roundtrip", VERL, {"putget": "putget/verl"}, _ALL))
            steps.append(step("chunk", VERL, {"chunk": "chunk16/verl"}, _ALL))
            continue
        steps.append(step("roundtrip", size, {t: f"{t}/{size}" for t in ("put", "get", "putget")}, _ALL))
        if size == "256MiB":
            steps.append(step("passing", size, {"pass": f"pass/{size}"}, _WITH_RAY))
        steps.append(step("actor", size, {"actor": f"actor/{size}"}, _WITH_RAY))
    return steps


def run(steps: Sequence[Step]) -> Iterator[list[Result]]:
    """Runs the steps; yields what each found."""
    began, rng = time.monotonic(), random.Random(1)
    with Fleet("bench.server", SUBJECTS) as fleet:
        fleet.start(list(SUBJECTS))
        for number, step in enumerate(steps, 1):
            start = time.monotonic()
            results = _run_step(fleet, step, rng)
            took, total = time.monotonic() - start, time.monotonic() - began
            note(f"{number} of {len(steps)}: {step.op} {step.payload}, {step.rounds} rounds in {took:.0f} s, {total:.0f} s in all")
            yield results


def _run_step(fleet: Fleet, step: Step, rng: random.Random) -> list[Result]:
    """Each round has every subject do the operation, in an order of its own."""
    times: dict[str, list[dict[str, float]]] = defaultdict(list)
    fleet.all(step.subjects, do="load", payload=step.payload, op=step.op)
    for n in range(-_WARM_UPS, step.rounds):
        for subject in rng.sample(step.subjects, len(step.subjects)):
            measured = fleet.ask(subject, do="time", op=step.op, times=step.turn)
            if n >= 0:
                times[subject] += measured
    results = []
    for key, case in step.cases.items():
        for subject in step.subjects:
            all_of_it = times[subject]
            extra = {k: int(max(t[k] for t in all_of_it)) for k in ("bytes_copied",) if k in all_of_it[0]}
            results.append(summarize(NAME, case, subject, [t[key] for t in all_of_it], extra))
    return results


def targets(results: Sequence[Result]) -> list[Target]:
    """What is asked of the package, and how near it came."""
    found = {(r.case, r.subject): r for r in results}

    def time(case: str, subject: str) -> _Time | None:
        result = found.get((case, subject))
        return _Time(result.value, result.best) if result else None

    def ratio(name: str, above: _Time | None, below: _Time | None, limit: float = 1.0, *, at_least: bool = False) -> None:
        if above is None or below is None:
            out.append(Target(name, None, limit, at_least))
            return
        detail = f"{duration(above.median)} : {duration(below.median)}"
        out.append(Target(name, above.median / below.median, limit, at_least, above.best / below.best, detail))

    out: list[Target] = []
    small_put, small_get = time("put/small", "ray"), time("get/small", "ray")
    for s in (s for s, n in SIZES.items() if n >= 16 << 20):
        ratio(f"store put {s} / memcpy", time(f"put/{s}", "store"), time(f"put/{s}", "memcpy"), 1.2)
    for s in (s for s, n in SIZES.items() if n >= 16 << 20):
        allowed = _sum(small_put, time(f"put/{s}", "memcpy"), 1.2)
        ratio(f"pool put {s} / (ray put small + 1.2 memcpy)", time(f"put/{s}", "pool"), allowed)
    for s in SIZES:
        ratio(f"store get {s} / 50 us", time(f"get/{s}", "store"), _Time(50e-6, 50e-6))
    for s in SIZES:
        ratio(f"pool get {s} / (ray get small + 100 us)", time(f"get/{s}", "pool"), _sum(small_get, _Time(100e-6, 100e-6)))
    for subject, case, limit in (("ray", "putget/256MiB", 6), ("ray-zero-copy", "putget/256MiB", 1.5), ("ray", "putget/verl", 8)):
        ratio(f"{subject} / pool, {case}", time(case, subject), time(case, "pool"), limit, at_least=True)
    for case in ("put/64KiB", "get/64KiB", "putget/64KiB", "actor/64KiB"):
        ratio(f"pool / ray, {case}", time(case, "pool"), time(case, "ray"))
    for case in ("put/small", "get/small"):
        ratio(f"pool / ray, {case}", time(case, "pool"), time(case, "ray"), 1.05)
    passed = found.get(("pass/256MiB", "pool"))
    copied = passed.extra["bytes_copied"] if passed else 0
    out.append(
        Target(
            "bytes copied / passed on, pass/256MiB",
            copied / SIZES["256MiB"] if passed else None,
            0,
            detail=f"{copied} bytes" if passed else "",
        )
    )
    return out


@dataclass(frozen=True)
class _Time:
    median: float
    best: float


def _sum(a: _Time | None, b: _Time | None, factor: float = 1.0) -> _Time | None:
    """`a + factor * b`."""
    return _Time(a.median + factor * b.median, a.best + factor * b.best) if a and b else None
