"""Loops of reinforcement learning: rollouts, rewards, learning and weights, one after the other or all at once."""

from mooncake_ray.loops.async_loop import AsyncLoop
from mooncake_ray.loops.metrics import LoopReport, StepReport
from mooncake_ray.loops.settings import LoopSettings
from mooncake_ray.loops.snapshots import LoopSnapshot, LoopSnapshots, LoopState
from mooncake_ray.loops.sync_loop import SyncLoop
from mooncake_ray.loops.tasks import LearnerTask, Rolled, RolloutTask

__all__ = [
    "AsyncLoop",
    "LearnerTask",
    "LoopReport",
    "LoopSettings",
    "LoopSnapshot",
    "LoopSnapshots",
    "LoopState",
    "Rolled",
    "RolloutTask",
    "StepReport",
    "SyncLoop",
]
