"""How full the pool of each node is: other nodes' as their services say, this node's as its broker does where no service is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import worker as ray_worker

from mooncake_ray.cli import pools
from mooncake_ray.objects import nodes
from mooncake_ray.snapshot import Snapshot

__all__ = ["NodePool", "node_pools", "of_nodes"]

_COMMAND = "mooncake-ray serve"


@dataclass(frozen=True)
class NodePool:
    """A node, by one of those that share its address and so its pool."""

    host: str
    node: str
    pool: Snapshot | None
    """None: there is none, or it cannot be asked."""
    error: str = ""


def node_pools(timeout_s: float) -> Sequence[NodePool]:
    """Of all nodes of the cluster that this process is in; none outside of one. Starts no pool."""
    if not ray.is_initialized():
        return []
    alive = [(n["NodeManagerAddress"], n["NodeID"]) for n in ray.nodes() if n["Alive"]]
    return of_nodes(alive, nodes.services(timeout_s), ray.util.get_node_ip_address(), _here())


def _here() -> Snapshot | None:
    """This node's pool, if there is one."""
    for pool in pools.listed(ray_worker.global_worker.node.session_name):
        return pools.fill(pool, _COMMAND)
    return None


def of_nodes(
    alive: Iterable[tuple[str, str]], services: Iterable[Mapping[str, Any]], own_host: str, own: Snapshot | None
) -> Sequence[NodePool]:
    """
    Args:
        alive: Address and ID of each node.
        services: As `objects.nodes.services` tells.
        own_host, own: This node, and what its broker says.
    """
    found = {host: NodePool(host, node, None, "no pool is known here") for host, node in alive}
    for service in services:
        if (there := found.get(service["host"])) is None or there.pool is not None:
            continue
        stats = service.get("report", {}).get("pool")
        error = "" if stats else service.get("error") or "its pool does not answer"
        found[there.host] = NodePool(there.host, service["node"], Snapshot.of(stats) if stats else None, error)
    if own is not None and own_host in found:
        found[own_host] = NodePool(own_host, found[own_host].node, own)
    return list(found.values())
