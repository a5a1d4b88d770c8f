"""`Choice`: by which mode the next version should go, from what the last ones took. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mooncake_ray.errors import ConfigError

__all__ = ["MODES", "Choice", "Mode"]

Mode = Literal["auto", "p2p", "nccl", "delta"]
MODES = ("auto", "p2p", "nccl", "delta")
_AGAIN = 25  # versions after which what was slower is tried once more
_SMALL_S = 0.1  # so fast that there is nothing to be won
_DENSE = 0.25  # of all bytes: a delta of more is not worth it


@dataclass
class Choice:
    """For one group."""

    mode: str
    """As the group is set."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What the last version took by each mode: publishing and staging."""
    since: dict[str, int] = field(default_factory=dict)
    """Versions ago."""

    def __post_init__(self) -> None:
        check(self.mode)

    def wants_deltas(self, asked: str) -> bool:
        """Whether trainers should find out what changed when they publish a version that is to go as `asked` ("" leaves it to the group)."""
        mode = asked or self.mode
        return mode == "delta" or (mode == "auto" and self._next() == "delta")

    def order(self, asked: str, patch_bytes: int, nbytes: int) -> tuple[list[str], str]:
        """The modes to try, in this order, and why.

        Args:
            asked: For this version; "" leaves it to the group.
            patch_bytes: What a delta would be; -1: not known.
            nbytes: What all is.
        """
        mode = asked or self.mode
        check(mode)
        if mode != "auto":
            return [mode], "asked for"
        if patch_bytes >= 0 and patch_bytes < _DENSE * nbytes:
            return ["delta", "p2p", "nccl"], f"{patch_bytes} of {nbytes} bytes are a delta"
        if patch_bytes >= 0:
            return ["p2p", "nccl"], f"a delta would be {patch_bytes} of {nbytes} bytes"
        return ["p2p", "nccl"], "it took " + (", ".join(f"{s:.3g} s by {m}" for m, s in sorted(self.seconds.items())) or "no time yet")

    def took(self, mode: str, seconds: float) -> None:
        self.since = {m: n + 1 for m, n in self.since.items()} | {mode: 0}
        self.seconds[mode] = seconds

    def _next(self) -> str:
        full = min((s for m, s in self.seconds.items() if m != "delta"), default=0.0)
        delta = self.seconds.get("delta", 0.0)
        if full < _SMALL_S:
            return "p2p"
        slower = "delta" if delta > full else "p2p"
        if self.since.get(slower, 0) >= _AGAIN:
            return slower
        return "p2p" if slower == "delta" else "delta"


def check(mode: str) -> None:
    """Raises ConfigError for what is no mode."""
    if mode not in MODES:
        raise ConfigError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
