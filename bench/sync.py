"""A new version of a model gets from four trainer hosts to four engine hosts, each with a link of 1 Gbit/s.

Nine nodes on this machine, each with a network of its own (see `bench.cluster`). The model is a mixture of experts of about 200 MB in the
proportions of Kimi-K2. Seconds until every engine serves it: `broadcast` is what is usual (one rank gathers every tensor and broadcasts it to
all), `nccl`, `p2p` and `delta` are ours, `one` is p2p to one engine alone, `floor` is how long the links need for what the busiest receiver has
to get, measured by sockets that send as much.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench import pull, serving, sync_model
from bench.cluster import Cluster, Link
from bench.fleet import Fleet, note
from bench.report import Result, Target, compare, summarize
from bench.sync_server import CASES, SUBJECTS

__all__ = ["BASELINES", "Step", "plan", "run", "targets"]

NAME = "sync"
BASELINES = ("broadcast", "floor")
_ALL = ("broadcast", "nccl", "p2p", "delta", "floor")
_BITS_A_SECOND = 1e9
_POOL_BYTES = 1 << 30
_NODES, _TRAINERS, _ENGINES = 9, 4, 4
_RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 7002))
print("ready", flush=True)
connection, _ = server.accept()
left, buffer = int(sys.argv[2]), bytearray(1 << 20)
begin = time.perf_counter()
while left > 0:
    left -= connection.recv_into(buffer, min(left, len(buffer)))
print(time.perf_counter() - begin)
"""
_SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7002), 10)
left, buffer = int(sys.argv[2]), bytes(1 << 20)
while left > 0:
    left -= connection.send(buffer[:left])
connection.recv(1)
"""


@dataclass(frozen=True)
class Step:
    """One way that trainers and engines cut the model."""

    case: str
    source: str
    rounds: int


def plan(sizes: Sequence[str] | None = None, *, quick: bool = False, runs: int | None = None) -> list[Step]:
    """What to run; `sizes` are names of cases.

    Raises:
        ValueError: there is no such case.
    """
    if unknown := [s for s in sizes or () if s not in CASES]:
        raise ValueError(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    sources = {"k2/tp4": "tp2pp2", "k2/tp2dp2": "ep4", "k2/4-replicas": "tp2pp2"}
    cases = [c for c in CASES if not sizes or c in sizes][: 1 if quick and not sizes else None]
    return [Step(case, sources[case], runs or (1 if quick else 5)) for case in cases]


def run(steps: Sequence[Step]) -> Iterator[list[Result]]:
    """Runs the steps; yields what each found."""
    rng = random.Random(1)
    note(f"the model has {sync_model.nbytes() / 1e6:.0f} MB")
    with Cluster(_NODES, cpus=1, env=serving.ENVIRONMENTS["plain"], link=Link(bits_per_s=_BITS_A_SECOND)) as nodes:
        note(f"{_NODES} nodes are up")
        with Fleet("bench.sync_server", SUBJECTS, _POOL_BYTES, places={"pool": pull.popen_on(nodes, 0)}) as fleet:
            fleet.start(["pool"])
            for step in steps:
                fleet.all(["p2p"], do="load", source=step.source, case=step.case)
                subjects = [*_ALL, *(["one"] if step.case == "k2/4-replicas" else [])]
                seconds: dict[str, list[float]] = defaultdict(list)
                extra: dict[str, dict[str, Any]] = {}
                for n in range(-1, step.rounds):
                    began = time.monotonic()
                    for subject in rng.sample(subjects, len(subjects)):
                        if subject == "floor":
                            took: dict[str, Any] = {"seconds": _floor(nodes, step.case)}
                        else:
                            took = fleet.ask(subject, do="time")
                        if n >= 0:
                            seconds[subject].append(took.pop("seconds"))
                            extra[subject] = took
                    note(f"{step.case}: round {n + 1} of {step.rounds}: {time.monotonic() - began:.0f} s")
                yield [summarize(NAME, step.case, s, seconds[s], extra[s]) for s in subjects]


def _floor(nodes: Cluster, case: str) -> float:
    """Seconds that the links need, all at once, for what each engine's rank has to get."""
    layout, _ = CASES[case]
    need = sum(part.numel() * 2 for part in sync_model.parts(layout, 0)[0].values())
    receivers, senders = [], []
    try:
        for n in range(_ENGINES):
            number = 1 + _TRAINERS + n
            address = nodes.hosts[number].address
            receivers.append(nodes.popen(number, [sys.executable, "-c", _RECEIVE, address, str(need)], stdout=subprocess.PIPE, text=True))
            assert receivers[-1].stdout.readline() == "ready\n"
        for n in range(_ENGINES):
            address = nodes.hosts[1 + _TRAINERS + n].address
            senders.append(nodes.popen(1 + n % _TRAINERS, [sys.executable, "-c", _SEND, address, str(need)]))
        return max(float(r.stdout.read()) for r in receivers)
    finally:
        for process in (*receivers, *senders):
            process.kill()
            process.wait()


def targets(results: Sequence[Result]) -> list[Target]:
    """What is asked of the package, and how near it came."""
    found = {(r.case, r.subject): r for r in results}
    out = []
    for case in CASES:
        out.append(compare(f"{case}: broadcast / p2p", found.get((case, "broadcast")), found.get((case, "p2p")), 7.0, at_least=True))
        out.append(compare(f"{case}: p2p / floor", found.get((case, "p2p")), found.get((case, "floor")), 1.15))
    out.append(compare("p2p to 4 replicas / to one", found.get(("k2/4-replicas", "p2p")), found.get(("k2/4-replicas", "one")), 1.2))
    return out
