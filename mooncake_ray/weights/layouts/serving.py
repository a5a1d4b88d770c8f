"""What tables of engines' layouts are made of: which rank an engine's process is, which of its parameters are several tensors of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mooncake_ray.errors import PlanError

__all__ = ["EngineRank", "Shapes", "Table", "experts_of", "setting", "shapes_of"]

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""A rank's parameters: name to (shape, torch's name of the dtype)."""

Part = tuple[int, int]
"""(Which, of how many)."""


@dataclass(frozen=True)
class EngineRank:
    """One process of an engine, in each of its groups."""

    tp: Part = (0, 1)
    attention: Part | None = None
    """What attention is split over, where that is not all of `tp` (attention that is data parallel)."""
    vocabulary: Part | None = None
    """The same for embeddings and the head."""
    ep: Part = (0, 1)
    expert_tp: Part | None = None
    """What each expert is split over; by default `tp`, or nothing where there is expert parallelism."""
    experts: str | tuple[int, ...] = "linear"
    """Which experts are here, in their order: "linear" (consecutive ones; the first ranks have one more if it does not come out even),
    "round_robin", or the numbers themselves, for a map that was made for balance. One may be there several times."""

    def __post_init__(self) -> None:
        for name in ("tp", "attention", "vocabulary", "ep", "expert_tp"):
            if (part := getattr(self, name)) is not None and not 0 <= part[0] < part[1]:
                raise PlanError(f"{name}: there is no rank {part[0]} of {part[1]}")
        if isinstance(self.experts, str) and self.experts not in ("linear", "round_robin"):
            raise PlanError(f"experts are placed linear, round_robin, or by their numbers, not {self.experts!r}")

    def part(self, what: str) -> Part:
        """Of "tp", "attention", "vocabulary" or "expert_tp"."""
        if (part := getattr(self, what)) is not None:
            return part
        return (0, 1) if what == "expert_tp" and self.ep[1] > 1 else self.tp


@dataclass(frozen=True)
class Table:
    """An engine's ways."""

    fused: Mapping[str, tuple[str, ...]]
    """Modules whose parameters are several tensors, one after the other along the first dimension."""
    w13: Collection[str]
    """Parameters of all experts' gate and up projections: what comes after "experts."; `{leaf}` is what the tensors' names end with."""
    w2: Collection[str]
    up_first: bool = False
    """The up projection comes before the gate."""
    shared: int = 0
    """How many shared experts are kept behind the routed ones, under the numbers that follow theirs."""
    rename: Callable[[str], str] = field(default=lambda name: name)
    """From the engine's name to the canonical one, for what is not in the above."""


def experts_of(count: int, rank: EngineRank, shared: int = 0) -> tuple[int, ...]:
    """The numbers of the experts that a rank has, in their order in its parameters."""
    if not isinstance(rank.experts, str):
        return rank.experts
    me, ranks = rank.ep
    if rank.experts == "round_robin":
        mine = range(me, count, ranks)
    else:
        base, more = divmod(count, ranks)
        first = me * base + min(me, more)
        mine = range(first, first + base + (me < more))
    return (*mine, *range(count, count + shared))


def setting(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these that a config has, be it a mapping or an object."""
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    return default


def shapes_of(module: torch.nn.Module, buffers: Iterable[str] = ()) -> dict[str, tuple[tuple[int, ...], str]]:
    """A module's parameters, and those of its buffers, as tables take them. Tied parameters once.

    Raises:
        PlanError: one does not lie in C order, as after some kernels' preparation: its shape does not say what is where.
    """
    there = dict(module.named_buffers())
    named = [*module.named_parameters(), *((name, there[name]) for name in buffers)]
    if odd := [name for name, t in named if not t.is_contiguous()]:
        raise PlanError(f"{len(odd)} parameters do not lie in C order: {', '.join(odd[:5])}")
    return {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in named}
