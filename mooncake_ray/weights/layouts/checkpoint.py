"""What transformers' modules are in its checkpoints: in memory all experts of a layer are one tensor, in a checkpoint each has its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mooncake_ray.weights.layouts.spec import ModelSpec
from mooncake_ray.weights.source import Slice, unwrapped

__all__ = ["checkpoint_names"]

_STACKED = re.compile(r"(.*layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)")


def checkpoint_names(config: Any) -> Callable[[str], str | tuple[Slice, ...]]:
    """`names` for a source of a causal language model as transformers 5 builds it: `ModuleSource(model, checkpoint_names(model.config))`.

    Raises:
        PlanError: the config is of a family that is not known.
    """
    spec = ModelSpec.of(config)
    gate, up, down = spec.family.expert_linears
    rows, columns = spec.expert_ffn, spec.hidden

    def names(own: str) -> str | tuple[Slice, ...]:
        name = unwrapped(own)
        if (match := _STACKED.fullmatch(name)) is None:
            # Where checkpoints call it otherwise, it is by the name of the layer's mixture.
            return name.replace(".mlp.", f".{spec.family.router.rpartition('.')[0]}.") if spec.experts else name
        experts = [f"{match[1]}{spec.family.expert.format(e)}." for e in range(spec.experts)]
        if match[2] == "down_proj":
            return tuple(Slice(f"{expert}{down}.weight", (e, 0, 0), (e + 1, columns, rows), 1) for e, expert in enumerate(experts))
        return tuple(
            Slice(f"{expert}{linear}.weight", (e, at, 0), (e + 1, at + rows, columns), 1)
            for e, expert in enumerate(experts)
            for at, linear in ((0, gate), (rows, up))
        )

    return names
