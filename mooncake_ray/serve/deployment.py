"""`Endpoint`: the deployment, and `run`, which starts it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import ray
from ray import serve

from mooncake_ray.serve.app import build_app
from mooncake_ray.serve.desk import Desk
from mooncake_ray.serve.keeper import Keeper
from mooncake_ray.serve.refs import Refs
from mooncake_ray.serve.settings import Settings

__all__ = ["Endpoint", "Keeping", "run"]

_ONGOING = 1000  # requests that wait for a version count
_HEALTH_S = 5.0
_LOOK_S, _END_S = 0.2, 10.0  # how often a replica that ends looks for requests under way, and how long it waits for them


@serve.ingress()
class Endpoint:
    """One replica. Its methods are for callers in the cluster, through a `DeploymentHandle`."""

    def __init__(self, settings: Settings, keeper: Any = None) -> None:
        replica = serve.get_replica_context().replica_id
        self._desk = Desk(settings, host=ray.util.get_node_ip_address(), name=str(replica.unique_id), keeper=keeper)
        self._refs = Refs(settings.max_ref_bytes)

    def __serve_build_asgi_app__(self) -> Any:
        return build_app(self._desk)

    def __del__(self) -> None:
        if hasattr(self, "_desk"):  # else it has not begun
            self._desk.close()

    def check_health(self) -> None:
        """Serve starts the replica anew if this raises."""
        self._desk.port.check()

    def versions(self) -> list[int]:
        """Versions that are there whole, rising."""
        return list(self._desk.store.versions())

    def manifest(self, version: int | str = "latest") -> dict[str, Any]:
        """A version's tensors: name to dtype, shape, and content digest. Raises SnapshotNotFoundError."""
        with self._desk.volume(version) as volume:
            return {name: {"dtype": p.meta.dtype, "shape": p.meta.shape, "digest": p.digest} for name, p in volume.tensors.items()}

    def tensor_refs(self, version: int | str = "latest", names: Iterable[str] | None = None) -> dict[str, Any]:
        """An `ObjectRef` for each tensor (by default all): whoever gets one reads it from the pool, on other nodes by what moves bytes between
        pools, and not through this replica. Tensors that were asked for lately are not read again.

        Raises:
            SnapshotNotFoundError: the version, or a tensor, is not there.
        """
        with self._desk.volume(version) as volume:
            return dict(self._refs.of(volume, list(volume.tensors) if names is None else names))


class Keeping:
    """The one replica that is a group's engine."""

    def __init__(self, settings: Settings) -> None:
        self._keeper = Keeper(settings)

    def store(self, version: int | None) -> int:
        """As `Keeper.store`."""
        return self._keeper.store(version)

    def __del__(self) -> None:
        if hasattr(self, "_keeper"):  # else it has not begun
            self._keeper.close()


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

    Raises:
        ConfigError: settings make no sense.
    """
    made = Settings(os.path.abspath(store), **settings)
    options = {
        "max_ongoing_requests": _ONGOING,
        "ray_actor_options": {"num_cpus": num_cpus},
        "health_check_period_s": _HEALTH_S,
        "graceful_shutdown_wait_loop_s": _LOOK_S,
        "graceful_shutdown_timeout_s": _END_S,
    }
    keeper = (serve.deployment(Keeping).options(name="Keeper", **options).bind(made),) if made.group is not None else ()
    endpoint = serve.deployment(Endpoint).options(name="Endpoint", num_replicas=replicas, **options)
    return serve.run(endpoint.bind(made, *keeper), name=name, route_prefix=route_prefix)
