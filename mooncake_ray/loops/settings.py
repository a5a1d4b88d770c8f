"""`LoopSettings`: how a loop runs, in either mode."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_ray.errors import ConfigError

__all__ = ["LoopSettings"]


@dataclass(frozen=True)
class LoopSettings:
    groups_per_step: int
    """That a step learns from, all ranks together."""
    groups_per_call: int = 1
    """That a rollout worker gets at once."""
    calls_per_worker: int = 1
    """That a rollout worker gets before it has answered the first: as many as it can work on at the same time."""
    replay: int = 0
    """Groups of earlier steps that each step learns from again."""
    update_timeout_s: float = 600.0
    """For a learner's step."""
    generate_timeout_s: float = 1800.0
    """For a rollout worker's call, with its reward."""
    sync_timeout_s: float = 300.0
    """For a version of the weights to be everywhere."""
    snapshot_every: int = 10
    """Steps, where there is a folder for snapshots."""
    snapshot_timeout_s: float = 600.0
    """For learners to write what they have, or to read it; and for the buffer to be written."""
    retries: int = 3
    """How often a group is begun again whose worker has failed, and learners are that have died, one time after the other. What fails more often
    than that ends the loop."""

    def __post_init__(self) -> None:
        for name, least in (
            ("groups_per_step", 1),
            ("groups_per_call", 1),
            ("calls_per_worker", 1),
            ("replay", 0),
            ("snapshot_every", 1),
            ("retries", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
        for name in ("update_timeout_s", "generate_timeout_s", "sync_timeout_s", "snapshot_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
