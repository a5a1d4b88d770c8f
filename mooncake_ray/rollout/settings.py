"""`BufferSettings`: what a `RolloutBuffer` is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from mooncake_ray.errors import ConfigError

if TYPE_CHECKING:
    from mooncake_ray.rollout.group import Group

__all__ = ["BufferSettings", "Consumption", "Order", "Stale"]

Stale = Literal["drop", "return"]
"""What becomes of a group that has become too old to learn from: it is forgotten, or given to a producer to be made again."""

Order = Literal["fifo", "oldest", "newest", "priority"]
"""Which groups are learned from first: in the order of their coming; those of the oldest weights, or of the newest; those of the highest
priority. Equals in the order of their coming."""

Consumption = Literal["exactly-once", "at-least-once"]
"""`exactly-once`: what a step was given stays that step's until it is committed, whoever asks for it. `at-least-once`: it goes back after a
while without a sign of life of who has it, and may have been learned from then."""


@dataclass(frozen=True)
class BufferSettings:
    group_size: int = 1
    """Samples of a prompt; only whole groups are learned from."""
    max_staleness: int | None = None
    """How many versions older than the weights that are trained the oldest token of a group may be. None: any."""
    stale: Stale = "drop"
    order: Order = "fifo"
    consumption: Consumption = "exactly-once"
    capacity_groups: int | None = None
    """Groups that are on their way: being made, waiting, and being learned from. Who wants to make more waits."""
    capacity_bytes: int | None = None
    """Of stored batches that are on their way."""
    replay_bytes: int = 0
    """So much of what was learned from is kept, to be drawn again."""
    lease_s: float = 60.0
    """After so many seconds without a sign of life of its producer, a group that is being made is given to another one; so long a step's groups
    wait for their learner, where they are consumed at least once."""
    filters: tuple[Callable[[Group], bool], ...] = ()
    """A group for which one says False is not learned from (no difference in rewards, say). Each a pure function that can be pickled."""
    seed: int = 0
    """Of draws from the replay."""

    def __post_init__(self) -> None:
        for name, least in (("group_size", 1), ("max_staleness", 0), ("capacity_groups", 1), ("capacity_bytes", 1), ("replay_bytes", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
        if not self.lease_s > 0:
            raise ConfigError(f"lease_s must be positive, got {self.lease_s}")
        for name, allowed in (("stale", Stale), ("order", Order), ("consumption", Consumption)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(allowed))}, got {getattr(self, name)!r}")
