"""A data plane for reinforcement-learning post-training on Ray: batches and weights go through a shared-memory pool.

    import mooncake_ray, ray
    mooncake_ray.install()
    ray.init()          # from here on, unchanged Ray code

Importing this package imports neither torch nor ray, and starts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncake_ray.config import Config
from mooncake_ray.errors import (
    BrokerDiedError,
    BrokerMismatchError,
    ConfigError,
    CorruptBlockError,
    GetTimeoutError,
    LeaseLostError,
    MooncakeRayError,
    ObjectLostError,
    ObjectNotFoundError,
    SchemaError,
    StoreError,
    StoreFullError,
)

if TYPE_CHECKING:
    from mooncake_ray.data import DataProto, Ragged
    from mooncake_ray.objects.api import free, get, pool_stats, put, stats, wait
    from mooncake_ray.objects.batch_ref import BatchRef, concat_batches
    from mooncake_ray.objects.batches import batch_ref, put_batch
    from mooncake_ray.objects.catalog import Catalog
    from mooncake_ray.objects.install import install, installed, runtime_env, uninstall
    from mooncake_ray.objects.install import runtime_env_hook as ray_hook
    from mooncake_ray.objects.locality import near
    from mooncake_ray.objects.prefetching import prefetch
    from mooncake_ray.objects.remote import remote
    from mooncake_ray.rollout.buffer import RolloutBuffer
    from mooncake_ray.store import ObjectKey, Store
    from mooncake_ray.sync.group import WeightSyncGroup

__all__ = [
    "BatchRef",
    "BrokerDiedError",
    "BrokerMismatchError",
    "Catalog",
    "Config",
    "ConfigError",
    "CorruptBlockError",
    "DataProto",
    "GetTimeoutError",
    "LeaseLostError",
    "MooncakeRayError",
    "ObjectKey",
    "ObjectLostError",
    "ObjectNotFoundError",
    "Ragged",
    "RolloutBuffer",
    "SchemaError",
    "Store",
    "StoreError",
    "StoreFullError",
    "WeightSyncGroup",
    "batch_ref",
    "concat_batches",
    "free",
    "get",
    "install",
    "installed",
    "near",
    "pool_stats",
    "prefetch",
    "put",
    "put_batch",
    "ray_hook",
    "remote",
    "runtime_env",
    "stats",
    "uninstall",
    "wait",
]

_LAZY = {
    "BatchRef": "mooncake_ray.objects.batch_ref:BatchRef",
    "batch_ref": "mooncake_ray.objects.batches:batch_ref",
    "concat_batches": "mooncake_ray.objects.batch_ref:concat_batches",
    "put_batch": "mooncake_ray.objects.batches:put_batch",
    "Catalog": "mooncake_ray.objects.catalog:Catalog",
    "DataProto": "mooncake_ray.data:DataProto",
    "ObjectKey": "mooncake_ray.store:ObjectKey",
    "Ragged": "mooncake_ray.data:Ragged",
    "RolloutBuffer": "mooncake_ray.rollout.buffer:RolloutBuffer",
    "Store": "mooncake_ray.store:Store",
    "WeightSyncGroup": "mooncake_ray.sync.group:WeightSyncGroup",
    "free": "mooncake_ray.objects.api:free",
    "get": "mooncake_ray.objects.api:get",
    "install": "mooncake_ray.objects.install:install",
    "installed": "mooncake_ray.objects.install:installed",
    "near": "mooncake_ray.objects.locality:near",
    "pool_stats": "mooncake_ray.objects.api:pool_stats",
    "prefetch": "mooncake_ray.objects.prefetching:prefetch",
    "put": "mooncake_ray.objects.api:put",
    "ray_hook": "mooncake_ray.objects.install:runtime_env_hook",
    "remote": "mooncake_ray.objects.remote:remote",
    "runtime_env": "mooncake_ray.objects.install:runtime_env",
    "stats": "mooncake_ray.objects.api:stats",
    "uninstall": "mooncake_ray.objects.install:uninstall",
    "wait": "mooncake_ray.objects.api:wait",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, attribute = _LAZY[name].split(":")
    value = globals()[name] = getattr(importlib.import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
