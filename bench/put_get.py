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
_ROUNDS = {"64KiB": 15, "1MiB": 12, "16MiB": 10, "256MiB": 7, "1GiB": 3, VERL: 5, SMALL: 60}
_QUICK_ROUNDS = 5
_TURN = {"64KiB": 20, "1MiB": 10, "16MiB": 3}
"""How often a subject does the operation when it is its turn: what is short is timed with caches that know it."""
_WARM_UPS = 2


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
        steps.append(step("actor", size, {"actor": f"actor/{size}"}, _WITH_RAY))
        if size == "256MiB":
            steps.append(step("passing", size, {"pass": f"pass/{size}"}, _WITH_RAY))
    return steps


def run(steps: Sequence[Step]) -> Iterator[list[Result]]:
    """Runs the steps; yields what each found."""
    began, rng = time.monotonic(), random.Random(1)
    with Fleet() as fleet:
        fleet.start(list(SUBJECTS))
        for number, step in enumerate(steps, 1):
            start = time.monotonic()
            results = _run_step(fleet, step, rng)
            now = time.monotonic()
            note(
                f"{number} of {len(steps)}: {step.op} {step.payload}, {step.rounds} rounds in {now - start:.0f} s, {now - began:.0f} s in all"
            )
            yield results


def _run_step(fleet: Fleet, step: Step, rng: random.Random) -> list[Result]:
    """Each round has every subject do the operation, in an order of its own."""
    times: dict[str, list[dict[str, float]]] = defaultdict(list)
    fleet.all(step.subjects, do="load", payload=step.payload, op=step.op)
    for n in range(-_WARM_UPS, step.rounds):
        for subject in rng.sample(step.subjects, len(step.subjects)):
            measured = fleet.time(subject, step.op, step.turn)
            if n >= 0:
                times[subject] += measured
    fleet.all(step.subjects, do="unload")
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

    def value(case: str, subject: str) -> float | None:
        result = found.get((case, subject))
        return result.value if result else None

    def under(name: str, took: float | None, allowed: float | None, limit: float = 1.0, detail: str = "") -> Target:
        known = took is not None and allowed is not None
        return Target(name, took / allowed if known else None, limit, detail=detail or (_compared(took, allowed) if known else ""))  # type: ignore[operator,arg-type]

    def faster(name: str, case: str, than: str, limit: float) -> Target:
        took, theirs = value(case, "pool"), value(case, than)
        known = took is not None and theirs is not None
        return Target(name, theirs / took if known else None, limit, at_least=True, detail=_compared(took, theirs) if known else "")  # type: ignore[operator,arg-type]

    def plus(*times: float | None) -> float | None:
        return None if None in times else sum(times)  # type: ignore[arg-type]

    def scaled(time: float | None, factor: float) -> float | None:
        return None if time is None else time * factor

    small_put, small_get = value("put/small", "ray"), value("get/small", "ray")
    large = [s for s, n in SIZES.items() if n >= 16 << 20]
    out = [under(f"store put {s} / memcpy", value(f"put/{s}", "store"), value(f"put/{s}", "memcpy"), 1.2) for s in large]
    for s in SIZES:
        allowed = plus(scaled(value(f"put/{s}", "memcpy"), 1.2), small_put)
        out.append(under(f"pool put {s} / (1.2 memcpy + ray small put)", value(f"put/{s}", "pool"), allowed))
    out += [under(f"store get {s} / 50 us", value(f"get/{s}", "store"), 50e-6) for s in SIZES]
    out += [under(f"pool get {s} / (ray small get + 100 us)", value(f"get/{s}", "pool"), plus(small_get, 100e-6)) for s in SIZES]
    out.append(faster("ray / pool, put+get 256MiB", "putget/256MiB", "ray", 6))
    out.append(faster("ray-zero-copy / pool, put+get 256MiB", "putget/256MiB", "ray-zero-copy", 1.5))
    out.append(faster("ray / pool, put+get verl", "putget/verl", "ray", 8))
    for case in ("put/64KiB", "get/64KiB", "putget/64KiB", "actor/64KiB"):
        out.append(under(f"pool / ray, {case}", value(case, "pool"), value(case, "ray")))
    for case in ("put/small", "get/small"):
        out.append(under(f"pool / ray, {case}", value(case, "pool"), value(case, "ray"), 1.05))
    passed = found.get(("pass/256MiB", "pool"))
    copied = passed.extra["bytes_copied"] / SIZES["256MiB"] if passed else None
    out.append(Target("copied / passed on, pass 256MiB", copied, 0, detail=f"{passed.extra['bytes_copied']} bytes" if passed else ""))
    return out


def _compared(a: float, b: float) -> str:
    return f"{duration(a)} : {duration(b)}"
