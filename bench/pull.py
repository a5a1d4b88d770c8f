"""What was put on one node is got on another: by plain Ray, through the pool, and what the link between them can do.

Two nodes on this machine, each with a network of its own (see `bench.cluster`); the link is a veth pair, left alone (`unshaped`) or held to
10 Gbit/s (`shaped`). What is timed is the get in an actor of the other node, of a value that was put for this get alone. `mooncake` is its
transfer engine reading into memory that is registered and populated already, from one process to another, without any store. `floor` is
iperf3, with as many streams as the pool uses; for latency, an echo over a TCP connection that is open already.

Bytes are those of the value that the reader has in the end. The pool stores a verl batch without its padding, moves only that, and pads it
again at the reader, so its rate can be more than the link's.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bench import serving
from bench.cluster import Cluster, Link
from bench.fleet import Fleet, Popen, ServerError, note
from bench.payloads import VERL
from bench.pull_server import LATENCY, SUBJECTS, size_of
from bench.report import Result, Target, compare, summarize

__all__ = ["BASELINES", "Step", "plan", "popen_on", "run", "targets"]

NAME = "pull"
BASELINES = ("ray", "floor")
_ALL = ("floor", "mooncake", "ray", "tcp")
_SIZES = ("1MiB", "64MiB", "1GiB")
_ROUNDS = {"1MiB": 15, "64MiB": 9, "1GiB": 5, VERL: 5, LATENCY: 30}
_QUICK = ("1MiB", "64MiB")
_WARM_UPS = 2
_RATE = 10e9  # bits/s
_STREAMS = 4
_POOL_BYTES, _STORE_BYTES = 1536 << 20, 1536 << 20
_FLOOR_S = 1  # of iperf3 in one round
_ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7001))
print("ready", flush=True)
connection, _ = server.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
payload = bytes(int(sys.argv[2]))
while connection.recv(1):
    connection.sendall(payload)
"""
_ASK = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 7001), 10)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
size, times = int(sys.argv[2]), []
for _ in range(200):
    start, left = time.perf_counter(), size
    connection.sendall(b"x")
    while left:
        left -= len(connection.recv(left))
    times.append(time.perf_counter() - start)
print(sorted(times)[100])
"""


@dataclass(frozen=True)
class Step:
    """One case: what is got over which link, how often, by whom."""

    case: str
    payload: str
    link: Link
    rounds: int
    subjects: tuple[str, ...] = _ALL

    @property
    def is_latency(self) -> bool:
        return self.payload == LATENCY


def plan(sizes: Sequence[str] | None = None, *, quick: bool = False, runs: int | None = None) -> list[Step]:
    """What to run, in order.

    Raises:
        ValueError: there is no payload of that name.
    """
    known = (*_SIZES, VERL, LATENCY)
    if unknown := [s for s in sizes or () if s not in known]:
        raise ValueError(f"no payload {unknown[0]!r}; there are {', '.join(known)}")
    chosen = sizes or ((*_QUICK, LATENCY) if quick else known)

    def step(case: str, payload: str, link: Link, subjects: tuple[str, ...] = _ALL) -> Step:
        return Step(f"{case}/{payload}", payload, link, runs or (3 if quick else _ROUNDS[payload]), subjects)

    steps = [step("latency", LATENCY, Link())] if LATENCY in chosen else []
    steps += [step("unshaped", size, Link()) for size in _SIZES if size in chosen]
    if VERL in chosen:
        steps.append(step("unshaped", VERL, Link(), ("floor", "ray", "tcp")))
    return steps + [step("shaped", size, Link(bits_per_s=_RATE)) for size in _SIZES if size in chosen]


def run(steps: Sequence[Step]) -> Iterator[list[Result]]:
    """Runs the steps; yields what each found."""
    rng = random.Random(1)
    largest = max((size_of(s.payload) for s in steps), default=0)
    pool = max(_POOL_BYTES // 4, largest * 5 // 4 + (64 << 20))
    store = max(_STORE_BYTES // 4, largest * 5 // 4 + (64 << 20))
    with Cluster(2, object_store_bytes=store, env=serving.ENVIRONMENTS["plain"]) as nodes:
        note("two nodes are up")
        places = {
            "plain": popen_on(nodes, 0),
            "pool": popen_on(nodes, 0),
            "mooncake-home": popen_on(nodes, 0),
            "mooncake": popen_on(nodes, 1),
        }
        with Fleet("bench.pull_server", SUBJECTS, pool, largest, places=places) as fleet:
            missing = _start(fleet)
            for step in steps:
                began = time.monotonic()
                yield _run_step(fleet, nodes, step, [s for s in step.subjects if s not in missing], rng)
                note(f"{step.case}: {step.rounds} rounds in {time.monotonic() - began:.0f} s")


def popen_on(nodes: Cluster, number: int) -> Popen:
    """What starts the processes of a fleet on a node."""

    def popen(command: Sequence[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        return nodes.popen(number, command, env, **options)

    return popen


def _start(fleet: Fleet) -> set[str]:
    """Starts all; what cannot be started is said, and left out, if it is another's."""
    fleet.start(["plain", "pool"])
    try:
        fleet.start(["mooncake-home", "mooncake"])
    except ServerError as e:
        note(f"mooncake: not run: {str(e).strip().splitlines()[-1]}")
        return {"mooncake"}
    return set()


