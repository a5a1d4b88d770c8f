"""Every node's engine as a Ray actor, and where they are: a directory in Ray's key-value store.

The first process that needs a pool of another node, and every process that joins the pool of a node in a cluster of several, sees to it that
each node has its service. A service belongs to one job, and ends with it, or later, with the last process that uses its node's pool. The
secret with which engines know each other is made by the first and lies in Ray's store as well: who may use the Ray cluster may use the pools.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from dataclasses import asdict
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mooncake_ray.config import Config
from mooncake_ray.errors import BrokerDiedError, GetTimeoutError, MooncakeRayError
from mooncake_ray.machine import address_in
from mooncake_ray.store import node
from mooncake_ray.transfer.directory import Endpoint

__all__ = ["NodeService", "RayDirectory", "ensure", "hosts", "node_of", "remove", "reports", "services", "start_with", "why_none"]

logger = logging.getLogger("mooncake_ray")

_NAMESPACE = "mooncake_ray"
_SPACE = _NAMESPACE.encode()
_SERVICE = "node-service"
_FAILED = b"failed:"
_SECRET = b"secret"
_ENGINE = b"engine:"
_LOST = b"lost:"
_SECRET_BYTES = 32
_KNOWN_FOR_S = 1.0
_JOB_CHECK_S = 1.0


def _secret() -> bytes:
    internal_kv._internal_kv_put(_SECRET, secrets.token_bytes(_SECRET_BYTES), overwrite=False, namespace=_SPACE)
    return internal_kv._internal_kv_get(_SECRET, namespace=_SPACE)


def _alive() -> list[dict[str, Any]]:
    return [n for n in ray.nodes() if n["Alive"]]


def hosts() -> set[str]:
    """Addresses of the cluster's nodes. Those that share one share a pool."""
    return {n["NodeManagerAddress"] for n in _alive()}


_homes: dict[bytes, str] = {}
_unserved: dict[bytes, float] = {}  # until when nobody is asked again


def node_of(pool_id: bytes) -> str | None:
    """ID of the node that has that pool, dead or alive; None where no service serves it. Thread-safe."""
    if pool_id not in _homes and _unserved.get(pool_id, 0.0) <= time.monotonic():
        _unserved[pool_id] = time.monotonic() + _KNOWN_FOR_S
        for key in internal_kv._internal_kv_list(_ENGINE + pool_id.hex().encode(), namespace=_SPACE):
            _homes[pool_id] = _parsed(key)[1][0]  # for good: a pool never moves
    return _homes.get(pool_id)


class RayDirectory:
    """The pools of a Ray cluster. Thread-safe; what was asked a second ago is not asked again."""

    def __init__(self, own: Endpoint | None = None) -> None:
        self.own = own
        self._lock = threading.Lock()
        self._asked = float("-inf")
        self._served: dict[bytes, tuple[str, Endpoint]] = {}  # node and endpoint, by pool; of dead nodes too
        self._lost: set[bytes] = set()  # pools that ended before their nodes did
        self._alive: set[str] = set()

    def resolve(self, pool_id: bytes) -> Endpoint | None:
        if pool_id not in self._served:
            self._ask()
        node_id, endpoint = self._served.get(pool_id, ("", None))
        return endpoint if node_id in self._alive else None

    def forget(self, pool_id: bytes) -> None:
        self._ask()

    def is_lost(self, pool_id: bytes) -> bool:
        self._ask()
        return pool_id in self._lost or (pool_id in self._served and self._served[pool_id][0] not in self._alive)

    def serves(self, endpoint: Endpoint) -> bool:
        return endpoint in self.others()

    def others(self) -> list[Endpoint]:
        self._ask()
        there = (endpoint for node_id, endpoint in self._served.values() if node_id in self._alive and endpoint != self.own)
        return list(dict.fromkeys(there))

    def _ask(self) -> None:
        """Unless somebody did a moment ago."""
        with self._lock:
            if time.monotonic() - self._asked < _KNOWN_FOR_S:
                return
            try:
                served = dict(map(_parsed, internal_kv._internal_kv_list(_ENGINE, namespace=_SPACE)))
                lost = {bytes.fromhex(key.removeprefix(_LOST).decode()) for key in internal_kv._internal_kv_list(_LOST, namespace=_SPACE)}
                alive = {n["NodeID"] for n in _alive()}
            except Exception as e:  # Ray's own client raises several kinds while the head node is away
                logger.debug("mooncake_ray: the nodes cannot be asked for: %s", e)
                return
            self._served, self._lost, self._alive, self._asked = served, lost, alive, time.monotonic()


