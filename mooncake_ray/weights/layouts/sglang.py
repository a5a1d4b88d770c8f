"""SGLang's layouts: one rank's parameters as fragments, worked out from their names and shapes. As of SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from mooncake_ray.weights.layouts.fused import fused_fragments
from mooncake_ray.weights.layouts.serving import EngineRank, Shapes, Table
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.placement import Fragment

__all__ = ["fragments"]

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def fragments(
    config: Any,
    metas: Iterable[ParamMeta],
    parameters: Shapes,
    rank: EngineRank = EngineRank(),  # noqa: B008
    *,
    load_up_proj_weight_first: bool = False,
    num_fused_shared_experts: int = 0,
    rename: Callable[[str], str] | None = None,
    ignore: Collection[str] = (),
) -> list[Fragment]:
    """Of one rank; see `fused_fragments` for arguments and errors.

    Args:
        load_up_proj_weight_first: SGLang's own name for what swaps the halves of `w13_weight`.
        num_fused_shared_experts: 1 if the shared expert is kept behind the routed ones; a map of experts names it by the number of routed ones.
        rename: from the engine's name to the canonical one, where they differ otherwise.
    """
    table = Table(
        _FUSED,
        ("w13_{leaf}",),
        ("w2_{leaf}",),
        up_first=load_up_proj_weight_first,
        shared=num_fused_shared_experts,
        rename=rename or (lambda name: name),
    )
    return fused_fragments(table, config, metas, parameters, rank, ignore)
