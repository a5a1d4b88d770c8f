"""Hugging Face's own modules: parameters under their canonical names, but for experts, which transformers keeps stacked."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from mooncake_ray.weights.layouts.fused import fused_fragments
from mooncake_ray.weights.layouts.serving import EngineRank, Shapes, Table
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.placement import Fragment

__all__ = ["fragments"]

_TABLE = Table({}, ("gate_up_proj",), ("down_proj",))


def fragments(config: Any, metas: Iterable[ParamMeta], parameters: Shapes, *, ignore: Collection[str] = ()) -> list[Fragment]:
    """Of a whole module. A tied head is the embedding. See `fused_fragments` for arguments and errors.

    Args:
        metas: the tensors of the model: one for each expert, as in checkpoints, or stacked, as in transformers' own modules.
    """
    return fused_fragments(_TABLE, config, metas, parameters, EngineRank(), ignore)
