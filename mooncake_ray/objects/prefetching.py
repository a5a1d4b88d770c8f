"""Objects of other nodes are brought here before anybody waits for them.

One thread a process, while there is anything to do: it waits for the values, reads their envelopes, and asks this node's engine for the
pool objects that they name. The engine brings them when it can, some at a time.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import ray

from mooncake_ray.counters import count
from mooncake_ray.errors import ConfigError, MooncakeRayError
from mooncake_ray.objects import envelopes, install, session
from mooncake_ray.objects.elsewhere import Elsewhere
from mooncake_ray.transfer.deadline import Deadline

__all__ = ["MOST", "prefetch"]

logger = logging.getLogger("mooncake_ray")

MOST = 1 << 14
"""Refs that may be asked for and not be done with."""
_LOOK_S = 0.2  # how long a ref may stay unseen that is asked for while others are waited for
_ENVELOPE_S = 10.0  # it is small, and known to be there

_lock = threading.Lock()
_asked: dict[ray.ObjectRef, Deadline] = {}
_running = False


def prefetch(refs: Any, timeout_s: float | None = None) -> None:
    """Starts to bring what refs refer to into this node's pool, where it lies on other nodes, and does not wait for it.

    A later `get` finds it here, or waits for the rest of it. Of tasks that have not ended yet, the returns are brought when they have. What has
    come may be dropped again when the pool needs the room. What cannot be brought is logged: who gets it will see why.

    Args:
        refs: A `ray.ObjectRef`, a `BatchRef`, or lists and tuples of them, nested.
        timeout_s: How long each may take, from now on, until this gives up (and holds its ref no longer). None: `Config.pull_timeout_s`.

    Raises:
        TypeError: `refs` is something else.
        ValueError: `timeout_s` is not above 0, or there are more than `MOST` refs under way.
        ConfigError: Ray is not up, or this node has no pool.
    """
    global _running
    wanted = envelopes.flat(refs)
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s must be above 0, got {timeout_s}")
    install.open_seams()
    here = session.current()
    if here is None:
        raise ConfigError("no pool: ray.init() has not been called, or the broker could not be started")
    deadline = Deadline(timeout_s or here.config.pull_timeout_s)
    with _lock:
        if len(_asked) + len(wanted) > MOST:
            raise ValueError(f"{len(wanted)} refs and {len(_asked)} that are under way are more than {MOST}")
        _asked.update(dict.fromkeys(wanted, deadline))
        if _asked and not _running:
            threading.Thread(target=_run, name="mooncake_ray.prefetches", daemon=True).start()
            _running = True


def _run() -> None:
    """Until nothing is asked for any more."""
    global _running
    while True:
        with _lock:
            for ref in [ref for ref, deadline in _asked.items() if deadline.over]:
                logger.warning("mooncake_ray: %s was not there in time to be prefetched", ref.hex())
                del _asked[ref]
            if not _asked or not ray.is_initialized():
                _asked.clear()
                _running = False
                return
            waiting = list(_asked)
        try:
            ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            if not ready:
                ready, _ = ray.wait(waiting, num_returns=1, timeout=_LOOK_S)
        except (ray.exceptions.RayError, RuntimeError, ValueError) as e:  # Ray was shut down, perhaps; or one of them is freed
            logger.warning("mooncake_ray: nothing is prefetched: %s", e)
            ready = waiting
        for ref in ready:
            with _lock:
                deadline = _asked.pop(ref)
            try:
                _ask_for(ref, deadline)
            except (MooncakeRayError, ray.exceptions.RayError, RuntimeError, OSError) as e:
                logger.warning("mooncake_ray: %s is not prefetched: %s", ref.hex(), e)
        del waiting, ready


def _ask_for(ref: ray.ObjectRef, deadline: Deadline) -> None:
    here = session.current()
    if here is None:
        return
    for obj in envelopes.named(ref, _ENVELOPE_S):
        if obj.pool_id != here.client.pool_id:
            Elsewhere(here, obj.pool_id, obj.id).prefetch(deadline)
            count("prefetched")
