"""Planning how all of Kimi-K2 goes from a trainer to engines: seconds, how even the senders' shares are, and bytes that leave the trainers.

A pair `k2-32x8-32x2` is EP 32 with 8 replicas of each expert to EP 32 with 2, of all tensors, with no other parallelism; each rank is a host of
its own. Of `pool` it is timed what every process does that plans: both plans and their digests, from placements that are described already, in a
process of its own, whose peak memory counts all it has ever held.

`upstream` is Mooncake's planner, `mooncake.reshard.weight`. Its time rises with the square of the fragments, so it plans the first layers, and
the rest is told from them: seconds from those of three layers, by the square of the target's fragments; what each rank sends from what the
third layer adds to it, as each further layer adds the same. Building its manifests, which takes longer, is not counted. `model` is the bytes of
the model, and equal shares.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.fleet import Fleet, ServerError, note
from bench.plan_server import SUBJECTS, sizes_of
from bench.report import Result, Target, compare, summarize

__all__ = ["BASELINES", "Step", "plan", "run", "targets"]

NAME = "plan"
BASELINES = ("upstream", "model")
PAIRS = ("k2-32x8-32x2", "k2-64x4-16x4", "k2-16x8-64x1", "k2-32x4-8x8")
_LAYERS, _FEW = 61, (2, 3)
_ROUNDS, _UPSTREAM_ROUNDS = 5, 2
_MOST_S, _MOST_BYTES, _MOST_UNEVEN = 2.0, 1 << 30, 1.02


@dataclass(frozen=True)
class Step:
    """One pair of layouts."""

    pair: str
    rounds: int


def plan(sizes: Sequence[str] | None = None, *, quick: bool = False, runs: int | None = None) -> list[Step]:
    """What to run.

    Raises:
        ValueError: a size is no pair's name.
    """
    for size in sizes or ():
        sizes_of(size)
    return [Step(pair, runs or (1 if quick else _ROUNDS)) for pair in sizes or (PAIRS[:1] if quick else PAIRS)]


def run(steps: Sequence[Step]) -> Iterator[list[Result]]:
    """Runs the steps; yields what each found."""
    for step in steps:
        began = time.monotonic()
        with Fleet("bench.plan_server", SUBJECTS, step.pair) as fleet:
            fleet.start(["local"])
            upstream = _upstream(fleet, step)
            pool = [fleet.ask("pool", do="plan") for _ in range(step.rounds)]
        note(f"{step.pair}: {step.rounds} rounds in {time.monotonic() - began:.0f} s")
        yield from _results(step.pair, pool, upstream)


def _upstream(fleet: Fleet, step: Step) -> dict[int, list[dict[str, Any]]]:
    """What it found for each number of layers; nothing where it is not installed."""
    found: dict[int, list[dict[str, Any]]] = {}
    try:
        fleet.start(["mooncake"])
        for layers in _FEW:
            fleet.ask("upstream", do="load", layers=layers)
            found[layers] = [fleet.ask("upstream", do="plan", layers=layers) for _ in range(min(step.rounds, _UPSTREAM_ROUNDS))]
        fleet.ask("upstream", do="forget")
    except ServerError as e:
        note(f"upstream: not run: {str(e).strip().splitlines()[-1]}")
        return {}
    return found


def _results(pair: str, pool: list[dict[str, Any]], upstream: dict[int, list[dict[str, Any]]]) -> Iterator[list[Result]]:
    first = pool[0]
    sizes = {name: first[name] for name in ("source fragments", "target fragments", "reads")}
    sizes |= {"cpu": median(p["cpu"] for p in pool), "rss": max(p["rss"] for p in pool)}
    times = [summarize(NAME, f"time/{pair}", "pool", [p["seconds"] for p in pool], sizes)]
    loads = [summarize(NAME, f"load/{pair}", "pool", [first["load"]], unit="x")]
    sent = [summarize(NAME, f"bytes/{pair}", "pool", [first["bytes"]], unit="bytes")]
    if upstream:
        few, more = (upstream[layers] for layers in _FEW)
        n = more[0]["target fragments"]
        told = {"told from": f"{_FEW[-1]} layers"}
        scale = (first["undivided"] / n) ** 2
        times.append(
            summarize(NAME, f"time/{pair}", "upstream", [p["seconds"] * scale for p in more], {**told, "measured": more[0]["seconds"]})
        )
        each = [b + (b - a) * (_LAYERS - _FEW[-1]) for a, b in zip(few[0]["sent"], more[0]["sent"], strict=True)]
        loads.append(summarize(NAME, f"load/{pair}", "upstream", [max(each) * len(each) / sum(each)], told, unit="x"))
        sent.append(summarize(NAME, f"bytes/{pair}", "upstream", [sum(each)], told, unit="bytes"))
    loads.append(summarize(NAME, f"load/{pair}", "model", [1.0], unit="x"))
    sent.append(summarize(NAME, f"bytes/{pair}", "model", [first["model"]], unit="bytes"))
    yield from (times, loads, sent)


def targets(results: Sequence[Result]) -> list[Target]:
    """What is asked of the package, and how near it came."""
    found = {(r.case, r.subject): r for r in results}
    out = []
    for pair in dict.fromkeys(r.case.partition("/")[2] for r in results):
        timed = found.get((f"time/{pair}", "pool"))
        name = f"pool, seconds, {pair}"
        out.append(Target(name, timed and timed.value, _MOST_S, best=timed and timed.best))
        out.append(Target(f"pool, GiB of memory, {pair}", timed and timed.extra["rss"] / (1 << 30), _MOST_BYTES / (1 << 30)))
        for what, limit in (("load", _MOST_UNEVEN), ("bytes", 1.0)):
            pool, model = (found.get((f"{what}/{pair}", subject)) for subject in ("pool", "model"))
            out.append(compare(f"pool / model, {what}/{pair}", pool, model, limit))
    return out
