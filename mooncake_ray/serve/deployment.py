"""`Endpoint`: the deployment, and `run`, which starts it."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray import serve

from mooncake_ray.serve.app import build_app
from mooncake_ray.serve.desk import Desk
from mooncake_ray.serve.settings import Settings

__all__ = ["Endpoint", "run"]

_ONGOING = 1000  # requests that wait for a version count


@serve.ingress()
class Endpoint:
    """One replica. Its methods are for callers in the cluster, through a `DeploymentHandle`."""

    def __init__(self, settings: Settings) -> None:
        replica = serve.get_replica_context().replica_id
        self._desk = Desk(settings, host=ray.util.get_node_ip_address(), name=str(replica.unique_id))

    def __serve_build_asgi_app__(self) -> Any:
        return build_app(self._desk)

    def check_health(self) -> None:
        """Serve starts the replica anew if this raises."""
        self._desk.port.check()

    def versions(self) -> list[int]:
        """The versions that are there, rising."""
        return list(self._desk.store.versions())


def run(
    store: str | os.PathLike[str],
    *,
    name: str = "weights",
    route_prefix: str = "/",
    replicas: int = 1,
    num_cpus: float = 0,
    **settings: Any,
) -> Any:
    """Starts the endpoint on the cluster that Ray is connected to, and returns its handle when it is ready.

    Args:
        store: Directory of a `SnapshotStore` or of a `DeltaLog`. All nodes with replicas see it.
        name: Of the Serve application, which `serve.delete` ends.
        replicas: Each has a data port of its own.
        settings: As `Settings` says.
    """
    made = Settings(os.fspath(os.path.abspath(store)), **settings)
    deployment = serve.deployment(Endpoint).options(
        name="Endpoint", num_replicas=replicas, max_ongoing_requests=_ONGOING, ray_actor_options={"num_cpus": num_cpus}
    )
    return serve.run(deployment.bind(made), name=name, route_prefix=route_prefix)
