"""A get that cannot succeed: it ends in time, or by Ctrl-C, says why, and leaves nothing behind."""

from __future__ import annotations

import pytest
from test_nodes import run

from bench.cluster import Cluster, unavailable
from mooncake_ray.testing import Allowed

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=f"no namespaces here: {unavailable()}")


@pytest.fixture(scope="module")
def nodes():
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture
def leaks_allowed() -> Allowed:
    """The cluster is the module's; its own processes come and go."""
    return Allowed(processes=("*",))


SILENCE = """
import signal, threading
from mooncake_ray.objects import nodes as services
a, = workers(1)
n = 1 << 21
def service(signal):
    ray.get(a.run.remote(f'''
import os
from pathlib import Path
services = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and b"ray::NodeService" in (p / "cmdline").read_bytes()]
assert len(services) == 1, services
os.kill(services[0], {int(signal)})
'''))
def held(seed): return ray.get(a.keep.remote(n, seed))[0]
def value(ref): return float(ray.get(ref).double().sum())
def descriptors(): return len(os.listdir("/proc/self/fd"))
def here(): return {k: mooncake_ray.pool_stats()[k] for k in ("pins", "leases", "used_bytes")}
def home(): return {k: v for k, v in ray.get(a.stats.remote()).items() if k in ("pins", "leases")}
assert value(held(1)) == expected(n, 1)   # everything is connected
a.drop.remote()
settles(a)
"""


@pytest.mark.slow
def test_a_get_ends_in_time(nodes):
    run(
        nodes,
        SILENCE
        + """
ref = held(2)
service(signal.SIGSTOP)
try: value(ref)
except ray.exceptions.GetTimeoutError as e: assert isinstance(e, mooncake_ray.GetTimeoutError), repr(e)
else: raise AssertionError
service(signal.SIGCONT)
assert value(ref) == expected(n, 2)
""",
        PULL_S="4",
    )


def test_ctrl_c(nodes):
    run(
        nodes,
        SILENCE
        + """
import traceback
ref = held(2)
before, idle = descriptors(), here()
service(signal.SIGSTOP)
main = threading.main_thread().ident
def asks(): return "pulled" in [f.name for f in traceback.extract_stack(sys._current_frames()[main])]
for _ in range(2):
    def interrupt():
        eventually(asks, lambda: "the engine was not asked")
        signal.pthread_kill(main, signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try: value(ref)
    except KeyboardInterrupt: pass
    else: raise AssertionError
    thread.join()
service(signal.SIGCONT)
assert value(ref) == expected(n, 2)
del ref
a.drop.remote()
settles(a)
eventually(lambda: here() == idle, here)
eventually(lambda: home() == dict(pins=0, leases=0), home)
assert descriptors() <= before + 2, (before, descriptors())   # the pin of another object, perhaps, and a connection
""",
        PULL_S="60",
    )


def test_a_pool_without_room_says_so(nodes):
    run(
        nodes,
        """
a, = workers(1)
ref = ray.get(a.keep.remote(12 << 20))[0]
mine = ray.put(torch.zeros(25 << 20))            # most of this node's pool
try: ray.get(ref)
except ray.exceptions.RayError as e: assert "StoreFullError" in str(e), repr(e)
else: raise AssertionError
del mine
assert float(ray.get(ref).double().sum()) == expected(12 << 20)
""",
        PULL_S="4",
    )


@pytest.mark.slow
def test_a_transport_that_cannot_be_used_says_so(nodes):
    run(
        nodes,
        """
a, = workers(1)
ref = ray.get(a.keep.remote(1 << 20))[0]
try: ray.get(ref)
except ray.exceptions.RayError as e: assert "TransportUnavailableError" in str(e) and "at the peer" in str(e), repr(e)
else: raise AssertionError
""",
        PULL_S="8",
        MOONCAKE_RAY_TRANSPORT="verbs",
    )


@pytest.mark.slow
def test_a_service_that_cannot_start_says_why(nodes):
    run(
        nodes,
        """
a, = workers(1)
ref = ray.get(a.keep.remote(1 << 20))[0]
try: ray.get(ref)
except ray.exceptions.GetTimeoutError as e: assert "no address in the network 203.0.113.0/24" in str(e), repr(e)
else: raise AssertionError
""",
        PULL_S="8",
        MOONCAKE_RAY_HOST="203.0.113.0/24",
    )
