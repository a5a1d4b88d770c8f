"""One object that lies on one node is got by eight readers on four others, two on each, who all ask at once.

Five nodes on this machine, each with a network of its own (see `bench.cluster`), on links that are slow enough to be what limits. Seconds until
the last reader has it: `one` and `all` are one reader and eight, through the pool; `ray` is eight, through Ray's own store. A home that sends
to each of four nodes needs four times as long as to one.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench import pull, serving
from bench.cluster import Cluster, Link
from bench.fleet import Fleet, note
from bench.plans import one_step
from bench.pull_server import SUBJECTS, size_of
from bench.report import Result, Target, compare, summarize

__all__ = ["BASELINES", "Step", "plan", "run", "targets"]

NAME = "fanout"
BASELINES = ("one", "ray")
_ALL = ("one", "all", "ray")
_PROCESS = {"one": "tcp", "all": "tcp", "ray": "ray"}  # which of `pull_server`'s subjects it is
_WARM_UPS = 1


@dataclass(frozen=True)
class Step:
    """So many readers of one object, on so many nodes."""

    payload: str = "256MiB"
    nodes: int = 4
    readers: int = 8
    bits_per_s: float = 1e9
    rounds: int = 5


def plan(sizes: Sequence[str] | None = None, *, quick: bool = False, runs: int | None = None) -> list[Step]:
    """What to run.

    Raises:
        ValueError: there are no sizes to choose from.
    """
    step = Step(payload="64MiB", nodes=2, readers=4, rounds=2) if quick else Step()
    return one_step(NAME, step, sizes, runs)


def run(steps: Sequence[Step]) -> Iterator[list[Result]]:
    """Runs the steps; yields what each found."""
    rng = random.Random(1)
    for step in steps:
        size, seconds = size_of(step.payload), defaultdict(list)
        room = 2 * size + (64 << 20)
        places = [1 + n * step.nodes // step.readers for n in range(step.readers)]
        link = Link(bits_per_s=step.bits_per_s)
        with Cluster(step.nodes + 1, object_store_bytes=room, env=serving.ENVIRONMENTS["plain"], link=link) as nodes:
            note(f"{step.nodes + 1} nodes are up")
            home = pull.popen_on(nodes, 0)
            with Fleet("bench.pull_server", SUBJECTS, room, size, places={"plain": home, "pool": home}) as fleet:
                fleet.start(["plain", "pool"])
                for subject in ("ray", "tcp"):
                    fleet.all([subject], do="load", payload=step.payload, places=places)
                for n in range(-_WARM_UPS, step.rounds):
                    began = time.monotonic()
                    for subject in rng.sample(_ALL, len(_ALL)):
                        took = fleet.ask(_PROCESS[subject], do="fan_out", readers=1 if subject == "one" else step.readers)
                        if n >= 0:
                            seconds[subject].append(took)
                    note(f"round {n + 1} of {step.rounds}: {time.monotonic() - began:.0f} s")
        yield [summarize(NAME, step.payload, s, seconds[s]) for s in _ALL]


def targets(results: Sequence[Result]) -> list[Target]:
    """What is asked of the package, and how near it came."""
    found = {r.subject: r for r in results}
    return [compare("all / one", found.get("all"), found.get("one"), 1.3), compare("all / ray", found.get("all"), found.get("ray"), 1.0)]
