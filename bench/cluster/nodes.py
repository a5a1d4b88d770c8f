"""A Ray cluster of several nodes on one machine, each on a host of its own (see `bench.cluster.netns`).

    with Cluster(3) as cluster:
        cluster.run(1, [sys.executable, "program.py"])      # ray.init() in it joins the cluster, as a driver on node 1
        cluster.hosts[2].shape(Link(bits_per_s=1e9))
        cluster.kill_node(2)

By hand: `python -m bench.cluster 3`, and in other terminals what that says.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.cluster.netns import PRIVATE, Host, Link, Network, NetworkError

__all__ = ["SETTINGS", "Cluster", "ClusterError"]

_ROOT = Path(__file__).resolve().parents[2]
_PORT = 6379
# Without what takes time to start and tests have no use for: autoscaling.
_HEAD = ["--head", f"--port={_PORT}", "--include-dashboard=false", "--no-monitor"]
_START_S = 90.0
_START_TRIES = 3
_LOG_TAIL = 3000
_ENVIRONMENT = {
    "RAY_TMPDIR": PRIVATE,
    "TMPDIR": PRIVATE,  # hosts have process numbers of their own, so they must not share files that are named by them
    # The network is sealed. Otherwise a head takes the token that an earlier Ray left in the home directory, and nobody else would.
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",  # of other programs' memory, too
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",  # 30 s are short on a busy machine
    "OMP_NUM_THREADS": "1",
}
SETTINGS = (*_ENVIRONMENT, "RAY_ADDRESS", "PYTHONPATH")
"""What a program needs in its environment to be a driver."""


class ClusterError(RuntimeError):
    """A node did not start; says what it said."""


class Cluster:
    """Ray's head on node 0 and raylets on all nodes. A context manager: leaving it ends everything.

    Public methods may be called by several threads as long as they are about different nodes.
    """

    def __init__(
        self,
        nodes: int = 2,
        *,
        cpus: int = 2,
        object_store_bytes: int = 128 << 20,
        shm_bytes: int | None = None,
        env: Mapping[str, str] | None = None,
        link: Link | None = None,
    ) -> None:
        """
        Args:
            nodes: How many.
            cpus: What each tells Ray that it has. Node n has, besides, one of the resource "node{n}".
            object_store_bytes: Of each node's Ray object store.
            shm_bytes: Size of each /dev/shm; by default what the object store needs.
            env: Of raylets, workers and drivers, besides this program's environment without its RAY_* and MOONCAKE_RAY*.
            link: How all nodes are connected, once they are up.

        Raises:
            NetworkError: there cannot be namespaces here.
            ClusterError: a node did not start.
        """
        if nodes < 1:
            raise ValueError(f"nodes must be at least 1, got {nodes}")
        self._cpus, self._object_store_bytes = cpus, object_store_bytes
        self.environment = _clean(os.environ) | _ENVIRONMENT | dict(env or {})
        self.environment["RAY_ADDRESS"] = self.address = f"198.18.0.1:{_PORT}"
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), self.environment.get("PYTHONPATH", "")]))
        self.network = Network(shm_bytes or object_store_bytes + (64 << 20))
        try:
            with ThreadPoolExecutor(nodes) as pool:
                starting = [pool.submit(self.start_node, 0)]
                while not starting[0].done() and not self._head_listens():
                    time.sleep(0.05)
                if starting[0].done():
                    starting[0].result()
                starting += [pool.submit(self.start_node, number) for number in range(1, nodes)]
                for start in starting:
                    start.result()
            if link:
                for host in self.hosts.values():
                    host.shape(link)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def hosts(self) -> dict[int, Host]:
        """By the number of the node; killed ones are among them."""
        return self.network.hosts

    def start_node(self, number: int, link: Link | None = None) -> Host:
        """Starts a node on a new host, also one in place of a node that was killed.

        Raises:
            ClusterError: the raylet did not start, several times; the host is ended.
        """
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", "--include-log-monitor=false"]
        command += [f"--num-cpus={self._cpus}", f"--object-store-memory={self._object_store_bytes}"]
        command += [f"--resources={json.dumps({f'node{number}': 1})}"]
        for left in reversed(range(_START_TRIES)):
            host = self.network.add(number, link)
            where = _HEAD if number == 0 else [f"--address={self.address}"]
            # The address would have the head join itself.
            env = {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}
            try:
                host.run([*command, f"--node-ip-address={host.address}", *where], env, _START_S)
                return host
            except (NetworkError, subprocess.TimeoutExpired) as e:
                logs = self.logs(number)
                host.kill()
                if not left:
                    raise ClusterError(f"node {number} did not start: {e}\n{logs}") from e
        raise AssertionError

    def _head_listens(self) -> bool:
        """Whether other nodes may join: while the head is still starting its other processes."""
        if 0 not in self.hosts:
            return False
        with contextlib.suppress(OSError):
            return f":{_PORT:04X} " in self.hosts[0].file("/proc/1/net/tcp").read_text()
        return False

    def popen(self, node: int, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on a node, where `ray.init()` joins the cluster; the other arguments are those of `subprocess.Popen`."""
        return self.hosts[node].popen(command, self.environment | dict(env or {}), **options)

    def run(
        self, node: int, command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 120.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a node to its end.

        Raises:
            NetworkError: it failed, and `check` is set; says what it said.
            subprocess.TimeoutExpired: it took longer; it is killed.
        """
        return self.hosts[node].run(command, self.environment | dict(env or {}), timeout_s, check)

    def program(self, node: int, text: str, *arguments: object, **options: Any) -> str:
        """Runs a Python program on a node (see `run`), and returns what it printed."""
        return self.run(node, [sys.executable, "-c", text, *map(str, arguments)], **options).stdout

    def kill_node(self, number: int) -> None:
        """Ends a node with all that runs on it, at once. With node 0 goes the cluster."""
        self.hosts[number].kill()

    def pause_node(self, number: int) -> None:
        """Stops all processes of a node."""
        self.hosts[number].signal(signal.SIGSTOP)

    def resume_node(self, number: int) -> None:
        self.hosts[number].signal(signal.SIGCONT)

    def logs(self, number: int) -> str:
        """The ends of the logs of a node that say anything about errors."""
        found = []
        with contextlib.suppress(OSError):
            for path in sorted(self.hosts[number].file(PRIVATE).glob("ray/session_2*/logs/*")):
                if path.is_file() and path.suffix in (".err", ".log", ".out"):
                    text = path.read_text(errors="replace")
                    if " E " in text or "Error" in text or " C " in text:
                        found.append(f"--- {path.name}\n{text[-_LOG_TAIL:]}")
        return "\n".join(found)

    def close(self) -> None:
        self.network.close()


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what this program's own Ray and pool have set."""
    return {name: value for name, value in environment.items() if not name.startswith(("RAY_", "MOONCAKE_RAY"))}
