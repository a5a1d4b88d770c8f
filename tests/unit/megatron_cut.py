"""A whole model in Hugging Face's tensors, and what Megatron makes of it on any rank, as documented. It joins and splits, and knows no boxes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


class Cut:
    def __init__(
        self,
        hf: dict,
        stages: Sequence[Sequence[range]],
        *,
        tp=1,
        ep=1,
        etp=1,
        experts="te",
        fused_norms=True,
        pad=1,
        mtp=0,
        gate=False,
        duplicated=True,
    ):
        """
        Args:
            hf: Config; `hidden_size` can be divided by tp.
            stages: Layers of each stage's virtual stages.
            experts: "te", "sequential" or "grouped" (the old one, with all experts in one tensor).
            fused_norms: Whether norms are in the linear layer after them.
            gate: Whether attention has an output gate.
            duplicated: Whether MLA's down projections are on every rank.
        """
        self.hf, self.stages, self.tp, self.ep, self.etp, self.mtp = hf, stages, tp, ep, etp, mtp
        self.experts, self.fused_norms, self.pad, self.gate, self.duplicated = experts, fused_norms, pad, gate, duplicated
        self.hidden, self.vocab, self.tied = hf["hidden_size"], hf["vocab_size"], hf["tie_word_embeddings"]
        self.deepseek = hf["model_type"] == "deepseek_v3"
        self.whole: dict[str, torch.Tensor] = {}
        self.count = itertools.count(1)
        embedding = self.new("model.embed_tokens.weight", self.vocab, self.hidden)
        output = self.whole["lm_head.weight"] = embedding if self.tied else self.new("lm_head.weight", self.vocab, self.hidden)
        for i in range(mtp):
            name = f"model.layers.{hf['num_hidden_layers'] + i}."
            self.whole |= {f"{name}embed_tokens.weight": embedding, f"{name}shared_head.head.weight": output}

    def new(self, name: str, *shape: int, dtype=torch.bfloat16) -> torch.Tensor:
        """The same one for the same name. No two values in it are neighbours'."""
        if name not in self.whole:
            generator = torch.Generator().manual_seed(next(self.count))
            self.whole[name] = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16).to(dtype)
        return self.whole[name]

    def rank(self, tp_rank: int, pp_rank: int, ep_rank: int, etp_rank: int) -> list[dict[str, torch.Tensor]]:
        """What that rank has: for each virtual stage its tensors, by Megatron's names."""
        self.at = tp_rank, ep_rank, etp_rank
        out = []
        for v, layers in enumerate(self.stages[pp_rank]):
            first = v == 0 and pp_rank == 0
            last = v == len(self.stages[pp_rank]) - 1 and pp_rank == len(self.stages) - 1
            here = {}
            if first or (last and self.mtp):
                here["embedding.word_embeddings.weight"] = self.vocabulary("model.embed_tokens.weight")
            for i, layer in enumerate(layers):
                here |= {f"decoder.layers.{i}.{k}": t for k, t in self.layer(f"model.layers.{layer}.").items()}
            if last:
                here |= self.last(first)
            out.append({k: t.clone() for k, t in here.items()})
        return out

    def last(self, first: bool) -> dict[str, torch.Tensor]:
        here = {"decoder.final_layernorm.weight": self.new("model.norm.weight", self.hidden)}
        if not (self.tied and first):
            here["output_layer.weight"] = self.vocabulary("lm_head.weight")
        for i in range(self.mtp):
            own, name = f"mtp.layers.{i}.", f"model.layers.{self.hf['num_hidden_layers'] + i}."
            here[f"{own}enorm.weight"] = self.new(f"{name}enorm.weight", self.hidden)
            here[f"{own}hnorm.weight"] = self.new(f"{name}hnorm.weight", self.hidden)
            here[f"{own}final_layernorm.weight"] = self.new(f"{name}shared_head.norm.weight", self.hidden)
            here[f"{own}eh_proj.weight"] = self.mine(self.new(f"{name}eh_proj.weight", self.hidden, 2 * self.hidden))
            here |= {f"{own}transformer_layer.{k}": t for k, t in self.layer(name).items()}
        return here

    def mine(self, whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return whole.chunk(self.tp, dim)[self.at[0]]

    def vocabulary(self, name: str) -> torch.Tensor:
        step = self.pad * self.tp
        padding = torch.full((-self.vocab % step, self.hidden), -1, dtype=torch.bfloat16)
        return self.mine(torch.cat([self.new(name, self.vocab, self.hidden), padding]))

    def layer(self, hf: str) -> dict[str, torch.Tensor]:
        here = self.latent(f"{hf}self_attn.") if "kv_lora_rank" in self.hf else self.attention(f"{hf}self_attn.")
        own = {f"self_attention.{k}": t for k, t in here.items()}
        before = (
            "self_attention.linear_qkv.layer_norm_weight"
            if self.fused_norms and "kv_lora_rank" not in self.hf
            else "input_layernorm.weight"
        )
        own[before] = self.new(f"{hf}input_layernorm.weight", self.hidden)
        dense = not self.hf.get("num_experts")
        after = "mlp.linear_fc1.layer_norm_weight" if self.fused_norms and dense else "pre_mlp_layernorm.weight"
        own[after] = self.new(f"{hf}post_attention_layernorm.weight", self.hidden)
        return own | (self.mlp("mlp.", f"{hf}mlp.", self.hf["intermediate_size"]) if dense else self.moe(f"{hf}mlp."))

    def attention(self, hf: str) -> dict[str, torch.Tensor]:
        heads, groups, dim = self.hf["num_attention_heads"], self.hf["num_key_value_heads"], self.hf["head_dim"]
        out = {}
        for kind, columns in (("weight", (self.hidden,)), ("bias", ())):
            q = self.new(f"{hf}q_proj.{kind}", heads * dim * (2 if self.gate else 1), *columns)
            k, v = (self.new(f"{hf}{n}_proj.{kind}", groups * dim, *columns).view(groups, dim, -1) for n in "kv")
            if self.gate:
                q, g = q.view(groups, heads // groups, 2, dim, -1).unbind(2)
                q = torch.cat([q.reshape(groups, heads // groups * dim, -1), g.reshape(groups, heads // groups * dim, -1)], 1)
            else:
                q = q.view(groups, heads // groups * dim, -1)
            out[f"linear_qkv.{kind}"] = self.mine(torch.cat([q, k, v], 1).reshape(-1, *columns))
        for n in "qk":
            out[f"{n}_layernorm.weight"] = self.new(f"{hf}{n}_norm.weight", dim)
        out["linear_proj.weight"] = self.mine(self.new(f"{hf}o_proj.weight", self.hidden, heads * dim), 1)
        return out

    def latent(self, hf: str) -> dict[str, torch.Tensor]:
        heads, q_rank, kv_rank = (self.hf[k] for k in ("num_attention_heads", "q_lora_rank", "kv_lora_rank"))
        nope, rope, value = (self.hf[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        down = (lambda t: t) if self.duplicated else self.mine
        norm = "linear_{}_up_proj.layer_norm_weight" if self.fused_norms else "{}_layernorm.weight"
        out = {"linear_proj.weight": self.mine(self.new(f"{hf}o_proj.weight", self.hidden, heads * value), 1)}
        if q_rank:
            out["linear_q_down_proj.weight"] = down(self.new(f"{hf}q_a_proj.weight", q_rank, self.hidden))
            out["linear_q_up_proj.weight"] = self.mine(self.new(f"{hf}q_b_proj.weight", heads * (nope + rope), q_rank))
            out[norm.format("q")] = self.new(f"{hf}q_a_layernorm.weight", q_rank)
        else:
            out["linear_q_proj.weight"] = self.mine(self.new(f"{hf}q_proj.weight", heads * (nope + rope), self.hidden))
        out["linear_kv_down_proj.weight"] = down(self.new(f"{hf}kv_a_proj_with_mqa.weight", kv_rank + rope, self.hidden))
        out["linear_kv_up_proj.weight"] = self.mine(self.new(f"{hf}kv_b_proj.weight", heads * (nope + value), kv_rank))
        out[norm.format("kv")] = self.new(f"{hf}kv_a_layernorm.weight", kv_rank)
        return out

    def mlp(self, own: str, hf: str, ffn: int, parts: int | None = None, part: int | None = None) -> dict[str, torch.Tensor]:
        parts, part = (self.tp, self.at[0]) if parts is None else (parts, part)
        gate, up = (self.new(f"{hf}{n}_proj.weight", ffn, self.hidden).chunk(parts)[part] for n in ("gate", "up"))
        down = self.new(f"{hf}down_proj.weight", self.hidden, ffn).chunk(parts, 1)[part]
        return {f"{own}linear_fc1.weight": torch.cat([gate, up]), f"{own}linear_fc2.weight": down}

    def moe(self, hf: str) -> dict[str, torch.Tensor]:
        experts = self.hf["num_experts"]
        out = {"mlp.router.weight": self.new(f"{hf}gate.weight", experts, self.hidden)}
        if self.deepseek:
            out["mlp.router.expert_bias"] = self.new(f"{hf}gate.e_score_correction_bias", experts, dtype=torch.float32)
            out |= self.mlp("mlp.shared_experts.", f"{hf}shared_experts.", self.hf["n_shared_experts"] * self.hf["moe_intermediate_size"])
        elif self.hf.get("shared_expert_intermediate_size"):
            out |= self.mlp("mlp.shared_experts.", f"{hf}shared_expert.", self.hf["shared_expert_intermediate_size"])
            out["mlp.shared_experts.gate_weight"] = self.new(f"{hf}shared_expert_gate.weight", 1, self.hidden)
        each = []
        for expert in range(experts):
            own = self.mlp("", f"{hf}experts.{expert}.", self.hf["moe_intermediate_size"], self.etp, self.at[2])
            if expert * self.ep // experts == self.at[1]:
                each.append(own)
        if self.experts == "grouped":
            out["mlp.experts.weight1"] = torch.stack([e["linear_fc1.weight"].t() for e in each]).reshape(self.hidden, -1)
            out["mlp.experts.weight2"] = torch.stack([e["linear_fc2.weight"].t() for e in each]).reshape(-1, self.hidden)
            return out
        name = "mlp.experts.{1}{0}" if self.experts == "te" else "mlp.experts.local_experts.{0}.{1}"
        return out | {name.format(i, k): t for i, e in enumerate(each) for k, t in e.items()}


def as_module(tensors: dict[str, torch.Tensor], wrapped: str = "") -> torch.nn.Module:
    """A tree of modules with these tensors as parameters, and `expert_bias` as a buffer, at these names."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = (wrapped + name).split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = at._modules[part]
        if last == "expert_bias":
            at.register_buffer(last, tensor)
        else:
            at.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    return root
