"""The node's object store. Knows nothing of Ray."""

from mooncake_ray.store.client import ObjectKey, Store

__all__ = ["ObjectKey", "Store"]
