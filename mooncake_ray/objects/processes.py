"""Processes by names that others can ask Ray about."""

from __future__ import annotations

import os

import ray
from ray._private import state as ray_state

__all__ = ["is_dead", "this_process"]


def this_process() -> str:
    """A name for this one: of an actor, that of its present life."""
    context = ray.get_runtime_context()
    actor = context.get_actor_id()
    return f"actor:{actor}:{os.getpid()}" if actor else f"process:{context.get_worker_id()}"


def is_dead(process: str) -> bool:
    """Whether Ray says that an actor, or this life of it, is over. Of other processes nobody knows."""
    kind, id, *pid = process.split(":")
    if kind != "actor":
        return False
    told = ray_state.actors(id)
    return not told or told["State"] == "DEAD" or (told["State"] == "ALIVE" and str(told["Pid"]) != pid[0])
