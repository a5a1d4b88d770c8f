"""Who is still there, as Ray's control store tells it. Every call is one or several requests to it; they block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray._private import state as ray_state
from ray._private import worker as ray_worker

__all__ = ["dead", "end_this_actor", "is_over"]


def dead(actors: Sequence[str]) -> list[bool]:
    """Which of these actors, by ID in hex, are dead for good."""
    return [ray_state.actors(actor).get("State") == "DEAD" for actor in actors]


def is_over(job: str) -> bool:
    """Whether that job has ended."""
    jobs: Any = ray_worker.global_worker.gcs_client.get_all_job_info(job_or_submission_id=job)
    return all(info.is_dead for info in jobs.values())


def end_this_actor() -> None:
    """For good, however often Ray would start it again."""
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
