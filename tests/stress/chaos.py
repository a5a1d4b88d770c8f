"""A cluster of several nodes under load (`stress.chaos_load`), in which links are cut, nodes die, and brokers and node services die or stop.

Every get must give what was put, or a typed error, before its deadline. In the end all is mended; then every node must get from every other,
and nothing may be left in any pool.
"""

from __future__ import annotations

import json
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cluster import Cluster
from stress.outcome import Outcome, note

__all__ = ["Options", "run"]

_TESTS = Path(__file__).resolve().parents[1]
_PROGRESS_S = 10.0
_START_S = 120.0
_SETTLE_S = 600.0
_BROKER, _SERVICE = "mooncake-broker", r"^ray::NodeService"


@dataclass(frozen=True)
class Options:
    """How hard it blows."""

    seconds: float = 120.0
    seed: int = 0
    nodes: int = 4
    every_s: float = 4.0  # on average, from one blow to the next
    load: str = "chaos_load"  # the module of this package that is run meanwhile


class _Chaos:
    """What goes wrong, one thing after the other. Every method mends what it broke."""

    def __init__(self, nodes: Cluster, rng: random.Random, over: threading.Event) -> None:
        self.nodes, self.rng, self.over = nodes, rng, over
        self.counts: Counter[str] = Counter()

    def blow(self, options: Options) -> None:
        blows = {self.cut: 4, self.kill_node: 1, self.kill_broker: 2, self.stop_broker: 2, self.kill_service: 2, self.stop_service: 2}
        if options.load == "weights_load":  # it kills its processes itself, and so does the next one
            blows = {self.cut: 4, self.kill_service: 1, self.stop_service: 1}
        elif options.load == "loops_load":
            blows = {self.kill_node: 1}
        while not self.over.wait(self.rng.expovariate(1 / options.every_s)):
            self.rng.choices(list(blows), list(blows.values()))[0]()

    def any_node(self, first: int = 0) -> int:
        return self.rng.randrange(first, len(self.nodes.hosts))

    def cut(self) -> None:
        host = self.nodes.hosts[self.any_node()]
        host.cut()
        self.over.wait(self.rng.uniform(0.3, 4.0))
        host.mend()
        self.counts["links_cut"] += 1

    def kill_node(self) -> None:
        number = self.any_node(1)  # the head is Ray's single point of failure
        self.nodes.kill_node(number)
        self.over.wait(self.rng.uniform(0.0, 3.0))
        self.nodes.start_node(number)
        self.counts["nodes_killed"] += 1

    def kill_broker(self) -> None:
        self.counts["brokers_killed"] += len(self.nodes.hosts[self.any_node()].signal(signal.SIGKILL, _BROKER))

    def kill_service(self) -> None:
        self.counts["services_killed"] += len(self.nodes.hosts[self.any_node()].signal(signal.SIGKILL, _SERVICE))

    def stop_broker(self) -> None:
        self._stop(_BROKER, "brokers_stopped")

    def stop_service(self) -> None:
        self._stop(_SERVICE, "services_stopped")

    def _stop(self, words: str, name: str) -> None:
        host = self.nodes.hosts[self.any_node()]
        self.counts[name] += len(host.signal(signal.SIGSTOP, words))
        self.over.wait(self.rng.uniform(0.3, 3.0))
        host.signal(signal.SIGCONT, words)


def run(options: Options) -> Outcome:
    """Blows, mends, and tells."""
    names = {"chaos_load": "chaos in a cluster", "weights_load": "chaos among weights", "loops_load": "chaos in an asynchronous loop"}
    outcome = Outcome(names[options.load], options.seed)
    try:
        with Cluster(options.nodes, env={"PYTHONPATH": str(_TESTS), "RAY_IGNORE_UNHANDLED_ERRORS": "1"}) as nodes:
            note(f"{options.nodes} nodes are up")
            _run_in(nodes, options, outcome)
    except KeyboardInterrupt:
        outcome.interrupted = True
    return outcome


def _run_in(nodes: Cluster, options: Options, outcome: Outcome) -> None:
    command = [sys.executable, "-m", f"stress.{options.load}", str(options.nodes), str(options.seed)]
    load = nodes.popen(0, command, cwd=_TESTS.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    errors: list[str] = []
    threading.Thread(target=_read, args=(load, said), daemon=True).start()
    threading.Thread(target=lambda: errors.extend(load.stderr or ()), daemon=True).start()
    over, rng = threading.Event(), random.Random(options.seed)
    chaos = _Chaos(nodes, rng, over)
    failed: list[BaseException] = []
    blowing = threading.Thread(target=_guarded, args=(lambda: chaos.blow(options), failed))
    try:
        last = _next(said, _START_S)
        if last is None:
            outcome.demand(False, f"the load did not start: {''.join(errors)[-3000:]}")
            return
        blowing.start()
        start = told = time.monotonic()
        while time.monotonic() < start + options.seconds and not last["violations"] and not failed:
            if (now := _next(said, 1.0)) is not None:
                last = now
            if load.poll() is not None:
                break
            if time.monotonic() - told >= _PROGRESS_S:
                told = time.monotonic()
                note(f"{told - start:5.0f} s: {', '.join(f'{k} {v:,}' for k, v in {**last['counts'], **chaos.counts}.items())}")
        over.set()
        blowing.join()
        note("all is mended; the load ends")
        load.stdin.close()  # type: ignore[union-attr]
        end = time.monotonic() + _SETTLE_S
        while not last.get("over") and time.monotonic() < end and load.poll() is None:
            last = _next(said, 1.0) or last
        while (now := _next(said, 0.2)) is not None:
            last = now
        outcome.counts = {**last["counts"], **chaos.counts}
        for text in last["violations"]:
            outcome.demand(False, text)
        outcome.demand(not failed, f"the cluster could not be broken or mended: {failed}")
        outcome.demand(last.get("over"), f"the load did not come to its end (status {load.poll()}): {''.join(errors)[-3000:]}")
    finally:
        over.set()
        if blowing.is_alive():
            blowing.join()
        load.kill()
        load.wait()


def _guarded(what: Any, failed: list[BaseException]) -> None:
    try:
        what()
    except Exception as e:  # told by the thread that waits for this one
        failed.append(e)


def _read(load: subprocess.Popen[str], said: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    for line in load.stdout or ():
        if line.startswith("{"):
            said.put(json.loads(line))
    said.put(None)


def _next(said: queue.SimpleQueue[dict[str, Any] | None], timeout_s: float) -> dict[str, Any] | None:
    """What the load says next; None if it says nothing in that time, or will not any more."""
    try:
        return said.get(timeout=timeout_s)
    except queue.Empty:
        return None
