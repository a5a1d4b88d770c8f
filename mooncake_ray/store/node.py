"""Finds this node's broker, or starts it.

A broker serves one name in the abstract socket namespace, so two processes that start one at the same time end up with one: the second
cannot bind, and connects. The name carries the user, so users do not meet.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from mooncake_ray._native import pool
from mooncake_ray.config import Config
from mooncake_ray.errors import BrokerDiedError
from mooncake_ray.machine import machine_bytes, numa_nodes

__all__ = ["broker_name", "connect", "spill_directory"]

_ADDRESS_IN_USE = 17  # exit status of mooncake-broker: another one serves the name
_RETRY_S = 0.01
_UNLIMITED = 1 << 60  # bytes
_NAME_BYTES = 100  # sun_path has 108


def broker_name(scope: str) -> str:
    """The socket name of the pool that processes with the same `scope` share on this node."""
    name = f"mooncake_ray/{os.geteuid()}/{scope}"
    if len(name.encode()) > _NAME_BYTES:
        raise ValueError(f"scope too long: {len(name.encode())} bytes of {_NAME_BYTES}: {scope!r}")
    return name


def spill_directory(name: str, config: Config) -> str:
    """Where the broker of that name spills to; "" for nowhere. Only exists once something was spilled."""
    root = config.spill_root
    return str(root / hashlib.sha256(name.encode()).hexdigest()[:16]) if root else ""


def process_label() -> str:
    """What StoreFullError and `stats` call this process."""
    return Path(sys.argv[0] or "python").name[:64]


def connect(
    name: str, config: Config, *, watch_pid: int = 0, log: str | None = None, group: str = "", before: pool.Client | None = None
) -> pool.Client:
    """Opens a session with the broker that serves `name`, starting one if there is none.

    Args:
        name: From `broker_name`.
        watch_pid: The broker exits when this process does. 0: only when nobody has used it for `config.linger_s`.
        log: File for the broker's complaints; None drops them.
        group: Whose quota counts for what this process puts.
        before: This process's client of the broker that died.

    Raises:
        BrokerDiedError: no broker answered within `config.start_timeout_s`.
        BrokerMismatchError: what answers is of another version of this package, or another user's process.
    """
    deadline = time.monotonic() + config.start_timeout_s
    while True:
        try:
            return pool.Client.connect(name, process_label(), group, before)
        except BrokerDiedError as e:
            if time.monotonic() > deadline:
                raise BrokerDiedError(f"no broker for {name!r} within {config.start_timeout_s} s: {e}") from e
        if not _start(name, config, watch_pid, log):
            time.sleep(_RETRY_S)  # another broker has the name and does not answer: it is starting, or ending


def _start(name: str, config: Config, watch_pid: int, log: str | None) -> bool:
    """Runs mooncake-broker, which returns once it serves the name. False if another one does."""
    program = Path(pool.__file__).with_name("mooncake-broker")
    command = [
        str(program),
        *("--name", name),
        *("--capacity", str(config.pool_bytes)),
        *("--most", str(machine_bytes())),
        *("--prefault", str(config.prefault_bytes)),
        *("--watch-pid", str(watch_pid)),
        *("--linger", str(config.linger_s)),
        *("--arena", str(config.arena_bytes or config.pool_bytes)),
        *("--huge-pages", config.huge_pages),
        *("--quota", str(config.quota_bytes)),
    ]
    nodes = numa_nodes() if config.numa == "auto" else []
    if len(nodes) > 1:
        command += ["--numa-nodes", ",".join(map(str, nodes))]
    if spill := spill_directory(name, config):
        command += ["--spill-dir", spill, "--spill-limit", str(config.spill_bytes or _UNLIMITED)]
        command += ["--spill-high", str(config.spill_high), "--spill-low", str(config.spill_low)]
    with open(log or os.devnull, "ab") as sink:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=sink, check=False, timeout=config.start_timeout_s
            )
        except subprocess.TimeoutExpired:
            raise BrokerDiedError(f"{program} did not serve {name!r} within {config.start_timeout_s} s") from None
    if done.returncode not in (0, _ADDRESS_IN_USE):
        why = done.stdout.decode(errors="replace").strip() or f"it exited with status {done.returncode}{f'; see {log}' if log else ''}"
        raise BrokerDiedError(f"no broker could be started for {name!r}: {why}")
    return done.returncode == 0
