"""What each of Megatron's tensors is: from its name in a `GPTModel` to pieces of Hugging Face's tensors. Pure: names, shapes, numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch

from mooncake_ray.weights.held import Piece
from mooncake_ray.weights.layouts import cuts
from mooncake_ray.weights.layouts.cuts import Local
from mooncake_ray.weights.layouts.ranks import Ranks
from mooncake_ray.weights.layouts.spec import ModelSpec

__all__ = ["pieces_of"]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_PREDICT = re.compile(r"mtp\.layers\.(\d+)\.(?:transformer_layer|mtp_model_layer)\.(.+)")
_PREDICT_OWN = re.compile(r"mtp\.layers\.(\d+)\.(enorm|hnorm|eh_proj|final_layernorm)\.(weight|bias)")


def pieces_of(name: str, tensor: torch.Tensor, spec: ModelSpec, ranks: Ranks, layer: Callable[[int], int] = int) -> list[Piece] | None:
    """The pieces that a rank's tensor is made of.

    Args:
        name: As in a chunk of the model, without what wraps it: "decoder.layers.0.mlp.linear_fc1.weight".
        tensor: Only its shape and strides are looked at.
        layer: From the number of a decoder layer in the chunk to its number in the model.

    Returns:
        None if a model of Hugging Face's has nothing like it.

    Raises:
        PlanError: the shape is not what the model's numbers and the rank's place make it.
    """
    found = _embedding(name, tensor, spec, ranks)
    if found is None and (match := _LAYER.fullmatch(name)):
        found = _in_layer(name, match[2], tensor, spec, ranks, f"model.layers.{layer(int(match[1]))}.")
    if found is None and (match := _PREDICT.fullmatch(name)):
        found = _in_layer(name, match[2], tensor, spec, ranks, f"model.layers.{spec.layers + int(match[1])}.")
    if found is None and (match := _PREDICT_OWN.fullmatch(name)):
        found = _predict(match, Local.of(name, tensor, ranks.tp_rank, ranks.tp), spec)
    return None if found is None else list(found)


def _embedding(name: str, tensor: torch.Tensor, spec: ModelSpec, ranks: Ranks) -> Iterator[Piece] | None:
    local = Local.of(name, tensor, ranks.tp_rank, ranks.tp)
    match name.rpartition("."):
        case "embedding.word_embeddings", _, "weight":
            return cuts.vocabulary(local, spec.embedding_names, spec.vocab, spec.hidden)
        case "output_layer", _, "weight":
            # The last stage's copy of a tied embedding is one more replica of it, under every name.
            return cuts.vocabulary(local, spec.embedding_names if spec.tied else spec.output_names, spec.vocab, spec.hidden)
        case "decoder.final_layernorm", _, kind:
            return cuts.whole(local, f"model.norm.{kind}", spec.hidden)
    return None


def _predict(match: re.Match[str], local: Local, spec: ModelSpec) -> Iterator[Piece]:
    prefix = f"model.layers.{spec.layers + int(match[1])}."
    if match[2] == "eh_proj":
        return cuts.column(local, f"{prefix}eh_proj.{match[3]}", spec.hidden, 2 * spec.hidden)
    own = "shared_head.norm" if match[2] == "final_layernorm" else match[2]
    return cuts.whole(local, f"{prefix}{own}.{match[3]}", spec.hidden)


_NORM = re.compile(r"(.+)\.layer_norm_(weight|bias)")
_FUSED_NORMS = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}
"""Norms that are a linear layer's own, by what they are called where they are not."""


def _in_layer(name: str, rest: str, tensor: torch.Tensor, spec: ModelSpec, ranks: Ranks, prefix: str) -> Iterator[Piece] | None:
    """`rest` is the name below the layer, `prefix` the layer's in Hugging Face's names."""
    local = Local.of(name, tensor, ranks.tp_rank, ranks.tp)
    if fused := _NORM.fullmatch(rest):
        if (norm := _FUSED_NORMS.get(fused[1])) is None:
            return None
        rest = f"{norm}.{fused[2]}"
    where, _, kind = rest.rpartition(".")
    if where.startswith("self_attention."):
        return _attention(where.removeprefix("self_attention."), kind, local, spec, prefix)
    match where:
        case "input_layernorm":
            return cuts.whole(local, f"{prefix}input_layernorm.{kind}", spec.hidden)
        case "pre_mlp_layernorm":
            return cuts.whole(local, f"{prefix}post_attention_layernorm.{kind}", spec.hidden)
        case "mlp.linear_fc1" | "mlp.linear_fc2":
            return _mlp(where[4:], kind, local, f"{prefix}mlp.", _DENSE, spec.hidden, spec.ffn)
        case "mlp.shared_experts.linear_fc1" | "mlp.shared_experts.linear_fc2":
            return _mlp(where[19:], kind, local, f"{prefix}{spec.family.shared}.", _DENSE, spec.hidden, spec.shared_ffn)
        case "mlp.shared_experts" if kind == "gate_weight":
            return cuts.whole(local, f"{prefix}{spec.family.shared_gate}.weight", 1, spec.hidden)
        case "mlp.router" if kind == "weight":
            return cuts.whole(local, f"{prefix}{spec.family.router}.weight", spec.experts, spec.hidden)
        case "mlp.router" if kind == "expert_bias":
            return cuts.whole(local, prefix + spec.family.router_bias, spec.experts)
    if rest.startswith("mlp.experts."):
        return _experts(rest.removeprefix("mlp.experts."), Local.of(name, tensor, ranks.etp_rank, ranks.etp), spec, ranks, prefix)
    return None


