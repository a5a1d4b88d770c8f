"""Objects of one node are got on another: a real Ray cluster, every node with a network and a pool of its own."""

from __future__ import annotations

import json

import pytest

from bench.cluster import Cluster, unavailable
from mooncake_ray.testing import Allowed

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=f"no namespaces here: {unavailable()}")

START = """
import gc, json, os, sys, time
import numpy as np, ray, torch
import mooncake_ray
limits = dict(capacity_bytes=128 << 20, prefault_bytes=16 << 20, linger_s=1.0, spill_dir="off")
mooncake_ray.install(**limits, pull_timeout_s=float(os.environ.get("PULL_S", "40")))
ray.init(log_to_driver=False)
def on(node, **options): return dict(resources={f"node{node}": 0.01}, num_cpus=0, **options)
@ray.remote(num_cpus=0)
class Worker:
    def make(self, n, seed=0): return torch.arange(n, dtype=torch.float32) + seed
    def keep(self, n, seed=0):
        self.ref = ray.put(torch.arange(n, dtype=torch.float32) + seed)
        return [self.ref]
    def drop(self): del self.ref
    def array(self): return np.arange(1 << 18)
    def sum(self, x): return float(x.double().sum())
    def get(self, refs): return float(ray.get(refs[0]).double().sum())
    def stats(self):
        gc.collect()
        return mooncake_ray.pool_stats()
    def run(self, code):
        scope = {"self": self, "np": np, "torch": torch, "mooncake_ray": mooncake_ray}
        exec(code, scope)
        return scope.get("out")
names = iter("abcdef")
def workers(*nodes): return [Worker.options(name=next(names), **on(n)).remote() for n in nodes]
def expected(n, seed=0): return float((torch.arange(n, dtype=torch.float32) + seed).double().sum())
def eventually(condition, what):
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.05)
def settles(*ws):
    for w in ws:
        eventually(lambda: ray.get(w.stats.remote())["used_bytes"] == 0, lambda: ray.get(w.stats.remote()))
"""


@pytest.fixture(scope="module")
def nodes():
    with Cluster(3) as cluster:
        yield cluster


@pytest.fixture
def leaks_allowed() -> Allowed:
    """The cluster is the module's; its own processes come and go."""
    return Allowed(processes=("*",))


def run(cluster: Cluster, body: str, node: int = 0, **env: str) -> str:
    return cluster.program(node, START + body + "\nprint('done')", env=env, timeout_s=180)


def test_what_is_returned_to_another_node_ends_with_its_refs(nodes):
    """Whether it was got there, or only waited for, or not even that; and with a caller that is killed."""
    run(
        nodes,
        """
a, b = workers(1, 2)
n = 1 << 18
for seed in range(3):
    value = a.make.remote(n, seed)
    ray.get(value)
    ray.wait([a.make.remote(n, seed)], fetch_local=False)
    a.make.remote(n, seed)
    del value
settles(a)
ray.get(b.run.remote("import ray; self.kept = ray.get_actor('a').make.remote(1 << 18); ray.wait([self.kept], fetch_local=False)"))
eventually(lambda: ray.get(a.stats.remote())["used_bytes"] > 0, lambda: "nothing was made")
time.sleep(0.5)
assert ray.get(a.stats.remote())["orphans"] == 0
ray.kill(b)
settles(a)
""",
    )


def test_what_is_detached_from_its_job_keeps_its_services(nodes):
    run(
        nodes,
        """
options = dict(namespace="kept", lifetime="detached")
kept = [Worker.options(name=f"kept{n}", **options, **on(n)).remote() for n in (1, 2)]
ray.get([k.stats.remote() for k in kept])
""",
    )
    nodes.program(
        0,
        """
import time, ray
ray.init(namespace="kept", log_to_driver=False)  # a job that has nothing to do with the pool
time.sleep(3)  # for longer than a service needs to see that its job is over
one, other = (ray.get_actor(f"kept{n}") for n in (1, 2))
n = 1 << 20
assert ray.get(other.get.remote(ray.get(one.keep.remote(n)))) == n * (n - 1) / 2
ray.kill(one), ray.kill(other)
end = time.monotonic() + 200
while services := [a for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == "mooncake_ray"]:
    assert time.monotonic() < end, services
    time.sleep(0.1)
""",
        timeout_s=180,
    )


