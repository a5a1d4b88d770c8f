"""An object whose bytes are gone from the pool is lost in Ray's own words, and one that does not come in time is late in them.

Ray turns any error while a value is rebuilt into a RaySystemError. Code that handles lost objects knows Ray's OwnerDiedError,
ObjectLostError and GetTimeoutError, so these are what it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray._private import worker as ray_worker

from mooncake_ray.errors import BrokerDiedError, GetTimeoutError, ObjectLostError, ObjectNotFoundError

__all__ = ["PoolObjectLostError", "PoolTimeoutError", "error_maker"]


class PoolObjectLostError(ObjectLostError, ray.exceptions.ObjectLostError):
    """An object of this process, or of the task it called, is no longer in the pool: it was freed explicitly, or the broker died."""

    def __init__(self, object_ref_hex: str, owner_address: bytes | None, call_site: str, why: str = "") -> None:
        ray.exceptions.ObjectLostError.__init__(self, object_ref_hex, owner_address, call_site)
        self.why = why

    def __str__(self) -> str:
        return f"object {self.object_ref_hex} is lost from the pool: {self.why}"

    def __reduce__(self) -> Any:
        return PoolObjectLostError, (self.object_ref_hex, self.owner_address, self.call_site, self.why)


class PoolTimeoutError(GetTimeoutError, ray.exceptions.GetTimeoutError):
    """What a value is made of was not here within `Config.pull_timeout_s`. Nothing is lost by it: a later get may find it."""


def error_maker(original: type[Exception]) -> Callable[..., Exception]:
    """Stands for the `RaySystemError` that Ray's serialization module makes of an error; only called where there is one."""

    def ray_system_error(error: Any, *args: Any) -> Exception:
        if isinstance(error, ObjectNotFoundError | ObjectLostError | BrokerDiedError):
            return _lost(error)
        if isinstance(error, GetTimeoutError):
            return PoolTimeoutError(str(error))
        return original(error, *args)

    return ray_system_error


def _lost(error: Exception) -> Exception:
    worker = ray_worker.global_worker
    ref = worker.get_serialization_context().get_outer_object_ref()  # the object being rebuilt
    id, owner, site = (ref.hex(), ref.owner_address(), ref.call_site()) if ref is not None else ("unknown", b"", "")
    if owner and worker.core_worker.get_worker_id().binary() not in owner and isinstance(error, ObjectNotFoundError):
        return ray.exceptions.OwnerDiedError(id, owner, site)
    return PoolObjectLostError(id, owner, site, str(error))
