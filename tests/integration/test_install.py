"""Installing, uninstalling, and what the workers get; each in a process of its own, since Ray is a process-wide thing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import HERE, broker_pids, environment, run_script, until

START = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
os.environ["RAY_memory_monitor_refresh_ms"] = "0"
os.environ.setdefault("MOONCAKE_RAY_CAPACITY_BYTES", "256M")
import torch, numpy, ray, mooncake_ray
from conftest import ray_init, until
N = 1 << 18
def settles():
    until(lambda: mooncake_ray.pool_stats()["objects"] == 0, "an empty pool")
"""


def script(body: str, **kwargs) -> str:
    return run_script(START + body, **kwargs).stdout


@pytest.fixture
def leaks_allowed(leaks_allowed):
    """Ray's own servers and agents may outlive a driver that is killed, for a while."""
    return replace(leaks_allowed, processes=(*leaks_allowed.processes, "*/site-packages/ray/*", "ray::*Agent"))


def test_uninstall_restores_ray_exactly():
    script("""
from ray import remote_function, actor
from ray._private import serialization
from ray import cloudpickle
context = serialization.SerializationContext
def seams():
    return [serialization.pickle, context.serialize, serialization.RaySystemError, remote_function.RemoteFunction._remote,
            actor.ActorMethod._remote, actor.ActorClass._remote, dict(cloudpickle.CloudPickler.dispatch), ray.get, ray.put, ray.wait,
            os.environ.get("RAY_RUNTIME_ENV_HOOK")]
before = seams()
mooncake_ray.install()
mooncake_ray.install()
assert mooncake_ray.installed()
during = seams()
assert during[7:10] == before[7:10], "public functions are never replaced"
assert during[6] == before[6], "nor is anybody's reducer"
mooncake_ray.uninstall()
mooncake_ray.uninstall()
assert seams() == before and not mooncake_ray.installed()
mooncake_ray.install()
ray_init()
ref = ray.put(torch.ones(N))
assert mooncake_ray.stats()["routed"] == 1
mooncake_ray.uninstall()
plain = ray.put(torch.ones(N))
assert mooncake_ray.stats()["routed"] == 1
assert ray.get(ref).sum() == N and ray.get(plain).sum() == N
mooncake_ray.install()   # again, in the same job
again = ray.put(torch.ones(N))
assert mooncake_ray.stats()["routed"] == 2
del ref, again
settles()
ray.shutdown()
""")


def test_no_code_change_by_environment_variable():
    script(
        """
ray_init()
@ray.remote
def f(x):
    return x + 1, mooncake_ray.installed()
y, there = ray.get(f.remote(torch.ones(N)))
assert there and mooncake_ray.installed() and mooncake_ray.stats()["routed"] == 1 and y.sum() == 2 * N
""",
        env={"RAY_RUNTIME_ENV_HOOK": "mooncake_ray.ray_hook"},
    )


@pytest.mark.slow
def test_switched_off_by_environment_variable():
    script(
        """
mooncake_ray.install()
ray_init()
@ray.remote
def f(x):
    return x, mooncake_ray.installed()
assert ray.get(f.remote(torch.ones(N)))[1] is False and mooncake_ray.stats()["routed"] == 0 and not mooncake_ray.installed()
""",
        env={"MOONCAKE_RAY": "0", "RAY_RUNTIME_ENV_HOOK": "mooncake_ray.ray_hook"},
    )


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("name", "callable")), "runtime_env_hook"])
def test_the_users_hook_runs_too(kind):
    script(
        f"""
kind = {kind!r}
"""
        + """
def by_value():
    os.environ["USERS_HOOK"] = "ran"
env = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"], "MINE": "yes"}}
if kind == "name":
    env["worker_process_setup_hook"] = "users_hooks.setup"
elif kind == "callable":
    env["worker_process_setup_hook"] = by_value
else:
    os.environ["RAY_RUNTIME_ENV_HOOK"] = "users_hooks.runtime_env"
mooncake_ray.install()
ray_init(runtime_env=env)
@ray.remote
def f():
    return os.environ.get("USERS_HOOK"), os.environ.get("MINE"), mooncake_ray.installed(), torch.ones(N)
@ray.remote
def nested():
    return ray.get(f.remote())
for task in (f, nested):
    hook, mine, there, value = ray.get(task.remote())
    assert (hook, mine, there) == ("ran", "yes", True), (hook, mine, there)
if kind == "runtime_env_hook":
    mooncake_ray.uninstall()
    assert os.environ["RAY_RUNTIME_ENV_HOOK"] == "users_hooks.runtime_env"
"""
    )


