"""An object whose bytes are gone from the pool is lost in Ray's own words.

Ray turns any error while a value is rebuilt into a RaySystemError. Code that handles lost objects knows Ray's OwnerDiedError and
ObjectLostError, so these are what it gets.
"""

from __future__ import annotations

from typing import Any

import ray
from ray._private import worker as ray_worker

from mooncake_ray.errors import BrokerDiedError, ObjectLostError, ObjectNotFoundError

__all__ = ["PoolObjectLostError", "deserialize_with"]


class PoolObjectLostError(ObjectLostError, ray.exceptions.ObjectLostError):
    """An object of this process, or of the task it called, is no longer in the pool: it was freed explicitly, or the broker died."""

    def __init__(self, object_ref_hex: str, owner_address: bytes | None, call_site: str, why: str = "") -> None:
        ray.exceptions.ObjectLostError.__init__(self, object_ref_hex, owner_address, call_site)
        self.why = why

    def __str__(self) -> str:
        return f"object {self.object_ref_hex} is lost from the pool: {self.why}"

    def __reduce__(self) -> Any:
        return PoolObjectLostError, (self.object_ref_hex, self.owner_address, self.call_site, self.why)


def deserialize_with(original: Any) -> Any:
    """`SerializationContext.deserialize_objects`, naming losses."""

    def deserialize_objects(self: Any, serialized_ray_objects: Any, object_refs: Any, *args: Any, **kwargs: Any) -> Any:
        values = original(self, serialized_ray_objects, object_refs, *args, **kwargs)
        for i, value in enumerate(values):
            if type(value) is ray.exceptions.RaySystemError:
                values[i] = _named(value, object_refs[i])
        return values

    return deserialize_objects


def _named(error: ray.exceptions.RaySystemError, ref: ray.ObjectRef | None) -> Exception:
    cause = getattr(error, "client_exc", None)
    if not isinstance(cause, ObjectNotFoundError | ObjectLostError | BrokerDiedError):
        return error
    id, owner, site = (ref.hex(), ref.owner_address(), ref.call_site()) if ref is not None else ("unknown", b"", "")
    if owner and ray_worker.global_worker.core_worker.get_worker_id().binary() not in owner and isinstance(cause, ObjectNotFoundError):
        return ray.exceptions.OwnerDiedError(id, owner, site)
    return PoolObjectLostError(id, owner, site, str(cause))
