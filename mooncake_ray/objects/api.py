"""The explicit forms, for code that wants to say it: put, get, wait, free; and what was routed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import ray

from mooncake_ray import counters
from mooncake_ray.errors import ConfigError
from mooncake_ray.objects import install, routing, session

__all__ = ["free", "get", "pool_stats", "put", "stats", "wait"]


def put(value: Any) -> ray.ObjectRef:
    """`ray.put`, with every tensor and array in `value` routed through the pool whatever its size, installed or not.

    Returns a real `ray.ObjectRef`: it can be passed to any Ray call, and the memory follows Ray's reference counting.
    """
    install.open_seams()
    outer, routing.state.chosen = routing.state.chosen, True
    try:
        return ray.put(value)
    finally:
        routing.state.chosen = outer


def get(refs: ray.ObjectRef | Sequence[ray.ObjectRef], *, timeout: float | None = None) -> Any:
    """`ray.get`. Tensors are private copy-on-write views, arrays read-only views.

    Raises:
        ObjectLostError (ours and Ray's): the bytes are gone from the pool: freed explicitly, or its broker died.
        ray.exceptions.OwnerDiedError: the process that put the object died.
    """
    return ray.get(refs, timeout=timeout)


def wait(
    refs: Sequence[ray.ObjectRef], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
    """`ray.wait`."""
    return ray.wait(list(refs), num_returns=num_returns, timeout=timeout, fetch_local=fetch_local)


def free(refs: ray.ObjectRef | Sequence[ray.ObjectRef]) -> int:
    """Frees the pool memory of objects now, although refs to them live: a later `ray.get` of them fails. Live views stay valid.

    Only needed where a ref is kept longer than its data. Returns how many pool objects were freed.
    """
    refs = [refs] if isinstance(refs, ray.ObjectRef) else list(refs)
    here = session.current()
    if here is None or not refs:
        return 0
    with session.recording() as opened:
        ray.get(refs)
    ids = sorted({region.id for region in opened})
    here.client.remove(ids)
    return len(ids)


def stats() -> dict[str, int]:
    """What this process did: `routed` serialisations, `bytes_copied` into the pool, `bytes_passed_on` without a copy, `opened` pool objects,
    `adopted` returns, `fallbacks` to Ray's store (and `fallbacks:<reason>`)."""
    return counters.snapshot()


def pool_stats() -> dict[str, Any]:
    """The node's pool: bytes, objects, pins, claims, and a row a process. Raises ConfigError where Ray or the pool is not up."""
    here = session.current()
    if here is None:
        raise ConfigError("no pool: ray.init() has not been called, or the broker could not be started")
    return json.loads(here.client.stats())
