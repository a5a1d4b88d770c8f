"""What is told of node services, to somebody who has nothing to do with the job."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_nodes import START, run

from bench.cluster import Cluster, unavailable
from mooncake_ray.testing import Allowed

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=f"no namespaces here: {unavailable()}")

COMMAND = str(Path(sys.executable).with_name("mooncake-ray"))
N = 1 << 20


@pytest.fixture(scope="module")
def nodes():
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture
def leaks_allowed() -> Allowed:
    """The cluster is the module's; its own processes come and go."""
    return Allowed(processes=("*",))


JOB = (
    START
    + """
a, = workers(1)
held = ray.get(a.keep.remote(1 << 20))
there = ray.get(a.sum.remote(ray.put(torch.arange(1 << 20, dtype=torch.float32))))
assert float(ray.get(held[0]).double().sum()) == there
print("ready", flush=True)
sys.stdin.readline()
"""
)


def test_status_of_a_node_and_of_the_cluster(nodes):
    none = nodes.run(1, [COMMAND, "status", "--cluster"])
    assert "no node service is running in this Ray cluster" in none.stdout
    with nodes.popen(0, [sys.executable, "-c", JOB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "ready\n"
        (pool,) = json.loads(nodes.run(1, [COMMAND, "status", "--json"]).stdout)["pools"]
        service = pool["service"]
        assert service["endpoint"].startswith(f"{nodes.hosts[1].address}:") and service["replicas"] == 1
        assert list(service["peers"].values()) == ["tcp"] and service["bytes_sent"] >= 4 * N and service["remote_bytes_read"] == 4 * N
        shown = nodes.run(1, [COMMAND, "status"]).stdout
        assert f"serves at {service['endpoint']}: 1 peer session" in shown and "brought here: 1 object, 4 MiB read" in shown
        everywhere = json.loads(nodes.run(1, [COMMAND, "status", "--cluster", "--json"]).stdout)["services"]
        assert {s["host"] for s in everywhere} == {host.address for host in nodes.hosts.values()}
        assert {s["report"]["replicas"] for s in everywhere} == {1}
        shown = nodes.run(0, [COMMAND, "status", "--cluster"]).stdout
        assert shown.count("brought here: 1 object, 4 MiB read") == 2
        assert min(s["report"]["pool"]["used_bytes"] for s in everywhere) >= 4 * N and shown.count(" MiB used, ") == 2
        job.stdin.close()
        assert job.wait(60) == 0


@pytest.mark.slow
def test_pools_of_all_nodes_by_one_call(nodes):
    run(
        nodes,
        """
from mooncake_ray.serve.fill import node_pools
a, = workers(1)
held = ray.get(a.keep.remote(1 << 20))
assert ray.get(a.sum.remote(ray.put(torch.arange(1 << 20, dtype=torch.float32)))) == float(ray.get(held[0]).double().sum())
pools = lambda: {p.host: p.pool.used_bytes if p.pool else p.error for p in node_pools(30.0)}
eventually(lambda: set(pools()) == {"198.18.0.1", "198.18.0.2"} and all(isinstance(v, int) and v >= 4 << 20 for v in pools().values()), pools)
""",
    )


def test_the_address_that_services_listen_on_is_of_the_network_that_is_set(nodes):
    run(
        nodes,
        """
from mooncake_ray.objects import nodes
mooncake_ray.pool_stats()
eventually(lambda: len(nodes.reports()) == 2, nodes.reports)
assert {r["endpoint"].rpartition(":")[0] for r in nodes.reports()} == {"127.0.0.1"}, nodes.reports()
""",
        MOONCAKE_RAY_HOST="127.0.0.0/8",
    )


def test_status_where_there_is_no_cluster(nodes):
    said = nodes.run(1, [COMMAND, "status", "--cluster"], env={"RAY_ADDRESS": f"{nodes.hosts[1].address}:1"}, check=False)
    assert said.returncode == 1 and said.stderr.startswith("mooncake-ray: no Ray cluster answers at 198.18.0.2:1:")


@pytest.mark.skipif(not importlib.util.find_spec("opentelemetry.exporter.prometheus"), reason="ray[default] exports metrics")
@pytest.mark.slow
def test_what_services_do_is_exported(nodes):
    run(
        nodes,
        """
import urllib.request
a, = workers(1)
held = ray.get(a.keep.remote(1 << 20))
assert ray.get(a.sum.remote(ray.put(torch.arange(1 << 20, dtype=torch.float32)))) == float(ray.get(held[0]).double().sum())
def scraped():
    found = {}
    for n in ray.nodes():
        if n["Alive"]:
            text = urllib.request.urlopen(f"http://{n['NodeManagerAddress']}:{n['MetricsExportPort']}/metrics", timeout=100).read().decode()
            for line in text.splitlines():
                if line.startswith("ray_mooncake_ray_"):
                    name = line.partition("{")[0].removeprefix("ray_mooncake_ray_"), n["NodeManagerAddress"]
                    found[name] = found.get(name, 0) + float(line.split()[-1])
    return found
hosts = ["198.18.0.1", "198.18.0.2"]
def there():
    found = scraped()  # of earlier jobs on these nodes, too
    ok = all(found.get(("remote_read_bytes_total", h), 0) >= 4 << 20 and found.get(("replicas_total", h), 0) >= 1 for h in hosts)
    return ok and all(found.get(("remote_sent_bytes_total", h), 0) >= 4 << 20 and found.get(("peer_sessions", h), 0) >= 1 for h in hosts)
eventually(there, scraped)
""",
    )