def test_install_after_init_says_what_to_do():
    script("""
ray_init()
try:
    mooncake_ray.install()
except mooncake_ray.ConfigError as e:
    assert "before ray.init()" in str(e)
else:
    raise SystemExit("no error")
assert not mooncake_ray.installed()
ray.shutdown()
ray_init(runtime_env=mooncake_ray.runtime_env())
mooncake_ray.install()
assert ray.get(ray.put(torch.ones(N))).sum() == N and mooncake_ray.stats()["routed"] == 1
""")


@pytest.mark.slow
def test_settings_reach_the_workers():
    script("""
mooncake_ray.install(min_bytes=4096, capacity_bytes=100 << 20)
ray_init()
@ray.remote
def f():
    ray.put(torch.ones(2000))
    return mooncake_ray.stats()["routed"]
assert ray.get(f.remote()) == 1
assert mooncake_ray.pool_stats()["capacity_bytes"] == 100 << 20
""")


@pytest.mark.slow
def test_two_sessions_of_ray_in_one_process():
    script("""
mooncake_ray.install()
pools = set()
for _ in range(2):
    ray_init()
    ref = ray.put(torch.ones(N))
    value = ray.get(ref)
    pools.add(mooncake_ray.pool_stats()["sessions"][0]["session"])
    del ref
    ray.shutdown()
    assert value.sum() == N, "a view outlives the cluster"
assert len(pools) == 2 and mooncake_ray.stats()["routed"] == 2
""")


@pytest.mark.slow
def test_sessions_of_ray_with_different_settings():
    script("""
seen = []
@ray.remote
def settings(x):
    return os.environ.get("MOONCAKE_RAY_MIN_BYTES"), mooncake_ray.installed(), x + 1
decorated = mooncake_ray.remote(lambda x: x * 2)
for capacity, least in ((64 << 20, 4096), (128 << 20, 1 << 20)):
    mooncake_ray.install(capacity_bytes=capacity, min_bytes=least)
    ray_init()
    before = mooncake_ray.stats()["routed"]
    told, there, value = ray.get(settings.remote(torch.ones(2000)))
    assert (told, there) == (str(least), True) and value.sum() == 4000
    assert mooncake_ray.stats()["routed"] - before == (least == 4096), "8 kB are much for one, little for the other"
    assert mooncake_ray.pool_stats()["capacity_bytes"] == capacity
    kept = ray.put(torch.ones(N))
    seen.append(ray.get(kept))
    assert ray.get(decorated.remote(kept)).sum() == 2 * N
    ray.shutdown()
mooncake_ray.uninstall()
ray_init()
before = mooncake_ray.stats()["routed"]
told, there, value = ray.get(settings.remote(torch.ones(N)))
assert (told, there) == (None, False) and value.sum() == 2 * N and mooncake_ray.stats()["routed"] == before
ray.shutdown()
assert [value.sum() for value in seen] == [N, N], "views outlive their clusters"
""")


@pytest.mark.slow
def test_decorated_without_install():
    script("""
os.environ["MOONCAKE_RAY_CAPACITY_BYTES"] = "128M"
ray_init(runtime_env={"env_vars": {"MOONCAKE_RAY_CAPACITY_BYTES": "128M"}})
T = lambda v: {"t": torch.full((N,), float(v))}
@mooncake_ray.remote
def bare(v): return T(v)
@mooncake_ray.remote(num_cpus=1)
def options(v): return T(v)
@ray.remote
@mooncake_ray.remote
def under(v): return T(v)
@mooncake_ray.remote
@ray.remote(num_cpus=0.5)
def over(v): return T(v)
@mooncake_ray.remote
def items(n):
    for i in range(n): yield T(i)
@mooncake_ray.remote
def use(b): return float(b["t"][0])
@ray.remote
def plain(): return T(1)
before = 0
for f in (bare, options, under, over):
    assert float(ray.get(f.remote(3))["t"][0]) == 3 and ray.get(use.remote(f.options(name="n").remote(4))) == 4
assert [float(ray.get(r)["t"][0]) for r in items.remote(3)] == [0, 1, 2]
assert ray.get(use.remote(T(5))) == 5 and mooncake_ray.stats()["routed"] == 1
settles()
ref = plain.remote(); ray.wait([ref])
assert mooncake_ray.pool_stats()["objects"] == 0, f"what is not decorated stays Ray's: {mooncake_ray.pool_stats()} {ref}"
ray.put(T(1))
assert mooncake_ray.stats()["routed"] == 1

@mooncake_ray.remote
class Bare:
    def __init__(self, b): self.b = b
    def get(self): return self.b
    async def aget(self): return self.b
@mooncake_ray.remote
@ray.remote(max_concurrency=2)
class Over:
    @ray.method(num_returns=2)
    def two(self): return T(1), T(2)
@ray.remote
class One:
    @mooncake_ray.remote
    def routed(self): return T(7)
    def unrouted(self): return T(8)
a = Bare.remote(T(6))
assert float(ray.get(a.get.remote())["t"][0]) == 6 and float(ray.get(a.aget.remote())["t"][0]) == 6
assert float(ray.get(Bare.options(num_cpus=0).remote(T(9)).get.remote())["t"][0]) == 9
x, y = Over.remote().two.remote()
assert float(ray.get(y)["t"][0]) == 2
o = One.remote()
r = o.routed.remote(); u = o.unrouted.remote(); ray.wait([r, u], num_returns=2)
assert float(ray.get(r)["t"][0]) == 7 and float(ray.get(u)["t"][0]) == 8
try: bare.remote(1, 2, 3)
except TypeError: pass
else: raise SystemExit("a wrong call passed")
for wrong in (lambda: mooncake_ray.remote(3), lambda: mooncake_ray.remote(bare, 2)):
    try: wrong()
    except TypeError: pass
    else: raise SystemExit("no TypeError")
try:
    @mooncake_ray.remote
    class Hides:
        def options(self): pass
except TypeError as e: assert "options" in str(e)
else: raise SystemExit("no TypeError")
del a, x, y, o, r, u
""")


