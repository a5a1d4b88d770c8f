"""One Ray cluster with the pool installed, shared by the tests of this process; and ways to look at it."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench import cluster
from mooncake_ray.testing import Allowed

os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
for name in ("READY", "HEALTH"):  # on a busy machine, Serve would end its proxy before it has started
    os.environ.setdefault(f"RAY_SERVE_PROXY_{name}_CHECK_TIMEOUT_S", "60")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEADLINE_S = 200.0  # on a machine that does other things as well


def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Waits for a condition, with a deadline."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come true within {DEADLINE_S} s")
        time.sleep(0.005)


def ray_init(**kwargs):
    """Ray on this machine. Its own start-up limit of 30 s is short for a busy one, so more than one try."""
    import ray

    kwargs = {"num_cpus": 4, "include_dashboard": False, "log_to_driver": False, "object_store_memory": 300 << 20} | kwargs
    for left in (2, 1, 0):
        try:
            return ray.init(address="local", **kwargs)
        except Exception:
            ray.shutdown()
            if not left:
                raise


@pytest.fixture(scope="session")
def pool_ray():
    """Ray with the pool installed in this process."""
    import ray

    import mooncake_ray

    mooncake_ray.install(capacity_bytes=256 << 20, prefault_bytes=32 << 20)
    ray_init(runtime_env={"env_vars": {"PYTHONPATH": str(HERE)}})
    mooncake_ray.pool_stats()  # the broker is there before the first test, not left behind by it
    yield ray
    ray.shutdown()
    mooncake_ray.uninstall()


@pytest.fixture
def leaks_allowed(request: pytest.FixtureRequest) -> Allowed:
    """The shared cluster may start threads, connections and workers in any test; what is in its pool is looked at by `pool`."""
    if "pool_ray" not in request.fixturenames:
        return Allowed(deadline_s=30.0)  # Ray's agents take their time to notice that a killed node is gone
    ray_threads = ("ray_*", "mooncake_ray.*", "AsyncIO*", "Thread-*", "Dummy-*")  # the last are threads of Ray's core that call back
    descriptors = ("socket:*", "anon_inode:*", "pipe:*", "/memfd:mooncake_ray*")
    return Allowed(threads=ray_threads, descriptors=descriptors, maps=("r?-s",), processes=("ray::*",))


@pytest.fixture
def pool(pool_ray):
    """The pool, and the demand that a test leaves nothing in it."""
    view = Pool()
    yield view
    view.settles_at(0)


class Pool:
    """What the broker says; objects and claims beside those that an earlier test left, as long as these are there."""

    def __init__(self) -> None:
        import mooncake_ray

        stats = mooncake_ray.pool_stats()
        self._before = {name: stats[name] for name in ("objects", "claims")}

    def __getattr__(self, name: str):
        import mooncake_ray

        found = mooncake_ray.pool_stats()[name]
        if name in self._before:
            self._before[name] = min(self._before[name], found)
        return found - self._before.get(name, 0)

    def settles_at(self, objects: int) -> None:
        """Asserts that the pool comes to hold that many objects. Collects garbage first: exceptions keep frames, and frames refs."""
        gc.collect()
        try:
            until(lambda: self.objects == objects)
        except AssertionError:
            import mooncake_ray

            raise AssertionError(f"the pool should hold {objects} objects: {mooncake_ray.pool_stats()}") from None


@pytest.fixture
def cluster_of() -> Iterator[Callable[..., cluster.Cluster]]:
    """Makes clusters of several nodes (see `bench.cluster.Cluster`), and ends them. They know nothing of the Ray of this process."""
    if why := cluster.unavailable():
        pytest.skip(f"no network namespaces here: {why}")
    with contextlib.ExitStack() as made:
        yield lambda nodes=2, **options: made.enter_context(cluster.Cluster(nodes, **options))


def environment(**more: str) -> dict[str, str]:
    """For a program of its own: without what an installed pool has left in this process's environment."""
    ours = {name: value for name, value in os.environ.items() if name != "RAY_RUNTIME_ENV_HOOK" and not name.startswith("MOONCAKE_RAY")}
    return {**ours, "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]), **more}


def run_script(text: str, *, env: dict[str, str] | None = None, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    """Runs a program of its own, in which nothing is installed; asserts that it succeeded."""
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=environment(**(env or {})),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def broker_pids(scope: str) -> list[int]:
    """The brokers whose name has `scope` in it."""
    return pids("mooncake-broker", scope)


def pids(program: str, word: str) -> list[int]:
    """The processes of a program that have a word in their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0].endswith(program.encode()) and any(word.encode() in w for w in words):
                found.append(int(entry.name))
    return found
