"""Small models whose parameters are fused and sharded as inference engines do it, and whose loaders are written as theirs are.

A loader gets the tensors of a Hugging Face checkpoint by name; each parameter's `weight_loader` cuts out what its rank needs, and copies it to
where it belongs. Running such a loader on real tensors is what everything else is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mooncake_ray.weights.meta import ParamMeta

__all__ = ["MLA", "MOE", "Sizes", "TinyServed", "metas_of", "whole_model"]


@dataclass(frozen=True)
class Sizes:
    """A model, by the names that a Hugging Face config has for its sizes."""

    vocab_size: int = 21
    hidden_size: int = 8
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 4
    intermediate_size: int = 12
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    dtype: str = "float32"
    num_experts: int = 0
    moe_intermediate_size: int = 8
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int = 4
    qk_rope_head_dim: int = 2
    v_head_dim: int = 4
    block: int = 0
    """Rows and columns of the blocks that have a scale; 0 for none."""

    def is_moe(self, layer: int) -> bool:
        return bool(self.num_experts) and layer >= self.first_k_dense_replace


MOE = Sizes(num_experts=6, n_shared_experts=1, first_k_dense_replace=1, num_hidden_layers=3)
MLA = replace(MOE, q_lora_rank=6, kv_lora_rank=5)


def shapes(c: Sizes) -> dict[str, tuple[int, ...]]:
    """The checkpoint: canonical names and shapes."""
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}

    def linear(name: str, rows: int, columns: int, bias: bool = False) -> None:
        out[f"{name}.weight"] = (rows, columns)
        if c.block and ".mlp." in name and not name.endswith("mlp.gate"):
            out[f"{name}.weight_scale_inv"] = (-(-rows // c.block), -(-columns // c.block))
        if bias:
            out[f"{name}.bias"] = (rows,)

    h = c.hidden_size
    for i in range(c.num_hidden_layers):
        at = f"model.layers.{i}"
        out[f"{at}.input_layernorm.weight"] = out[f"{at}.post_attention_layernorm.weight"] = (h,)
        heads = c.num_attention_heads
        if c.kv_lora_rank is None:
            linear(f"{at}.self_attn.q_proj", heads * c.head_dim, h, c.attention_bias)
            linear(f"{at}.self_attn.k_proj", c.num_key_value_heads * c.head_dim, h, c.attention_bias)
            linear(f"{at}.self_attn.v_proj", c.num_key_value_heads * c.head_dim, h, c.attention_bias)
            linear(f"{at}.self_attn.o_proj", h, heads * c.head_dim)
        else:
            qk = c.qk_nope_head_dim + c.qk_rope_head_dim
            linear(f"{at}.self_attn.q_a_proj", c.q_lora_rank, h)
            out[f"{at}.self_attn.q_a_layernorm.weight"] = (c.q_lora_rank,)
            linear(f"{at}.self_attn.q_b_proj", heads * qk, c.q_lora_rank)
            linear(f"{at}.self_attn.kv_a_proj_with_mqa", c.kv_lora_rank + c.qk_rope_head_dim, h)
            out[f"{at}.self_attn.kv_a_layernorm.weight"] = (c.kv_lora_rank,)
            linear(f"{at}.self_attn.kv_b_proj", heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
            linear(f"{at}.self_attn.o_proj", h, heads * c.v_head_dim)

        def mlp(name: str, width: int) -> None:
            linear(f"{name}.gate_proj", width, h)
            linear(f"{name}.up_proj", width, h)
            linear(f"{name}.down_proj", h, width)

        if c.is_moe(i):
            out[f"{at}.mlp.gate.weight"] = (c.num_experts, h)
            out[f"{at}.mlp.gate.e_score_correction_bias"] = (c.num_experts,)
            for e in range(c.num_experts):
                mlp(f"{at}.mlp.experts.{e}", c.moe_intermediate_size)
            if c.n_shared_experts:
                mlp(f"{at}.mlp.shared_experts", c.n_shared_experts * c.moe_intermediate_size)
        else:
            mlp(f"{at}.mlp", c.intermediate_size)
    out["model.norm.weight"] = (h,)
    if not c.tie_word_embeddings:
        out["lm_head.weight"] = (c.vocab_size, h)
    return out


def whole_model(c: Sizes, version: int) -> dict[str, torch.Tensor]:
    """A checkpoint. Every version has other numbers everywhere."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(getattr(torch, c.dtype)) for name, shape in shapes(c).items()}