def test_nothing_is_left_after_shutdown():
    out = script("""
mooncake_ray.install()
ray_init()
view = ray.get(ray.put(torch.ones(N)))
ref = ray.put(torch.ones(N))
print(ray._private.worker.global_worker.node.session_name)
ray.shutdown()
""")
    scope = out.split()[-1]
    until(lambda: not broker_pids(scope), "the broker's end")
    assert not [name for name in os.listdir("/dev/shm") if "mooncake" in name]


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_nothing_is_left_after_a_killed_driver(how):
    body = """
mooncake_ray.install()
ray_init()
@ray.remote
class A:
    def make(self): return torch.ones(N)
a = A.remote()
kept = [ray.put(torch.ones(N)), a.make.remote()]
ray.wait(kept, num_returns=2)
view = ray.get(kept[1])
print("ready", ray._private.worker.global_worker.node.session_name, flush=True)
import signal; signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-c", START + body], stdout=subprocess.PIPE, text=True, env=environment())
    scope = ""
    for line in process.stdout:
        if line.startswith("ready"):
            scope = line.split()[1]
            break
    assert scope and broker_pids(scope)
    process.send_signal(how)
    process.wait(60)
    until(lambda: not broker_pids(scope), "the broker's end")


def test_import_is_light():
    run_script("""
import sys, threading
import mooncake_ray
assert not {"torch", "ray", "numpy"} & set(sys.modules), "import mooncake_ray must import neither"
assert threading.active_count() == 1
assert sorted(mooncake_ray.__all__) == mooncake_ray.__all__ == dir(mooncake_ray)
assert all(getattr(mooncake_ray, name) is not None for name in mooncake_ray.__all__)
""")


@pytest.mark.slow
def test_without_a_broker_everything_is_rays():
    out = run_script(
        START
        + """
import logging; logging.basicConfig(stream=sys.stdout)
from mooncake_ray.store import node
node._start = lambda *a: (_ for _ in ()).throw(mooncake_ray.BrokerDiedError("not today"))
mooncake_ray.install()
ray_init()
assert ray.get(ray.put(torch.ones(N))).sum() == N and ray.get(ray.put(torch.ones(N))).sum() == N
assert mooncake_ray.stats()["routed"] == 0
"""
    ).stdout
    assert out.count("Ray's own object store is used") == 1


def test_the_broker_dies_under_a_job():
    script("""
mooncake_ray.install()
ray_init()
from conftest import broker_pids
import signal
ref = ray.put(torch.ones(N)); view = ray.get(ref)
(pid,) = broker_pids(ray._private.worker.global_worker.node.session_name)
os.kill(pid, signal.SIGKILL)
until(lambda: pid not in broker_pids(ray._private.worker.global_worker.node.session_name), "the broker's end")
assert view.sum() == N
def lost():
    try: ray.get(ref)
    except ray.exceptions.ObjectLostError: return True
until(lost, "ObjectLostError")
again = ray.put(torch.ones(N) * 2)   # through a new broker, or Ray's store: the job goes on
assert ray.get(again).sum() == 2 * N
@ray.remote
def f(x): return x + 1
assert ray.get(f.remote(again)).sum() == 3 * N
""")
