"""`ModelSpec`: the numbers of a model that its tensors' names and shapes follow from, and how its family names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_ray.errors import PlanError

__all__ = ["FAMILIES", "Family", "Latent", "ModelSpec"]


@dataclass(frozen=True)
class Family:
    """Names, as in the checkpoints on Hugging Face's hub; below `model.layers.N.`"""

    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    expert: str = "mlp.experts.{}"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"
    expert_linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    centred_norms: bool = False
    """Whether norms' weights are stored less one."""
    predicts: bool = False
    """Whether its checkpoints have multi-token prediction as layers after the others, with `enorm`, `hnorm`, `eh_proj` and `shared_head`."""


_DENSE = Family()
_DEEPSEEK = Family(predicts=True)
_QWEN_MOE = Family(shared="mlp.shared_expert")

FAMILIES = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "qwen2_moe": _QWEN_MOE,
    "qwen3_moe": _QWEN_MOE,
    "qwen3_next": Family(shared="mlp.shared_expert", centred_norms=True),
    "mixtral": Family(router="block_sparse_moe.gate", expert="block_sparse_moe.experts.{}", expert_linears=("w1", "w3", "w2")),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
}
"""By `model_type` of the Hugging Face config. The parts that a dense model has not are not looked at."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention."""

    q_rank: int | None
    kv_rank: int
    nope: int
    """Of a head's key and query, what has no position in it."""
    rope: int
    value: int


@dataclass(frozen=True)
class ModelSpec:
    """Of the whole model, however it is split."""

    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    """Without padding."""
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    latent: Latent | None = None
    tied: bool = False
    """The output layer is the embedding."""
    predict: int = 0
    """Layers of multi-token prediction, after the others."""
    output_gate: bool = False
    """Attention has a gate of the query's size, whose rows are in `q_proj` after each head's query."""

    @classmethod
    def of(cls, hf: Any) -> ModelSpec:
        """From a Hugging Face config: as transformers has it, or as a mapping.

        Raises:
            PlanError: of a family that is not known, or it lacks a number.
        """

        def get(*names: str, default: Any = None) -> Any:
            for name in names:
                value = hf.get(name) if isinstance(hf, Mapping) else getattr(hf, name, None)
                if value is not None:
                    return value
            return default

        def need(name: str) -> int:
            if (value := get(name)) is None:
                raise PlanError(f"the config of this {kind} has no {name}")
            return int(value)

        kind = get("model_type", default="model without model_type")
        if kind not in FAMILIES:
            raise PlanError(f"{kind!r} is none of the known families: {', '.join(FAMILIES)}")
        hidden, heads = need("hidden_size"), need("num_attention_heads")
        latent = None
        if get("kv_lora_rank"):
            latent = Latent(
                get("q_lora_rank"), need("kv_lora_rank"), need("qk_nope_head_dim"), need("qk_rope_head_dim"), need("v_head_dim")
            )
        experts = int(get("n_routed_experts", "num_experts", "num_local_experts", default=0))
        expert_ffn = int(get("moe_intermediate_size", "intermediate_size", default=0)) if experts else 0
        return cls(
            FAMILIES[kind],
            hidden,
            need("num_hidden_layers"),
            heads,
            int(get("num_key_value_heads", default=heads)),
            int(get("head_dim", default=hidden // heads)),
            need("intermediate_size"),
            need("vocab_size"),
            experts,
            expert_ffn,
            int(get("shared_expert_intermediate_size", default=int(get("n_shared_experts", default=0)) * expert_ffn)),
            latent,
            bool(get("tie_word_embeddings", default=False)),
            int(get("num_nextn_predict_layers", default=0)),
            kind == "qwen3_next",
        )

    @property
    def embedding_names(self) -> tuple[str, ...]:
        """All names of the embedding; the first is what it is, the others are the same tensor."""
        copies = (f"model.layers.{self.layers + i}.embed_tokens.weight" for i in range(self.predict))
        return ("model.embed_tokens.weight", *copies, *(self.output_names if self.tied else ()))

    @property
    def output_names(self) -> tuple[str, ...]:
        """All names of the output layer, tied or not."""
        return "lm_head.weight", *(f"model.layers.{self.layers + i}.shared_head.head.weight" for i in range(self.predict))

    @property
    def aliases(self) -> dict[str, str]:
        """Names that are another one's very tensor. The same on every rank."""
        names = (self.embedding_names,) if self.tied else (self.embedding_names, self.output_names)
        return {other: first for first, *others in names for other in others}
