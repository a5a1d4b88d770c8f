"""`Job`: what is sampled and learned from, how long it is, and how long accelerators would take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["JOBS", "Job"]

_SIGMA = 0.9
_LONGEST = 6  # medians


@dataclass(frozen=True)
class Job:
    """Lengths are log-normal, with a part that a group has in common, and a long tail: a group is done when its longest response is."""

    name: str
    routed: int
    """Numbers of the experts that each token went to: uint8 here, int32 in Miles. Beside its id (int32), log-probability (float32) and mark
    (uint8), which are lists of numbers there."""
    groups: int = 64
    """Of a step."""
    group_size: int = 8
    median: int = 3_500
    """Tokens of a response."""
    generate_s: float = 25e-6
    """For one token of a response; responses of a worker's groups are made at the same time."""
    learn_s: float = 0.3e-6
    """For one token of a step, all ranks together."""
    workers: int = 4
    calls: int = 4
    """Groups that a worker makes at the same time."""
    ranks: int = 2
    bound: int = 1
    """Versions."""
    weights: int = 32 << 20
    """Parameters, bfloat16."""

    @property
    def longest(self) -> int:
        """Tokens that a response has at most."""
        return _LONGEST * self.median

    def lengths(self, number: int) -> np.ndarray:
        """Tokens of each response of the n-th group: int64 (group_size,)."""
        rng = np.random.default_rng((1234, number))
        spread = rng.normal(0, _SIGMA * 0.6**0.5) + rng.normal(0, _SIGMA * 0.4**0.5, self.group_size)
        return np.clip(self.median * np.exp(spread), 8, self.longest).astype(np.int64)

    def generate_time(self, lengths: np.ndarray) -> float:
        return float(lengths.max()) * self.generate_s

    def learn_time(self, tokens: int) -> float:
        """Of one rank, for its tokens."""
        return tokens * self.learn_s * self.ranks

    @property
    def step_bytes(self) -> int:
        """About, of a step's samples in Miles' form, with its lists as arrays."""
        return int(self.groups * self.group_size * self.median * np.exp(_SIGMA**2 / 2) * (9 + 4 * self.routed))


JOBS = {
    job.name: job
    for job in (
        Job("1GB", 384, groups=32, median=1_800, generate_s=50e-6, learn_s=1.2e-6),
        Job("24MB", 0),
        Job("quick", 16, groups=8, group_size=4, median=500, workers=2, calls=2, weights=1 << 20),
    )
}