def _attention(where: str, kind: str, local: Local, spec: ModelSpec, prefix: str) -> Iterator[Piece] | None:
    own = f"{prefix}self_attn."
    columns = () if kind == "bias" else (spec.hidden,)
    latent = spec.latent
    value = latent.value if latent else spec.head_dim
    match where:
        case "linear_qkv":
            names = (f"{own}q_proj.{kind}", f"{own}k_proj.{kind}", f"{own}v_proj.{kind}")
            return cuts.heads(local, names, spec.heads, spec.kv_heads, spec.head_dim, spec.output_gate, *columns)
        case "linear_proj" if kind == "bias":
            return cuts.whole(local, f"{own}o_proj.bias", spec.hidden)
        case "linear_proj":
            return cuts.row(local, f"{own}o_proj.weight", spec.hidden, spec.heads * value)
        case "q_layernorm" | "k_layernorm" if latent is None:
            return cuts.whole(local, f"{own}{where[0]}_norm.{kind}", spec.head_dim)
    if latent is None:
        return None
    query = spec.heads * (latent.nope + latent.rope)
    match where:
        case "linear_q_proj":
            return cuts.column(local, f"{own}q_proj.{kind}", query, *columns)
        case "linear_kv_down_proj":
            return cuts.duplicated_or_column(local, f"{own}kv_a_proj_with_mqa.{kind}", latent.kv_rank + latent.rope, spec.hidden)
        case "kv_layernorm":
            return cuts.whole(local, f"{own}kv_a_layernorm.{kind}", latent.kv_rank)
        case "linear_kv_up_proj":
            return cuts.column(local, f"{own}kv_b_proj.{kind}", spec.heads * (latent.nope + latent.value), latent.kv_rank)
        case "linear_q_down_proj" if latent.q_rank:
            return cuts.duplicated_or_column(local, f"{own}q_a_proj.{kind}", latent.q_rank, spec.hidden)
        case "q_layernorm" if latent.q_rank:
            return cuts.whole(local, f"{own}q_a_layernorm.{kind}", latent.q_rank)
        case "linear_q_up_proj" if latent.q_rank:
            return cuts.column(local, f"{own}q_b_proj.{kind}", query, latent.q_rank)
    return None


_DENSE = ("gate_proj", "up_proj", "down_proj")


def _mlp(where: str, kind: str, local: Local, prefix: str, names: tuple[str, str, str], hidden: int, ffn: int) -> Iterator[Piece] | None:
    gate, up, down = (f"{prefix}{name}.{kind}" for name in names)
    match where, kind:
        case "linear_fc1", "weight":
            return cuts.gated(local, gate, up, ffn, hidden)
        case "linear_fc1", "bias":
            return cuts.gated(local, gate, up, ffn)
        case "linear_fc2", "weight":
            return cuts.row(local, down, hidden, ffn)
        case "linear_fc2", "bias":
            return cuts.whole(local, down, hidden)
    return None


_NUMBERED = re.compile(r"(linear_fc[12])\.(weight|bias)(\d+)")
_SEQUENTIAL = re.compile(r"local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")


def _experts(rest: str, local: Local, spec: ModelSpec, ranks: Ranks, prefix: str) -> Iterator[Piece] | None:
    """Experts' linears are cut over the experts' own tensor parallelism; each rank has consecutive ones of them."""
    here = Local(local.name, local.shape, local.strides, ranks.ep_rank, ranks.ep).share(spec.experts, "experts")
    first = ranks.ep_rank * here
    names = spec.family.expert_linears

    def expert(i: int) -> str:
        return f"{prefix}{spec.family.expert.format(first + i)}."

    if match := _NUMBERED.fullmatch(rest):
        where, kind, number = match.groups()
    elif match := _SEQUENTIAL.fullmatch(rest):
        number, where, kind = match.groups()
    elif rest == "weight1":
        pairs = [(f"{expert(i)}{names[0]}.weight", f"{expert(i)}{names[1]}.weight") for i in range(here)]
        return cuts.grouped_gate_up(local, pairs, spec.expert_ffn, spec.hidden)
    elif rest == "weight2":
        return cuts.grouped_down(local, [f"{expert(i)}{names[2]}.weight" for i in range(here)], spec.hidden, spec.expert_ffn)
    else:
        return None
    if int(number) >= here:
        return None
    return _mlp(where, kind, local, expert(int(number)), names, spec.hidden, spec.expert_ffn)