def _key_of(pool_id: bytes, node_id: str, endpoint: Endpoint) -> bytes:
    """An entry of the directory: all of it is in the key, so that one request lists them."""
    return _ENGINE + f"{pool_id.hex()}/{node_id}/{endpoint}".encode()


def _parsed(key: bytes) -> tuple[bytes, tuple[str, Endpoint]]:
    pool_id, node_id, endpoint = key.removeprefix(_ENGINE).decode().split("/")
    return bytes.fromhex(pool_id), (node_id, Endpoint.parse(endpoint))


class NodeService:
    """The actor: keeps an engine on its node for as long as the job lasts, or anything that uses the pool: what is detached from the job (Ray
    Serve's replicas, say) keeps it. A broker that dies gets a new engine with the next."""

    def __init__(self, scope: str, settings: dict[str, Any], job: str) -> None:
        from mooncake_ray.transfer.engine import Engine

        self._engine_class = Engine
        self._config, self._job = Config(**settings), job
        self._name = node.broker_name(scope)
        worker = ray_worker.global_worker
        self._node = worker.node
        self._node_id = ray.get_runtime_context().get_node_id()
        self._engine: Any = None
        failed = _FAILED + self._node_id.encode()
        try:
            wanted = self._config.host
            self._host = (address_in(wanted) if "/" in wanted else wanted) or worker.node_ip_address
            self._start()
        except Exception as e:
            internal_kv._internal_kv_put(failed, f"{type(e).__name__}: {e}".encode(), overwrite=True, namespace=_SPACE)
            raise
        internal_kv._internal_kv_del(failed, namespace=_SPACE)
        self._export()
        threading.Thread(target=self._watch, name="mooncake_ray.service", daemon=True).start()

    def _start(self) -> None:
        from mooncake_ray.objects.session import raylet_pid

        log = os.path.join(self._node.get_logs_dir_path(), "mooncake_ray_broker.err")
        before = self._engine.client if self._engine is not None else None
        client = node.connect(self._name, self._config, watch_pid=raylet_pid(self._node), log=log, before=before)
        directory = RayDirectory()
        engine = self._engine_class(client, self._name, directory, _secret(), self._host, self._config)
        directory.own = engine.endpoint
        self._engine = engine
        stale = [key for key in internal_kv._internal_kv_list(_ENGINE, namespace=_SPACE) if _parsed(key)[1][0] == self._node_id]
        self._key = _key_of(client.pool_id, self._node_id, engine.endpoint)
        internal_kv._internal_kv_put(self._key, b"", overwrite=True, namespace=_SPACE)
        for key in stale:  # of engines that this one is in the place of: others learn by this that they are no more
            if (pool_id := _parsed(key)[0]) != client.pool_id:
                internal_kv._internal_kv_put(_LOST + pool_id.hex().encode(), b"", overwrite=True, namespace=_SPACE)
            if key != self._key:
                internal_kv._internal_kv_del(key, namespace=_SPACE)
        logger.info("mooncake_ray: serving pool %s at %s", client.pool_id.hex()[:8], engine.endpoint)

    def _export(self) -> None:
        """Metrics of this process are the service's: its session exports them."""
        from mooncake_ray.objects import session

        session.configure(self._config)
        here = session.current()
        if here is not None and here.exporter is not None:
            here.exporter.service = lambda: self._engine.report()

    def _watch(self) -> None:
        while not self._job_is_over() or self._is_used():
            if not self._engine.over.wait(_JOB_CHECK_S):
                continue
            self._engine.close()
            try:
                self._start()
            except (MooncakeRayError, OSError) as e:
                logger.warning("mooncake_ray: no engine on this node: %s", e)
                break
        self._engine.close()
        internal_kv._internal_kv_del(self._key, namespace=_SPACE)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _job_is_over(self) -> bool:
        try:
            jobs = ray_worker.global_worker.gcs_client.get_all_job_info(job_or_submission_id=self._job)
        except Exception as e:  # Ray's own client raises several kinds while the head node is away
            logger.debug("mooncake_ray: the job cannot be asked for: %s", e)
            return False
        return all(info.is_dead for info in jobs.values())

    def _is_used(self) -> bool:
        """Whether other processes use this node's pool: actors that outlive the job, or those of another one."""
        try:
            sessions = json.loads(self._engine.client.stats())["sessions"]
        except BrokerDiedError:
            return True  # and there is another one soon
        return any(row["pid"] != os.getpid() for row in sessions)

    def remove(self, ids: list[bytes]) -> None:
        """Frees objects of this node's pool."""
        self._engine.client.remove(ids)

    def report(self) -> dict[str, Any]:
        """What the engine says of itself, the node's ID, and what the broker says of the pool (None: there is no broker at the moment)."""
        try:
            pool = json.loads(self._engine.client.stats())
        except BrokerDiedError:
            pool = None
        return {"node": self._node_id, "pool": pool, **self._engine.report()}


