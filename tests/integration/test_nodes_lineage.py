"""What a task had returned on a node, or into a pool, that is lost: made again, read from who has it, or an error that says so."""

from __future__ import annotations

import subprocess
import sys

import pytest
from test_nodes import START

from bench.cluster import Cluster, unavailable
from mooncake_ray.testing import Allowed

pytestmark = [
    pytest.mark.skipif(bool(unavailable()), reason=f"no namespaces here: {unavailable()}"),
    pytest.mark.timeout(600),
]

SOON = {  # that a node is dead
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
}


@pytest.fixture(scope="module")
def nodes():
    with Cluster(3, env=SOON) as cluster:
        yield cluster


@pytest.fixture
def leaks_allowed() -> Allowed:
    """The cluster is the module's; its own processes come and go, and so do the pipes that hold its hosts."""
    return Allowed(processes=("*",), descriptors=("pipe:*",))


COMMON = """
from collections import Counter
n = 1 << 20
@ray.remote(**on(0))
class Runs:
    def __init__(self): self.counts = Counter()
    def add(self, name): self.counts[name] += 1
    def read(self): return dict(self.counts)
runs = Runs.remote()
@ray.remote(**on(1))
def make(name, seed):
    ray.get(runs.add.remote(name))
    return torch.arange(n, dtype=torch.float32) + seed
@ray.remote(**on(2))
def more(name, x):
    ray.get(runs.add.remote(name))
    return x + 1
@ray.remote(**on(2))
def total(x): return float(x.double().sum())
def value(ref): return float(ray.get(ref).double().sum())
def finished(*refs): assert len(ray.wait(list(refs), num_returns=len(refs), fetch_local=False, timeout=200)[0]) == len(refs)
def error(ref):
    try: value(ref)
    except ray.exceptions.RayError as e: return e
    raise AssertionError("got what is lost")
"""


def run(nodes: Cluster, before: str, after: str, act) -> None:
    """Runs a driver on node 0, and `act` between its two halves."""
    program = START + COMMON + before + "\nprint('ready', flush=True)\nsys.stdin.readline()\n" + after + "\nprint('done', flush=True)\n"
    env = {"PULL_S": "60"}
    with nodes.popen(0, [sys.executable, "-c", program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout.readline() == "ready\n"
            act()
            out, _ = driver.communicate("go\n", timeout=240)
            assert driver.returncode == 0 and out.endswith("done\n")
        finally:
            driver.kill()


def test_a_lost_node(nodes):
    def lose():
        nodes.kill_node(1)
        nodes.start_node(1)

    run(
        nodes,
        """
single, argument, once, seen = (make.remote(name, seed) for seed, name in enumerate(("single", "argument", "once", "seen")))
once = make.options(max_retries=0).remote("never again", 2)
behind = make.remote("behind", 10)
chain = more.remote("chain", behind)
finished(single, argument, once, seen, chain)
known = make.remote("known", 4)
finished(known)
assert mooncake_ray.near(known) != "DEFAULT"                 # its envelope is here
seen_value = value(seen)
begun = ray.get(runs.read.remote())
""",
        """
assert value(single) == expected(n)                          # made again
assert ray.get(total.remote(argument)) == expected(n, 1)     # for another node, too
assert value(chain) == expected(n, 11)                       # was not lost
assert value(seen) == expected(n, 3) == seen_value           # a replica is here
lost = error(once)
assert isinstance(lost, ray.exceptions.ObjectLostError), repr(lost)
counts = Counter(ray.get(runs.read.remote()))
counts.subtract(begun)
assert {name for name, times in counts.items() if times} == {"single", "argument"}, counts
lost = error(known)                                          # Ray has its envelope, so nothing is missing to it
assert isinstance(lost, ray.exceptions.ObjectLostError) and isinstance(lost, mooncake_ray.ObjectLostError), repr(lost)
""",
        lose,
    )


@pytest.mark.slow
def test_a_lost_pool(nodes):
    def nothing():
        pass

    run(
        nodes,
        """
single, seen, argument = (make.remote(name, seed) for seed, name in enumerate(("single", "seen", "argument")))
finished(single, seen, argument)
assert value(seen) == expected(n, 1)
@ray.remote(**on(1))
def lose(): os.kill(mooncake_ray.pool_stats()["pid"], 9)
import os
ray.get(lose.remote())
""",
        """
began = time.monotonic()
lost = error(single)
assert isinstance(lost, ray.exceptions.ObjectLostError) and isinstance(lost, mooncake_ray.ObjectLostError), repr(lost)
try: ray.get(total.remote(argument))
except ray.exceptions.RayTaskError as e: assert "is lost" in str(e), str(e)
else: raise AssertionError
assert time.monotonic() - began < 40, time.monotonic() - began
assert value(seen) == expected(n, 1)                         # a replica is here
assert value(make.remote("after", 9)) == expected(n, 9)
assert ray.get(runs.read.remote()) == dict(single=1, seen=1, argument=1, after=1)
""",
        nothing,
    )
