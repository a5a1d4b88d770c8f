"""Several jobs on one Ray node, Ray Client, and several sessions of Ray in one process."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest
from conftest import environment

from mooncake_ray.testing import Allowed

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
CLIENT_PORT = 20_000 + os.getpid() % 10_000

START = """
import gc, os, sys
import torch, numpy as np, ray, mooncake_ray
from conftest import until
N = 1 << 18
address, mode = os.environ["JOB_ADDRESS"], os.environ["JOB_MODE"]
if mode == "pool":
    mooncake_ray.install()
def connect(**settings):
    env = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
    ray.init(address=address, namespace="jobs", log_to_driver=False, runtime_env=env, **settings)
def batch(value):
    return {"t": torch.full((N,), float(value)), "n": np.full(N, value)}
def first(got):
    return float(got["t"][-1]) + float(got["n"][0])
def say(*words):
    print(*words, flush=True)
def wait():
    sys.stdin.readline() or os._exit(3)
class Keeper:
    def __init__(self, value=None): self.value = value
    def keep(self, value): self.value = value
    def read(self): return self.value
    def inner(self): return ray.get(self.value[0])
    def make(self, value): return batch(value)
    def make_ref(self, value): return [ray.put(batch(value))]
    def use(self, got): return first(got)
    def stream(self, n):
        for i in range(n): yield batch(i)
    def pid(self): return os.getpid()
"""


class Driver:
    """A program of its own: a job of the node."""

    def __init__(self, address: str, body: str, mode: str = "pool") -> None:
        env = environment(JOB_ADDRESS=address, JOB_MODE=mode, MOONCAKE_RAY_CAPACITY_BYTES="128M")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", START + body], text=True, env=env, **pipes)

    def said(self) -> str:
        line = self.process.stdout.readline()
        assert line, f"the driver ended with {self.process.wait()}:\n{self.process.stderr.read()[-4000:]}"
        return line.strip()

    def go(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self) -> str:
        out, err = self.process.communicate(timeout=100)
        assert self.process.returncode == 0, f"exit {self.process.returncode}\n{out}\n{err[-4000:]}"
        return out

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=100)


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    """A Ray node that belongs to no driver."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 4, "object_store_memory": 300 << 20, "include_dashboard": False}
    directory = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: there are sockets in it
    node["temp_dir"] = directory
    if importlib.util.find_spec("grpc"):
        node["ray_client_server_port"] = CLIENT_PORT
    cluster = Cluster(initialize_head=True, head_node_args=node)
    yield cluster
    cluster.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def leaks_allowed() -> Allowed:
    """The node is the module's; it keeps workers, a broker, and servers of clients for a while."""
    return Allowed(processes=("ray::*", "*mooncake-broker*", "*ray.util.client.server*"))


@pytest.fixture
def drive(cluster) -> Iterator[object]:
    drivers = []

    def start(body: str, mode: str = "pool") -> Driver:
        drivers.append(Driver(cluster.address, body, mode))
        return drivers[-1]

    yield start
    for driver in drivers:
        if driver.process.poll() is None:
            driver.kill()


MAKES_A_DETACHED_ACTOR = """
connect()
keeper = ray.remote(num_cpus=0)(Keeper).options(name=name, lifetime="detached").remote(batch(1))
mine = ray.put(batch(2))
ray.get(keeper.keep.remote([mine, *ray.get(keeper.make_ref.remote(3))]))
assert first(ray.get(keeper.inner.remote())) == 4
say("ready", mooncake_ray.stats()["routed"])
wait()
"""
USES_IT = """
connect()
def lost(ref):  # where nothing is installed, what is lost before Ray knows of its owner's death is a RaySystemError
    try: ray.get(ref)
    except (ray.exceptions.OwnerDiedError, *(() if mooncake_ray.installed() else (ray.exceptions.RaySystemError,))): return True
keeper = ray.get_actor(name)
drivers_ref, actors_ref = ray.get(keeper.read.remote())
assert first(ray.get(drivers_ref)) == 4 and first(ray.get(actors_ref)) == 6, "refs of another job, and of the actor"
kept = keeper.make.remote(5)
assert first(ray.get(kept)) == 10 and ray.get(keeper.use.remote(kept)) == 10 and ray.get(keeper.use.remote(batch(6))) == 12
assert [first(ray.get(ref)) for ref in keeper.stream.remote(3)] == [0, 2, 4]
view = ray.get(drivers_ref)
say("read", mooncake_ray.stats()["routed"])
wait()
if routed_puts:  # a copy that plain Ray has on this node may still be read
    until(lambda: lost(drivers_ref), "the loss of what a dead driver had put")
assert first(view) == 4, "a view outlives the driver whose it was"
assert first(ray.get(actors_ref)) == 6 and first(ray.get(kept)) == 10, "what is the actor's, and what is this driver's"
ray.get(keeper.keep.remote([kept]))
assert first(ray.get(keeper.inner.remote())) == 10
ray.kill(keeper)
assert first(ray.get(kept)) == 10
if routed_puts:
    until(lambda: lost(actors_ref), "the loss of what the dead actor had put")
del drivers_ref, actors_ref, kept, view
gc.collect()
"""
SETTLES = """
mooncake_ray.install()
until(lambda: mooncake_ray.pool_stats()["claims"] == mooncake_ray.pool_stats()["orphans"], "a pool without owned objects")
say("left", mooncake_ray.pool_stats()["objects"])
"""