def _run_step(fleet: Fleet, nodes: Cluster, step: Step, subjects: Sequence[str], rng: random.Random) -> list[Result]:
    """Each round has every subject move the value once, in an order of its own."""
    nodes.hosts[1].shape(Link())
    for subject in subjects:  # in turn: a plain load of several GiB each
        fleet.all([subject], do="load", payload=step.payload, places=[1])
    nodes.hosts[1].shape(step.link)
    size, seconds = size_of(step.payload), defaultdict(list)
    for n in range(-_WARM_UPS, step.rounds):
        for subject in rng.sample(subjects, len(subjects)):
            took = _once(fleet, nodes, step, subject, n, size)
            if n >= 0:
                seconds[subject].append(took)
    if step.is_latency:
        return [summarize(NAME, step.case, s, seconds[s]) for s in subjects]
    return [summarize(NAME, step.case, s, [size / t for t in seconds[s]], unit="bytes/s") for s in subjects]


def _once(fleet: Fleet, nodes: Cluster, step: Step, subject: str, number: int, size: int) -> float:
    if subject == "floor":
        return _echo(nodes, size) if step.is_latency else size / _iperf(nodes)
    if subject == "mooncake":
        peer = fleet.ask("mooncake-home", do="offer", payload=step.payload, number=number)
        return float(fleet.ask("mooncake", do="pull", payload=step.payload, number=number, peer=peer))
    return float(fleet.ask(subject, do="time"))


def _iperf(nodes: Cluster) -> float:
    """Bytes/s from node 0 to node 1."""
    home, there = nodes.hosts[0], nodes.hosts[1]
    with there.popen(["iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE) as server:
        assert server.stdout
        with suppress(StopIteration):
            next(line for line in server.stdout if b"listening" in line)
        done = home.run(["iperf3", "-c", there.address, "-P", str(_STREAMS), "-t", str(_FLOOR_S), "-J"])
        server.stdout.read()
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8


def _echo(nodes: Cluster, size: int) -> float:
    """Seconds of a request of one byte and an answer of `size`."""
    home, there = nodes.hosts[0], nodes.hosts[1]
    with home.popen([sys.executable, "-c", _ECHO, home.address, str(size)], stdout=subprocess.PIPE) as server:
        assert server.stdout
        server.stdout.readline()
        return float(there.run([sys.executable, "-c", _ASK, home.address, str(size)]).stdout)


def targets(results: Sequence[Result]) -> list[Target]:
    """What is asked of the package, and how near it came."""
    found = {(r.case, r.subject): r for r in results}

    def ratio(case: str, below: str, limit: float, *, at_least: bool = True) -> Target:
        return compare(f"tcp / {below}, {case}", found.get((case, "tcp")), found.get((case, below)), limit, at_least=at_least)

    out = [ratio(f"shaped/{size}", "floor", 0.9) for size in _SIZES[1:]]
    out += [ratio(f"unshaped/{payload}", "ray", 1.0) for payload in (*_SIZES, VERL)]
    return [*out, ratio(f"latency/{LATENCY}", "ray", 1.0, at_least=False)]
