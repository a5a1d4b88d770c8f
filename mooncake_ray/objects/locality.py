"""Work is sent to where the bytes are. Ray sees only the envelopes of values in the pool, which lie elsewhere, and are all of one size."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mooncake_ray.errors import ConfigError
from mooncake_ray.objects import envelopes, install, nodes, session

__all__ = ["near"]

_ANYWHERE = "DEFAULT"


def near(refs: Any, *, timeout_s: float = 5.0) -> NodeAffinitySchedulingStrategy | str:
    """A scheduling strategy for what is going to read these refs: the node whose pool has most of their bytes, if it has room.

        task.options(scheduling_strategy=mooncake_ray.near(ref)).remote(ref)

    What is known is where values were put or returned; copies on other nodes do not count. Nothing is brought anywhere but the envelopes of the
    values, some hundred bytes each (100 KiB of a return). Refs of tasks that have not ended, or failed, are left out, as are values that are
    in Ray's own store: Ray itself prefers the nodes of those.

    Args:
        refs: A `ray.ObjectRef`, a `BatchRef`, or lists and tuples of them, nested.
        timeout_s: For how long envelopes are waited for.

    Returns `"DEFAULT"`, Ray's own strategy, where nothing is known.

    Raises:
        TypeError: `refs` is something else.
        ConfigError: Ray is not up, or this node has no pool.
    """
    wanted = envelopes.flat(refs)
    install.open_seams()
    here = session.current()
    if here is None:
        raise ConfigError("no pool: ray.init() has not been called, or the broker could not be started")
    bytes_at: Counter[str] = Counter()
    for obj in _named(wanted, timeout_s).values():
        own = obj.pool_id == here.client.pool_id
        if (node_id := ray.get_runtime_context().get_node_id() if own else nodes.node_of(obj.pool_id)) is not None:
            bytes_at[node_id] += obj.nbytes
    if not bytes_at:
        return _ANYWHERE
    return NodeAffinitySchedulingStrategy(max(sorted(bytes_at), key=bytes_at.__getitem__), soft=True)


def _named(refs: list[ray.ObjectRef], timeout_s: float) -> dict[bytes, envelopes.Named]:
    """What is behind those that are there; of an object that several name, the largest part."""
    found: dict[bytes, envelopes.Named] = {}
    done = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0] if refs else []
    arrived = ray.wait(done, num_returns=len(done), timeout=timeout_s)[0] if done else []
    for ref in arrived:
        try:
            objects = envelopes.named(ref, timeout_s)
        except ray.exceptions.RayError:  # whoever gets it is told
            continue
        for obj in objects:
            if obj.id not in found or found[obj.id].nbytes < obj.nbytes:
                found[obj.id] = obj
    return found
