"""Tensors of known kinds of models, from a Hugging Face config: their names and shapes, and how parallel layouts cut them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_ray.errors import ConfigError
from mooncake_ray.weights.meta import ITEMSIZE, ParamMeta

__all__ = ["MODELS", "Tensor", "config_of", "tensors_of"]

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Tensor:
    """A tensor, and what of it matters to a layout."""

    meta: ParamMeta
    axis: int = -1
    """The dimension that tensor parallelism cuts; -1: everybody has all of it."""
    part: str = ""
    """"q", "k" or "v", which are cut by heads; "first" and "last" of the model, before and after its layers."""
    expert: int = -1


_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": False}
_QWEN3_MOE = {
    **_QWEN3, "model_type": "qwen3_moe", "num_experts": 128, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "num_key_value_heads": 4,
}  # fmt: skip
_MLA = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_shared_experts": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip


def _sizes(base: Config, hidden: int, layers: int, heads: int, ffn: int, **more: Any) -> Config:
    return {
        **base, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": ffn, **more
    }  # fmt: skip


MODELS: Mapping[str, Config] = {
    "kimi-k2": {
        **_MLA, "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1,
    },
    "deepseek-v3": {
        **_MLA, "vocab_size": 129280, "num_attention_heads": 128, "n_routed_experts": 256, "first_k_dense_replace": 3,
    },
    "qwen3-235b-a22b": _sizes(_QWEN3_MOE, 4096, 94, 64, 12288, moe_intermediate_size=1536),
    "qwen3-30b-a3b": _sizes(_QWEN3_MOE, 2048, 48, 32, 6144, moe_intermediate_size=768),
    "qwen3-32b": _sizes(_QWEN3, 5120, 64, 64, 25600),
    "qwen3-8b": _sizes(_QWEN3, 4096, 36, 32, 12288),
    "qwen3-0.6b": _sizes(_QWEN3, 1024, 28, 16, 3072, tie_word_embeddings=True),
    "llama-3.1-70b": _sizes(_LLAMA, 8192, 80, 64, 28672),
    "llama-3.1-8b": _sizes(_LLAMA, 4096, 32, 32, 14336),
}  # fmt: skip
"""By name, what matters of their config.json."""


def config_of(model: str) -> Config:
    """The config of a built-in model, or of a config.json (or the directory it is in).

    Raises:
        ConfigError: there is no such model, or the file is not a model's config.
    """
    if model in MODELS:
        return MODELS[model]
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.is_file():
        raise ConfigError(f"there is no model {model!r}: neither a config.json, nor one of {', '.join(MODELS)}")
    try:
        config = json.loads(path.read_text())
    except ValueError as e:
        raise ConfigError(f"{path}: {e}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(f"{path}: not a model's config: it has no model_type")
    return config


def tensors_of(config: Config, dtype: str | None = None) -> list[Tensor]:
    """All of a model's tensors, in the order of its layers.

    Args:
        dtype: of weights; by default the config's, or bfloat16.

    Raises:
        ConfigError: the model is of an unknown type, or its config lacks something.
    """
    kind = config.get("model_type")
    attention = _ATTENTIONS.get(kind)
    if attention is None:
        raise ConfigError(f"models of type {kind!r} cannot be described; there are {', '.join(sorted(_ATTENTIONS))}")
    dtype = dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in ITEMSIZE:
        raise ConfigError(f"dtype {dtype!r} is none of {', '.join(ITEMSIZE)}")
    try:
        return list(_tensors(config, dtype, attention))
    except KeyError as e:
        raise ConfigError(f"the config of this {kind} has no {e.args[0]}") from None


def _tensors(config: Config, dtype: str, attention: Callable[[Config, str, str], Iterator[Tensor]]) -> Iterator[Tensor]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield Tensor(ParamMeta("model.embed_tokens.weight", dtype, (vocab, hidden)), 0, "first")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield Tensor(ParamMeta(prefix + "input_layernorm.weight", dtype, (hidden,)))
        yield from attention(config, prefix + "self_attn.", dtype)
        yield Tensor(ParamMeta(prefix + "post_attention_layernorm.weight", dtype, (hidden,)))
        yield from _mlp(config, layer, prefix + "mlp.", dtype)
    yield Tensor(ParamMeta("model.norm.weight", dtype, (hidden,)), -1, "last")
    if not config.get("tie_word_embeddings"):
        yield Tensor(ParamMeta("lm_head.weight", dtype, (vocab, hidden)), 0, "last")


def _grouped(config: Config, prefix: str, dtype: str) -> Iterator[Tensor]:
    """Attention whose heads share keys and values in groups."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    groups, size = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    bias = config.get("attention_bias", config["model_type"] == "qwen2")
    for part, n in (("q", heads), ("k", groups), ("v", groups)):
        yield Tensor(ParamMeta(f"{prefix}{part}_proj.weight", dtype, (n * size, hidden)), 0, part)
        if bias:
            yield Tensor(ParamMeta(f"{prefix}{part}_proj.bias", dtype, (n * size,)), 0, part)
    yield Tensor(ParamMeta(f"{prefix}o_proj.weight", dtype, (hidden, heads * size)), 1)
    if config["model_type"].startswith("qwen3"):
        for part in "qk":
            yield Tensor(ParamMeta(f"{prefix}{part}_norm.weight", dtype, (size,)))


