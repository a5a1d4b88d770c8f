"""vLLM's layouts: one rank's parameters as fragments, worked out from their names and shapes.

A cross-check of what tracing its loaders says (`TracedTarget`), and for when no module can be traced. As of vLLM 0.33: the experts' parameters
are one level further down than before, under `routed_experts`; both are known.
"""

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
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def fragments(
    config: Any,
    metas: Iterable[ParamMeta],
    parameters: Shapes,
    rank: EngineRank = EngineRank(),  # noqa: B008
    *,
    up_first: bool = False,
    rename: Callable[[str], str] | None = None,
    ignore: Collection[str] = (),
) -> list[Fragment]:
    """Of one rank; see `fused_fragments` for arguments and errors.

    Args:
        up_first: the halves of `w13_weight` are swapped, as some kernels want them.
        rename: from the engine's name to the canonical one, where they differ otherwise.
    """
    plain = _plain if rename is None else lambda name: _plain(rename(name))
    w13, w2 = ("routed_experts.w13_{leaf}", "w13_{leaf}"), ("routed_experts.w2_{leaf}", "w2_{leaf}")
    return fused_fragments(Table(_FUSED, w13, w2, up_first=up_first, rename=plain), config, metas, parameters, rank, ignore)


def _plain(name: str) -> str:
    """Multi-head latent attention keeps its projections one level further down."""
    return name.replace(".self_attn.mla_attn.", ".self_attn.")