def test_put_and_returns_are_got_on_another_node(nodes):
    run(
        nodes,
        """
a, b = workers(1, 2)
n = 1 << 20
ref = ray.put(torch.arange(n, dtype=torch.float32))
assert ray.get(a.sum.remote(ref)) == expected(n)            # put here, an argument there
assert ray.get(b.sum.remote(a.make.remote(n, 3))) == expected(n, 3)  # a return, an argument elsewhere
assert float(ray.get(a.make.remote(n, 4)).double().sum()) == expected(n, 4)
held = ray.get(a.keep.remote(n, 5))
assert ray.get(b.get.remote(held)) == expected(n, 5)        # put by a worker, a ref in a list
assert np.array_equal(ray.get(a.array.remote()), np.arange(1 << 18))
""",
    )


def test_a_replica_is_shared_on_its_node_and_goes_with_the_object(nodes):
    run(
        nodes,
        """
a, b, c = workers(1, 2, 2)
n = 4 << 20
held = ray.get(a.keep.remote(n))
assert ray.get([b.get.remote(held), c.get.remote(held)]) == [expected(n)] * 2
assert ray.get(b.stats.remote())["objects"] == 1
del held
a.drop.remote()
settles(a, b)
""",
    )


def test_parts_of_a_batch_come_alone(nodes):
    run(
        nodes,
        """
a, b = workers(1, 2)
make = '''
rows = 64
proto = mooncake_ray.DataProto.from_dict(tensors={"big": torch.randn(rows, 1 << 14), "small": torch.arange(rows * 4).reshape(rows, 4)})
self.ref = mooncake_ray.put_batch(proto)
out = self.ref
'''
ref = ray.get(a.run.remote(make))
got = mooncake_ray.get(ref, fields=["small"])
assert torch.equal(got.batch["small"], torch.arange(256).reshape(64, 4))
part = mooncake_ray.get(ref, fields=["big"], rows=slice(3, 5))
whole = mooncake_ray.get(ref)
assert torch.equal(part.batch["big"], whole.batch["big"][3:5])
""",
    )


def test_what_is_passed_on_lives_here(nodes):
    run(
        nodes,
        """
a, b = workers(1, 2)
n = 1 << 20
held = ray.get(a.keep.remote(n))
mine = ray.put(ray.get(held[0]))     # this node's replica, claimed
del held
ray.get(a.drop.remote())
assert ray.get(b.get.remote([mine])) == expected(n)
""",
    )


def test_a_dead_owner_is_an_error_in_time(nodes):
    run(
        nodes,
        """
a, b = workers(1, 2)
n = 1 << 20
held = ray.get(a.keep.remote(n))
ray.kill(a)  # which does not wait for its end
end = time.monotonic() + 200
while True:
    try:
        ray.get(held[0])
    except (ray.exceptions.OwnerDiedError, ray.exceptions.ObjectLostError) as e:
        print(type(e).__name__)
        break
    assert time.monotonic() < end, "got what is gone"
""",
        PULL_S="20",
    )


def test_status_tells_of_the_services(nodes):
    out = run(
        nodes,
        """
a, b = workers(1, 2)
assert ray.get(b.sum.remote(a.make.remote(1 << 20))) == expected(1 << 20)
from mooncake_ray.objects import nodes
print("report", json.dumps(nodes.reports()))
""",
    )
    reports = json.loads(next(line for line in out.splitlines() if line.startswith("report")).partition(" ")[2])
    assert len(reports) == 3
    assert {"tcp"} <= {name for report in reports for name in report["peers"].values()}