def _latent(config: Config, prefix: str, dtype: str) -> Iterator[Tensor]:
    """Multi-head latent attention."""
    hidden, heads, q_rank, kv_rank = (config[k] for k in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    if q_rank:
        yield Tensor(ParamMeta(prefix + "q_a_proj.weight", dtype, (q_rank, hidden)))
        yield Tensor(ParamMeta(prefix + "q_a_layernorm.weight", dtype, (q_rank,)))
        yield Tensor(ParamMeta(prefix + "q_b_proj.weight", dtype, (heads * (nope + rope), q_rank)), 0)
    else:
        yield Tensor(ParamMeta(prefix + "q_proj.weight", dtype, (heads * (nope + rope), hidden)), 0)
    yield Tensor(ParamMeta(prefix + "kv_a_proj_with_mqa.weight", dtype, (kv_rank + rope, hidden)))
    yield Tensor(ParamMeta(prefix + "kv_a_layernorm.weight", dtype, (kv_rank,)))
    yield Tensor(ParamMeta(prefix + "kv_b_proj.weight", dtype, (heads * (nope + value), kv_rank)), 0)
    yield Tensor(ParamMeta(prefix + "o_proj.weight", dtype, (hidden, heads * value)), 1)


def _mlp(config: Config, layer: int, prefix: str, dtype: str) -> Iterator[Tensor]:
    hidden = config["hidden_size"]
    latent = _ATTENTIONS[config["model_type"]] is _latent
    experts = _experts(config, layer)
    if not experts:
        yield from _gated(prefix, dtype, hidden, config["intermediate_size"])
        return
    yield Tensor(ParamMeta(prefix + "gate.weight", dtype, (experts, hidden)))
    if latent:
        yield Tensor(ParamMeta(prefix + "gate.e_score_correction_bias", "float32", (experts,)))
        if shared := config.get("n_shared_experts"):
            yield from _gated(prefix + "shared_experts.", dtype, hidden, shared * config["moe_intermediate_size"])
    for expert in range(experts):
        yield from _gated(f"{prefix}experts.{expert}.", dtype, hidden, config["moe_intermediate_size"], expert)


def _experts(config: Config, layer: int) -> int:
    """How many the layer has; 0 for a dense one."""
    if _ATTENTIONS[config["model_type"]] is _latent:
        sparse = layer >= config["first_k_dense_replace"] and layer % config.get("moe_layer_freq", 1) == 0
        return config["n_routed_experts"] if sparse else 0
    if "num_experts" not in config:
        return 0
    sparse = layer not in config.get("mlp_only_layers", ()) and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    return config["num_experts"] if sparse else 0


def _gated(prefix: str, dtype: str, hidden: int, ffn: int, expert: int = -1) -> Iterator[Tensor]:
    yield Tensor(ParamMeta(prefix + "gate_proj.weight", dtype, (ffn, hidden)), 0, "", expert)
    yield Tensor(ParamMeta(prefix + "up_proj.weight", dtype, (ffn, hidden)), 0, "", expert)
    yield Tensor(ParamMeta(prefix + "down_proj.weight", dtype, (hidden, ffn)), 1, "", expert)


_ATTENTIONS: Mapping[str | None, Callable[[Config, str, str], Iterator[Tensor]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"), _grouped),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), _latent),
}
