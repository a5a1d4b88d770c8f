"""The other end of a measurement: an actor on another node of the Ray cluster that this node belongs to, which is read from."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_ray.cli.network_facts import device_of
from mooncake_ray.config import Config
from mooncake_ray.errors import ConfigError, TransportUnavailableError

__all__ = ["FarEnd", "far_end", "other_node"]

_START_S = 120.0  # a worker process, on a busy node


@dataclass(frozen=True)
class FarEnd:
    """What listens there, and for whom."""

    node: str
    """Ray's id of the node."""
    host: str
    port: int
    secret: bytes
    nics: list[str]
    """The network devices that have that address."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class _Listener:
    """The actor. Serves until its process ends."""

    def listen(self, host: str, secret: bytes, names: Sequence[str], nbytes: int) -> tuple[int, list[str]]:
        from mooncake_ray.transport.measure import Server

        nics = [nic] if (nic := device_of(host)) else []
        server = Server(Config.from_env(), host, 0, secret, names, nbytes, nics)
        threading.Thread(target=server.serve, name="mooncake_ray.serve", daemon=True).start()
        return server.port, nics


def other_node(nodes: Sequence[Mapping[str, Any]], wanted: str, here: str) -> Mapping[str, Any]:
    """One of `ray.nodes()` that is not this one.

    Args:
        wanted: Its address, or the beginning of its id. "": the only one.
        here: This node's id.

    Raises:
        ConfigError: none is meant, or several are; lists those that there are.
    """
    others = [n for n in nodes if n["Alive"] and n["NodeID"] != here]
    meant = [n for n in others if not wanted or n["NodeManagerAddress"] == wanted or n["NodeID"].startswith(wanted)]
    if len(meant) == 1:
        return meant[0]
    there = ", ".join(f"{n['NodeManagerAddress']} ({n['NodeID'][:8]})" for n in others) or "no other"
    which = f"{len(meant)} nodes are meant by {wanted!r}" if wanted else "say which node"
    raise ConfigError(f"{which}; besides this one the Ray cluster has {there}")


@contextlib.contextmanager
def far_end(wanted: str, names: Sequence[str], nbytes: int) -> Iterator[FarEnd]:
    """Joins this node's Ray cluster, and has the node that `wanted` names serve `nbytes` bytes, until the end of the `with`.

    Raises:
        ConfigError: see `other_node`.
        ConnectionError: there is no cluster.
        TransportUnavailableError: that node does not serve.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    try:
        node = other_node(ray.nodes(), wanted, ray.get_runtime_context().get_node_id())
        host, id, secret = node["NodeManagerAddress"], node["NodeID"], secrets.token_bytes(32)
        pinned = NodeAffinitySchedulingStrategy(id, soft=False)
        listener = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=pinned)(_Listener).remote()
        try:
            port, nics = ray.get(listener.listen.remote(host, secret, list(names), nbytes), timeout=_START_S)
        except ray.exceptions.RayError as e:  # a node that dies, an error there, the deadline
            raise TransportUnavailableError(f"node {host} ({id[:8]}) does not serve: {e}", "listen", peer=host) from e
        yield FarEnd(id, host, port, secret, nics)
        ray.kill(listener)
    finally:
        ray.shutdown()