@pytest.mark.parametrize("modes", [("pool", "pool"), ("pool", "plain"), ("plain", "pool"), ("plain", "plain")], ids="-".join)
@pytest.mark.parametrize("how", ["end", "kill"])
def test_a_detached_actor_outlives_its_driver(drive, modes, how):
    if modes == ("plain", "plain") and how == "kill":
        pytest.skip("shows that the case is one of plain Ray's; once is enough")
    name = f"name = 'detached-{'-'.join(modes)}-{how}'\n"
    maker = drive(name + MAKES_A_DETACHED_ACTOR, modes[0])
    assert (maker.said() == "ready 0") == (modes[0] == "plain")
    user = drive(f"{name}routed_puts = {modes[0] == 'pool'}\n" + USES_IT, modes[1])
    assert (user.said() == "read 0") == (modes[1] == "plain")
    if how == "kill":
        maker.kill()
    else:
        maker.go()
        maker.finish()
    user.go()
    user.finish()
    left = drive("connect()\n" + SETTLES).finish()
    assert left.split() == ["left", "0"] or modes == ("pool", "plain"), "what a process without the pool called for has no owner"


def test_two_installed_drivers_at_a_time(drive):
    body = """
connect()
keeper = ray.remote(num_cpus=0)(Keeper).remote()
refs = [ray.put(batch(i)) for i in range(5)] + [keeper.make.remote(i) for i in range(5)]
ray.wait(refs, num_returns=10)
say(mooncake_ray.pool_stats()["capacity_bytes"])
wait()
assert [first(got) for got in ray.get(refs)] == [2 * i for i in range(5)] * 2
say("done")
wait()
"""
    drivers = [drive(body), drive(body)]
    assert [driver.said() for driver in drivers] == [str(128 << 20)] * 2
    drivers[0].kill()  # its objects go, the other's stay
    drivers[1].go()
    assert drivers[1].said() == "done"
    other = drive("connect()\nuntil(lambda: mooncake_ray.pool_stats()['claims'] - mooncake_ray.pool_stats()['orphans'] == 10, 'ten')")
    other.finish()
    drivers[1].go()
    drivers[1].finish()
    drive("connect()\n" + SETTLES).finish()


@pytest.mark.parametrize("when", ["before", "after", "hook"])
def test_ray_client_stays_rays(drive, when):
    """A client pickles in another process than Ray's: nothing is routed, and everything is right."""
    pytest.importorskip("grpc", reason="Ray Client needs grpcio")
    body = f"""
when, address = {when!r}, "ray://127.0.0.1:{CLIENT_PORT}"
if when == "before": mooncake_ray.install()
if when == "hook": os.environ["RAY_RUNTIME_ENV_HOOK"] = "mooncake_ray.ray_hook"
for left in (2, 1, 0):  # Ray gives the client's server 30 s to start, which is short for a busy machine
    try:
        connect()
        break
    except ConnectionError:
        ray.shutdown()
        if not left: raise
if when == "after": mooncake_ray.install()
@ray.remote
def add(got, *refs): return batch(first(got) + sum(first(b) for b in ray.get(list(refs))))
@mooncake_ray.remote
def decorated(got): return batch(first(got) + 1)
ref = ray.put(batch(1))
assert first(ray.get(ref)) == 2 and first(ray.get(add.remote(ref))) == 4 and first(ray.get(add.remote(batch(3)))) == 12
assert first(ray.get(decorated.remote(ref))) == 6
keeper = ray.remote(num_cpus=0)(Keeper).options(max_restarts=1).remote(batch(4))
assert first(ray.get(keeper.read.remote())) == 8 and first(ray.get(keeper.make.remote(5))) == 10
assert ray.wait([ref], timeout=200)[0] == [ref]
assert mooncake_ray.stats()["routed"] == 0
ray.shutdown()
say("ok")
"""
    assert drive(body, "plain").finish().split() == ["ok"]
