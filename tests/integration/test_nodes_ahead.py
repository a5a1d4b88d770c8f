"""Objects of other nodes are brought before they are needed, and work is sent to where they are."""

from __future__ import annotations

import pytest
from test_nodes import run

from bench.cluster import Cluster, unavailable
from mooncake_ray.testing import Allowed

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=f"no namespaces here: {unavailable()}")


@pytest.fixture(scope="module")
def nodes():
    with Cluster(3) as cluster:
        yield cluster


@pytest.fixture
def leaks_allowed() -> Allowed:
    """The cluster is the module's; its own processes come and go."""
    return Allowed(processes=("*",))


HERE = """
from mooncake_ray.objects import nodes as services
me = ray.get_runtime_context().get_node_id()
def engine():
    return next(r for r in services.reports() if r["node"] == me)
def objects_here(n):
    eventually(lambda: mooncake_ray.pool_stats()["objects"] == n, mooncake_ray.pool_stats)
"""


@pytest.mark.slow
def test_what_was_prefetched_is_here_although_its_home_died(nodes):
    run(
        nodes,
        HERE
        + """
a, b = workers(1, 2)
n = 1 << 20
held = [ray.get(w.keep.remote(n, seed)) for seed, w in enumerate((a, b))]
batch = ray.get(a.run.remote('''
self.batch = mooncake_ray.put_batch({"x": torch.arange(1 << 18).reshape(256, 1024) * torch.randint(1, 9, (256, 1))})
out = self.batch
'''))
coming = a.make.remote(n, 5)         # not there yet, perhaps
mooncake_ray.prefetch([held, batch, (coming,)])
objects_here(4)
brought = 4
eventually(lambda: engine()["replicas"] == brought, engine)  # counted when they may be read already
eventually(lambda: mooncake_ray.stats()["prefetched"] == 4, mooncake_ray.stats)
mooncake_ray.prefetch(held[0][0])    # again: nothing to do
sent = [r.get("bytes_sent", 0) for r in services.reports() if r["node"] != me]
for w in (a, b):                     # both pools are lost
    ray.get(w.run.remote('''
import os, signal
me = mooncake_ray.pool_stats()["pid"]
os.kill(me, signal.SIGKILL)
'''))
assert [float(ray.get(refs[0]).double().sum()) for refs in held] == [expected(n), expected(n, 1)]
assert float(ray.get(coming).double().sum()) == expected(n, 5)
assert mooncake_ray.get(batch, rows=slice(2, 4))["x"].shape == (2, 1024)
assert len(mooncake_ray.get(batch)["x"]) == 256
assert engine()["replicas"] == brought
""",
    )


@pytest.mark.slow
def test_prefetching_what_cannot_be_had_is_no_error(nodes):
    run(
        nodes,
        HERE
        + """
a, = workers(1)
n = 1 << 20
@ray.remote(**on(1))
def fails(): raise ValueError("on purpose")
@ray.remote(**on(1))
def never():
    while True: time.sleep(0.1)
lost = ray.get(a.keep.remote(n))
ray.get(a.run.remote("import os, signal; os.kill(mooncake_ray.pool_stats()['pid'], signal.SIGKILL)"))
forever = never.remote()
mooncake_ray.prefetch([lost, fails.remote(), ray.put(torch.zeros(1 << 18)), ray.put(1)])
mooncake_ray.prefetch(forever, timeout_s=0.5)
for wrong in (1, ["x"]):
    try: mooncake_ray.prefetch(wrong)
    except TypeError: pass
    else: raise AssertionError(wrong)
try: mooncake_ray.prefetch([], timeout_s=0)
except ValueError: pass
else: raise AssertionError
held = ray.get(a.keep.remote(n, 7))
mooncake_ray.prefetch(held)
eventually(lambda: engine()["replicas"] >= 1, engine)
from mooncake_ray.objects import prefetching
eventually(lambda: not prefetching._asked and not prefetching._running, lambda: prefetching._asked)
assert float(ray.get(held[0]).double().sum()) == expected(n, 7)
ray.cancel(forever, force=True)
""",
        PULL_S="10",
    )


def test_work_goes_to_where_most_bytes_are(nodes):
    run(
        nodes,
        HERE
        + """
a, b = workers(1, 2)
at = [ray.get(w.run.remote("import ray; out = ray.get_runtime_context().get_node_id()")) for w in (a, b)]
@ray.remote(num_cpus=0)
def read(*refs): return ray.get_runtime_context().get_node_id(), sum(float(r.double().sum()) for r in refs)
def read_near(*refs): return ray.get(read.options(scheduling_strategy=mooncake_ray.near(refs)).remote(*refs))
n = 1 << 18
small, large = ray.get(a.keep.remote(n)), ray.get(b.keep.remote(3 * n))
mine = ray.put(torch.arange(n, dtype=torch.float32))
assert read_near(small[0], large[0], mine) == (at[1], 2 * expected(n) + expected(3 * n))
made = [a.make.remote(4 * n), b.make.remote(2 * n)]
ray.wait(made, num_returns=2, fetch_local=False)
assert read_near(*made)[0] == at[0]
assert mooncake_ray.near([mine, mine]).node_id == me
batch = ray.get(a.run.remote('''
self.batch = mooncake_ray.put_batch({"x": torch.arange(1 << 18).reshape(256, 1024) * torch.randint(1, 9, (256, 1))})
out = self.batch
'''))
assert mooncake_ray.near([batch, mine]).node_id == at[0] and mooncake_ray.near(batch).soft
assert mooncake_ray.pool_stats()["objects"] == 1, mooncake_ray.pool_stats()   # nothing was brought here to be looked at
@ray.remote(**on(1))
def fails(): raise ValueError("on purpose")
@ray.remote(**on(1))
def never():
    while True: time.sleep(0.1)
failed, forever = fails.remote(), never.remote()
ray.wait([failed])
assert mooncake_ray.near([failed, forever, ray.put(1)]) == mooncake_ray.near([]) == "DEFAULT"
assert ray.get(read.options(scheduling_strategy=mooncake_ray.near([])).remote())[1] == 0
ray.cancel(forever, force=True)
""",
    )


@pytest.mark.slow
def test_objects_of_other_nodes_are_freed(nodes):
    run(
        nodes,
        HERE
        + """
a, b = workers(1, 2)
n = 1 << 20
def used(w): return ray.get(w.stats.remote())["used_bytes"]
one, two = ray.get(a.keep.remote(n)), ray.get(b.keep.remote(n, 2))
mine, kept, small = ray.put(torch.zeros(n)), ray.put(torch.ones(n)), ray.put(1)
batch = ray.get(b.run.remote('''
self.batch = mooncake_ray.put_batch({"x": torch.arange(1 << 18).reshape(256, 1024) * torch.randint(1, 9, (256, 1))})
out = self.batch
'''))
view = ray.get(one[0])                      # a replica is here, and seen
assert ray.get(b.get.remote(one)) == expected(n)     # and another one there
assert mooncake_ray.free([one, two[0], batch, (mine, small)]) == 4
assert engine()["replicas"] == 1            # nothing else was brought here for that
eventually(lambda: used(a) == 0, lambda: ray.get(a.stats.remote()))
eventually(lambda: used(b) == 0, lambda: ray.get(b.stats.remote()))
assert float(view.double().sum()) == expected(n)
for ref in (one[0], two[0], mine):
    try: ray.get(ref)
    except ray.exceptions.RayError as e: pass
    else: raise AssertionError("got what is freed")
assert float(ray.get(kept).sum()) == n and mooncake_ray.free(small) == 0
del view
gc.collect()
objects_here(1)
""",
    )