def metas_of(whole: dict[str, torch.Tensor]) -> list[ParamMeta]:
    return [ParamMeta(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in whole.items()]


@dataclass(frozen=True)
class Ranks:
    """One rank of an engine."""

    tp: int = 0
    tp_size: int = 1
    ep: int = 0
    ep_size: int = 1
    experts: tuple[int, ...] | None = None
    """Which experts are here, in order; by default the part of rank `ep`, in line."""


def parameter(loader: Any, *shape: int, dtype: torch.dtype) -> nn.Parameter:
    made = nn.Parameter(torch.full(shape, float("nan"), dtype=dtype), requires_grad=False)
    made.weight_loader = loader
    return made


def default_weight_loader(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)


class Linear(nn.Module):
    """Rows, columns or nothing split over ranks; several of them one after the other in one parameter."""

    def __init__(
        self, c: Sizes, r: Ranks, outputs: list[int], inputs: int, *, split: str, copies: list[int] | None = None, bias: bool = False
    ):
        super().__init__()
        self.split, self.r = split, r
        self.copies = copies or [1] * len(outputs)
        """How many ranks share the same rows of each part."""
        part = r.tp_size if split == "rows" else 1
        self.sizes = [n * k // part for n, k in zip(outputs, self.copies, strict=True)]
        columns = inputs // (r.tp_size if split == "columns" else 1)
        dtype = getattr(torch, c.dtype)
        self.weight = parameter(self.weight_loader, sum(self.sizes), columns, dtype=dtype)
        if bias:
            self.bias = parameter(self.weight_loader, sum(self.sizes), dtype=dtype)
        else:
            self.bias = None
        if c.block:
            rows = sum(-(-n // c.block) for n in self.sizes)
            self.weight_scale_inv = parameter(self.scale_loader, rows, -(-columns // c.block), dtype=dtype)
        self.block = c.block

    def weight_loader(self, param, loaded_weight, shard_id: int = 0):
        data = param.data
        size = self.sizes[shard_id]
        data = data.narrow(0, sum(self.sizes[:shard_id]), size)
        if self.split == "rows":
            rank = self.r.tp // self.copies[shard_id]
            loaded_weight = loaded_weight.narrow(0, rank * size, size)
        elif self.split == "columns" and loaded_weight.dim() > 1:
            loaded_weight = loaded_weight.narrow(1, self.r.tp * data.shape[1], data.shape[1])
        assert data.shape == loaded_weight.shape
        data.copy_(loaded_weight)

    def scale_loader(self, param, loaded_weight, shard_id: int = 0):
        """A cut within a block leaves the block's scale on both sides."""
        b = self.block
        size = self.sizes[shard_id]
        data = param.data.narrow(0, sum(-(-n // b) for n in self.sizes[:shard_id]), -(-size // b))
        if self.split == "rows":
            first = self.r.tp // self.copies[shard_id] * size
            loaded_weight = loaded_weight[first // b : first // b + data.shape[0]]
        elif self.split == "columns":
            first = self.r.tp * self.weight.shape[1]
            loaded_weight = loaded_weight[:, first // b : first // b + data.shape[1]]
        data.copy_(loaded_weight)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class VocabParallel(nn.Module):
    def __init__(self, c: Sizes, r: Ranks, multiple: int = 8):
        super().__init__()
        padded = -(-c.vocab_size // (multiple * r.tp_size)) * multiple * r.tp_size
        self.c, self.r, self.rows = c, r, padded // r.tp_size
        self.weight = parameter(self.weight_loader, self.rows, c.hidden_size, dtype=getattr(torch, c.dtype))

    def weight_loader(self, param, loaded_weight):
        first = min(self.r.tp * self.rows, self.c.vocab_size)
        loaded_weight = loaded_weight.narrow(0, first, min(self.rows, self.c.vocab_size - first))
        param[: loaded_weight.shape[0]].data.copy_(loaded_weight)
        param[loaded_weight.shape[0] :].data.fill_(0)


class FusedExperts(nn.Module):
    def __init__(self, c: Sizes, r: Ranks):
        super().__init__()
        per = c.num_experts // r.ep_size
        self.here = list(r.experts if r.experts is not None else range(r.ep * per, r.ep * per + per))
        self.width = c.moe_intermediate_size // r.tp_size
        self.r = r
        dtype = getattr(torch, c.dtype)
        self.w13_weight = parameter(self.weight_loader, len(self.here), 2 * self.width, c.hidden_size, dtype=dtype)
        self.w2_weight = parameter(self.weight_loader, len(self.here), c.hidden_size, self.width, dtype=dtype)

    def weight_loader(self, param, loaded_weight, shard_id: str, expert_id: int):
        if expert_id not in self.here:
            return
        data = param.data[self.here.index(expert_id)]
        if shard_id == "w2":
            data.copy_(loaded_weight.narrow(1, self.r.tp * self.width, self.width))
        else:
            loaded_weight = loaded_weight.narrow(0, self.r.tp * self.width, self.width)
            data.narrow(0, 0 if shard_id == "w1" else self.width, self.width).copy_(loaded_weight)


class Experts(nn.Module):
    """Where the fused parameters are one level further down."""

    def __init__(self, c: Sizes, r: Ranks):
        super().__init__()
        self.routed_experts = FusedExperts(c, r)


class Norm(nn.Module):
    def __init__(self, c: Sizes, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), float("nan"), dtype=getattr(torch, c.dtype)), requires_grad=False)

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight)


class Attention(nn.Module):
    def __init__(self, c: Sizes, r: Ranks):
        super().__init__()
        self.c = c
        kv = c.num_key_value_heads
        copies = max(1, r.tp_size // kv)
        outputs = [c.num_attention_heads * c.head_dim, kv * c.head_dim, kv * c.head_dim]
        self.qkv_proj = Linear(c, r, outputs, c.hidden_size, split="rows", copies=[1, copies, copies], bias=c.attention_bias)
        self.o_proj = Linear(c, r, [c.hidden_size], c.num_attention_heads * c.head_dim, split="columns")

    def forward(self, x):
        c = self.c
        q, k, v = (t.view(*x.shape[:2], -1, c.head_dim).transpose(1, 2) for t in self.qkv_proj(x).split(self.qkv_proj.sizes, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    def __init__(self, c: Sizes, r: Ranks):
        super().__init__()
        qk, heads = c.qk_nope_head_dim + c.qk_rope_head_dim, c.num_attention_heads
        outputs = [c.q_lora_rank, c.kv_lora_rank + c.qk_rope_head_dim]
        self.fused_qkv_a_proj = Linear(c, r, outputs, c.hidden_size, split="")
        self.q_a_layernorm = Norm(c, c.q_lora_rank)
        self.q_b_proj = Linear(c, r, [heads * qk], c.q_lora_rank, split="rows")
        self.kv_a_layernorm = Norm(c, c.kv_lora_rank)
        self.kv_b_proj = Linear(c, r, [heads * (c.qk_nope_head_dim + c.v_head_dim)], c.kv_lora_rank, split="rows")
        self.o_proj = Linear(c, r, [c.hidden_size], heads * c.v_head_dim, split="columns")


class MLP(nn.Module):
    def __init__(self, c: Sizes, r: Ranks, width: int):
        super().__init__()
        self.gate_up_proj = Linear(c, r, [width, width], c.hidden_size, split="rows")
        self.down_proj = Linear(c, r, [c.hidden_size], width, split="columns")

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class MoE(nn.Module):
    def __init__(self, c: Sizes, r: Ranks, nested: bool):
        super().__init__()
        self.gate = Linear(replace(c, block=0), r, [c.num_experts], c.hidden_size, split="")
        self.gate.e_score_correction_bias = nn.Parameter(torch.full((c.num_experts,), float("nan")), requires_grad=False)
        self.experts = Experts(c, r) if nested else FusedExperts(c, r)
        if c.n_shared_experts:
            self.shared_experts = MLP(c, r, c.n_shared_experts * c.moe_intermediate_size)


class Layer(nn.Module):
    def __init__(self, c: Sizes, r: Ranks, i: int, nested: bool):
        super().__init__()
        plain = replace(c, block=0)
        self.input_layernorm, self.post_attention_layernorm = Norm(c, c.hidden_size), Norm(c, c.hidden_size)
        self.self_attn = (Attention if c.kv_lora_rank is None else LatentAttention)(plain, r)
        self.mlp = MoE(c, r, nested) if c.is_moe(i) else MLP(c, r, c.intermediate_size)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyServed(nn.Module):
    """A rank's part of such a model. What is dense can compute, too, if it is alone."""

    def __init__(self, c: Sizes, r: Ranks = Ranks(), *, nested: bool = True):
        super().__init__()
        self.c, self.nested = c, nested
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallel(c, r)
        self.model.layers = nn.ModuleList(Layer(c, r, i, nested) for i in range(c.num_hidden_layers))
        self.model.norm = Norm(c, c.hidden_size)
        self.lm_head = self.model.embed_tokens if c.tie_word_embeddings else VocabParallel(c, r)

    def forward(self, tokens):
        x = F.embedding(tokens, self.model.embed_tokens.weight)
        for layer in self.model.layers:
            x = layer(x)
        return F.linear(self.model.norm(x), self.lm_head.weight)[..., : self.c.vocab_size]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        stacked_params_mapping = [
            ("qkv_proj", "q_proj", 0),
            ("qkv_proj", "k_proj", 1),
            ("qkv_proj", "v_proj", 2),
            ("gate_up_proj", "gate_proj", 0),
            ("gate_up_proj", "up_proj", 1),
            ("fused_qkv_a_proj", "q_a_proj", 0),
            ("fused_qkv_a_proj", "kv_a_proj_with_mqa", 1),
        ]
        inner = "experts.routed_experts." if self.nested else "experts."
        expert_params_mapping = [
            (f"{inner}{'w2' if shard == 'w2' else 'w13'}_", f"experts.{e}.{name}.", e, shard)
            for e in range(self.c.num_experts)
            for shard, name in [("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")]
        ]
        params = dict(self.named_parameters())
        loaded = set()
        for name, loaded_weight in weights:
            if self.c.tie_word_embeddings and name.startswith("lm_head."):
                continue
            for param_name, weight_name, shard_id in stacked_params_mapping:
                if f".{weight_name}." not in name or "mlp.experts." in name:
                    continue
                name = name.replace(weight_name, param_name)
                param = params[name]
                param.weight_loader(param, loaded_weight, shard_id)
                break
            else:
                for param_name, weight_name, expert_id, shard_id in expert_params_mapping:
                    if weight_name not in name:
                        continue
                    name = name.replace(weight_name, param_name)
                    param = params[name]
                    param.weight_loader(param, loaded_weight, shard_id=shard_id, expert_id=expert_id)
                    break
                else:
                    param = params[name]
                    getattr(param, "weight_loader", default_weight_loader)(param, loaded_weight)
            loaded.add(name)
        return loaded
