"""The actors of a new buffer, empty or from a snapshot."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mooncake_ray.errors import ConfigError
from mooncake_ray.rollout.buffer_actor import BufferActor
from mooncake_ray.rollout.saving import fill
from mooncake_ray.rollout.settings import BufferSettings
from mooncake_ray.rollout.snapshots import BufferSnapshots
from mooncake_ray.rollout.vault import Vault

__all__ = ["start"]

Actor = ray.actor.ActorHandle


def start(
    name: str, namespace: str | None, detached: bool, settings: BufferSettings, folder: str | os.PathLike[str] | None, version: int | None
) -> tuple[Actor, Actor]:
    """On this node. Returns the one that decides, and its vault. Nothing is left of a buffer that cannot be started.

    Raises as `RolloutBuffer.create`.
    """
    context = ray.get_runtime_context()
    namespace = namespace or context.namespace
    options = {
        "num_cpus": 0,
        "namespace": namespace,
        "lifetime": "detached" if detached else None,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False),
    }
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as undone:
        snapshot = None if folder is None else opened.enter_context(BufferSnapshots(folder).open(version))
        ledger = None if snapshot is None else snapshot.books.ledger(settings)
        vault = _started(Vault, f"{name}:vault", options)
        undone.callback(ray.kill, vault)
        if snapshot is not None:
            fill(vault, snapshot, ledger)
        actor = _started(BufferActor, name, options | {"max_restarts": -1, "max_concurrency": 10_000}, name, namespace, settings)
        undone.pop_all()
    return actor, vault


def _started(of: type, name: str, options: dict[str, Any], *arguments: Any) -> Actor:
    try:
        return ray.remote(of).options(name=name, **options).remote(*arguments)
    except ValueError as e:
        raise ConfigError(f"{name!r} cannot be created: {e}") from e
