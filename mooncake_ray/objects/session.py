"""This process's connection to the pool of the Ray node it runs on. One a process and Ray session."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import struct
import threading
from typing import Any

from ray._private import worker as ray_worker

from mooncake_ray._native import pool
from mooncake_ray.config import Config
from mooncake_ray.counters import count, timed
from mooncake_ray.errors import ConfigError, ObjectLostError, StoreError
from mooncake_ray.objects import metrics, nodes
from mooncake_ray.objects.elsewhere import Elsewhere
from mooncake_ray.objects.lifetime import Lifetimes
from mooncake_ray.store import devices, node
from mooncake_ray.store.packing import Region
from mooncake_ray.transfer.door import Door, door_name

__all__ = ["Session", "config", "configure", "current", "load", "open_region"]

logger = logging.getLogger("mooncake_ray")


class Session:
    """The pool client and the claims of this process. They outlive a broker: what it had spilled is this session's again at the next."""

    def __init__(self, client: pool.Client, worker: Any, config: Config, key: tuple[int, str]) -> None:
        self.client, self.worker, self.config, self.key = client, worker, config, key
        self.lifetimes = Lifetimes(client, worker, current)
        self.door = Door(door_name(node.broker_name(key[1])))
        self._several = False
        self.exporter = metrics.start(self, config.metrics_interval_s)

    @property
    def over(self) -> bool:
        """Whether this process has left the Ray session."""
        return _key(self.worker) != self.key

    def several_nodes(self) -> bool:
        """Whether the cluster has, or had, nodes with pools of their own."""
        self._several = self._several or len(nodes.hosts()) > 1
        return self._several

    def renew(self, client: pool.Client) -> None:
        devices.forget(self.client)
        self.client = client
        self.lifetimes.renew(client)


_lock = threading.RLock()
_session: Session | None = None
_config: Config | None = None
_refused: tuple[int, str] | None = None  # the Ray session whose broker could not be had: not tried again, but warned of once


def configure(config: Config) -> None:
    """Sets what the next session of this process starts its broker with."""
    global _config
    _config = config


def config() -> Config:
    return _config or Config.from_env()


def current() -> Session | None:
    """The session with this node's pool, opened if need be; None where there is no Ray, or no broker to be had (said once)."""
    session, worker = _session, ray_worker.global_worker
    if session is not None and session.client.usable and session.key == _key(worker):
        return session
    if not worker.connected or worker.node is None:
        return None
    return _open(worker)


def _key(worker: Any) -> tuple[int, str] | None:
    return (os.getpid(), worker.node.session_name) if worker.connected and worker.node is not None else None


def _open(worker: Any) -> Session | None:
    global _session, _refused
    key = _key(worker)
    if key is None or key == _refused:
        return None
    with _lock:
        if _session is not None and _session.client.usable and _session.key == key:
            return _session
        settings = config()
        before = _session if _session is not None and _session.key == key else None
        raylet = raylet_pid(worker.node)
        if before is not None and not raylet:
            return None  # the broker went because Ray goes
        job = worker.core_worker.get_current_job_id()
        try:
            client = node.connect(
                node.broker_name(key[1]),
                settings,
                watch_pid=raylet,
                log=os.path.join(worker.node.get_logs_dir_path(), "mooncake_ray_broker.err"),
                group="" if job.is_nil() else f"job {job.hex()}",
                before=before.client if before else None,
            )
        except (StoreError, ConfigError, OSError) as e:
            _refused = key
            logger.warning("mooncake_ray: no pool on this node, Ray's own object store is used: %s", e)
            return None
        if before is not None:
            before.renew(client)
            return before
        if _session is not None:
            devices.forget(_session.client)
        _session = Session(client, worker, settings, key)
        nodes.start_with(key[1], settings)
        return _session


def raylet_pid(ray_node: Any) -> int:
    """The raylet of this node, with which its pool ends. 0 if it cannot be told."""
    return _pid_behind(ray_node.raylet_socket_name)


def _pid_behind(path: str) -> int:
    """The process that serves a unix socket."""
    with socket.socket(socket.AF_UNIX) as s:
        try:
            s.connect(path)
            return struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        except OSError:
            return 0


class _Timed(Region):
    __slots__ = ()

    def _pin(self, writable: bool) -> pool.Pin:
        with timed("get"):
            return super()._pin(writable)


def open_region(pool_id: bytes, id: bytes) -> Region:
    """What a descriptor unpickles to. Does not block: the object is pinned where the first view of it is made.

    Raises:
        ObjectLostError: the object is in a pool that this process cannot reach.
    """
    session = current()
    if session is None:
        raise ObjectLostError(f"object {id.hex()} lies in a pool, and this process has no connection to one")
    region: Region
    if session.client.pool_id == pool_id:
        region = _Timed(session.client, id)
    elif session.several_nodes():
        region = Elsewhere(session, pool_id, id)
    else:
        raise ObjectLostError(f"object {id.hex()} lies in pool {pool_id.hex()[:8]}, this node's pool is {session.client.pool_id.hex()[:8]}")
    count("opened")
    return region


def load(data: bytes, buffers: list[Any]) -> Any:
    """Unpickles a value some of whose tensors were put from devices: they are copied side by side, and waited for once."""
    with devices.loading(default=config().cuda_get):
        return pickle.loads(data, buffers=buffers)