_ensuring = threading.Lock()


def start_with(scope: str, config: Config) -> None:
    """Called where a process joins a pool: has the services started, in the background, if the cluster has several nodes."""

    def start() -> None:
        try:
            if len(hosts()) > 1:
                ensure(scope, config)
        except Exception as e:  # whatever Ray raises where the process leaves it this moment; who needs a service says so
            logger.debug("mooncake_ray: no services were started: %s", e)

    threading.Thread(target=start, name="mooncake_ray.nodes", daemon=True).start()


def ensure(scope: str, config: Config, everywhere: bool = True) -> None:
    """Has a service on every node (or on this one) started for this job. Does not wait until they serve; idempotent."""
    job = ray.get_runtime_context().get_job_id()
    here = ray.get_runtime_context().get_node_id()
    settings = asdict(config)
    taken: set[str] = set()
    with _ensuring:
        for n in _alive():
            if n["NodeManagerAddress"] in taken or not (everywhere or n["NodeID"] == here):
                continue
            taken.add(n["NodeManagerAddress"])
            with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it goes this moment
                ray.remote(NodeService).options(
                    name=_name(job, n["NodeID"]),
                    namespace=_NAMESPACE,
                    get_if_exists=True,
                    lifetime="detached",
                    num_cpus=0,
                    max_restarts=-1,
                    max_concurrency=4,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(n["NodeID"], soft=False),
                ).remote(scope, settings, job)


def why_none() -> str:
    """Why there is no service on this node, if one could not start; else ""."""
    why = internal_kv._internal_kv_get(_FAILED + ray.get_runtime_context().get_node_id().encode(), namespace=_SPACE)
    return why.decode() if why else ""


def reports(timeout_s: float = 10.0) -> list[dict[str, Any]]:
    """What the services of this job say of themselves, those that answer in time."""
    job = ray.get_runtime_context().get_job_id()
    asked = []
    for n in _alive():
        with contextlib.suppress(ValueError):  # none there
            asked.append(ray.get_actor(_name(job, n["NodeID"]), _NAMESPACE).report.remote())
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    out = []
    for ref in answered:
        with contextlib.suppress(ray.exceptions.RayError):
            out.append(ray.get(ref))
    return out


def remove(pool_id: bytes, ids: list[bytes], timeout_s: float) -> None:
    """Frees objects of another node's pool. Does nothing where the pool is gone.

    Raises:
        GetTimeoutError: no service of that node said in time that it has done so.
    """
    if (node_id := node_of(pool_id)) is None:
        return
    last = "none is running"
    for actor in _named_services():
        if actor.endswith(f":{node_id}"):  # of this job or another: they serve the same pool
            try:
                return ray.get(ray.get_actor(actor, _NAMESPACE).remove.remote(ids), timeout=timeout_s)
            except (ValueError, ray.exceptions.RayError) as e:
                last = str(e)
    if RayDirectory().is_lost(pool_id):
        return
    raise GetTimeoutError(f"{len(ids)} objects of node {node_id[:8]} could not be freed, as no service there answered: {last}")


def _named_services() -> list[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [a["name"] for a in actors if a["namespace"] == _NAMESPACE and a["name"].startswith(f"{_SERVICE}:")]


def services(timeout_s: float) -> list[dict[str, Any]]:
    """The services of all jobs. For each: `job`, `node` (its ID), `host`, and `report`, or an `error`, if it did not answer in time."""
    addresses = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
    asked: dict[ray.ObjectRef, dict[str, Any]] = {}
    for actor in _named_services():
        _, job, node_id = actor.split(":")
        with contextlib.suppress(ValueError):  # it ended this moment
            asked[ray.get_actor(actor, _NAMESPACE).report.remote()] = {"job": job, "node": node_id, "host": addresses.get(node_id, "?")}
    answered, late = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    for ref in answered:
        try:
            asked[ref]["report"] = ray.get(ref)
        except ray.exceptions.RayError as e:
            asked[ref]["error"] = f"does not answer: {str(e).splitlines()[0]}"
    for ref in late:
        asked[ref]["error"] = f"did not answer within {timeout_s:g} s"
    return list(asked.values())


def _name(job: str, node_id: str) -> str:
    return f"{_SERVICE}:{job}:{node_id}"
