"""What a Megatron rank says it holds, against megatron-core itself and against transformers.

megatron-core says which element of the whole model every element on every rank is (its `sharded_state_dict`). This module's `to_transformers`
turns whole tensors into Hugging Face's, and transformers' logits say that it does so rightly.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")
import megatron_models as mm
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.layouts.megatron import MegatronSource
from mooncake_ray.weights.layouts.ranks import Ranks
from mooncake_ray.weights.layouts.spec import FAMILIES, ModelSpec
from mooncake_ray.weights.layouts.stages import layers_of_stages
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.placement import Fragment, Placement
from mooncake_ray.weights.plan import deliver_plan, publish_plan
from mooncake_ray.weights.shard import views

VOCAB, PADDED = 61, 128

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 48, "vocab_size": VOCAB}
SIZES |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "attn_implementation": "eager", "pad_token_id": 0}
MOE = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
ROUTED = {"moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2}
ROUTED |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}

HF = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=4, head_dim=8),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=12, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_key_value_heads=4, head_dim=8, **MOE),
    "qwen3_next": Qwen3NextConfig(
        **SIZES, num_key_value_heads=4, head_dim=8, shared_expert_intermediate_size=40, layer_types=["full_attention"] * 4, **MOE
    ),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, num_key_value_heads=8, shared_expert_intermediate_size=40, **MOE),
    "deepseek_v3": DeepseekV3Config(
        **SIZES, **LATENT, **ROUTED, num_key_value_heads=8, first_k_dense_replace=1, num_nextn_predict_layers=1
    ),
}


def in_megatron(name: str) -> dict:
    """megatron's config of the same model."""
    hf = HF[name]
    out = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 8, "ffn_hidden_size": 48, "tied": hf.tie_word_embeddings}
    out |= {
        "layernorm_epsilon": 1e-5,
        "add_qkv_bias": name.startswith("qwen2"),
        "qk_layernorm": name not in ("llama", "qwen2", "qwen2_moe"),
    }
    if name != "deepseek_v3":
        out |= {"num_query_groups": hf.num_key_value_heads, "kv_channels": getattr(hf, "head_dim", None) or 4}
    if name.startswith("qwen") and name not in ("qwen2", "qwen3"):
        out |= {"num_moe_experts": 8, "moe_ffn_hidden_size": 16, "moe_router_topk": 2}
    if name == "qwen3_next":
        out |= {"attention_output_gate": True, "rotary": 0.25}
    if name in ("qwen2_moe", "qwen3_next"):
        out |= {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True}
    if name == "deepseek_v3":
        out |= {
            "mla": True,
            "mtp": 1,
            "num_moe_experts": 8,
            "moe_ffn_hidden_size": 16,
            "moe_router_topk": 2,
            "moe_layer_freq": [0, 1, 1, 1],
        }
        out |= {"q_lora_rank": 16, "kv_lora_rank": 24, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 12, "rope_type": "rope"}
        out |= {"moe_shared_expert_intermediate_size": 32, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
        out |= {"moe_router_topk_scaling_factor": 2.5, "rotary_base": 10000.0, "moe_router_pre_softmax": True}
    return out


def to_transformers(name: str, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From megatron's whole tensors to those of a Hugging Face checkpoint."""
    hf = HF[name]
    out = {
        "model.embed_tokens.weight": whole["embedding.word_embeddings.weight"][:VOCAB],
        "model.norm.weight": whole["decoder.final_layernorm.weight"],
    }
    output = whole["embedding.word_embeddings.weight"] if hf.tie_word_embeddings else whole["output_layer.weight"]
    out["lm_head.weight"] = output[:VOCAB]
    layers: dict[int, dict[str, torch.Tensor]] = {i: {} for i in range(5)}
    for key, value in whole.items():
        parts = key.split(".")
        if key.startswith("mtp.layers.0.transformer_layer."):
            layers[4][".".join(parts[4:])] = value
        elif key.startswith("mtp.layers.0."):
            own = key.removeprefix("mtp.layers.0.").replace("final_layernorm", "shared_head.norm")
            out[f"model.layers.4.{own}"] = value
        elif key.startswith("decoder.layers.") and parts[2].isdigit():
            layers[int(parts[2])][".".join(parts[3:])] = value
        elif key.startswith("decoder.layers."):
            for i, one in enumerate(value):
                layers[i][".".join(parts[2:])] = one
    if layers[4]:
        out["model.layers.4.embed_tokens.weight"] = out["model.embed_tokens.weight"]
        out["model.layers.4.shared_head.head.weight"] = out["lm_head.weight"]
    for i, tensors in layers.items():
        for key, value in tensors.items():
            out |= {f"model.layers.{i}.{k}": v for k, v in in_layer(hf, key, value).items()}
    return out


def in_layer(hf, key: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    attention = {
        "linear_proj.weight": "o_proj.weight",
        "linear_q_down_proj.weight": "q_a_proj.weight",
        "linear_q_up_proj.weight": "q_b_proj.weight",
        "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
        "linear_kv_up_proj.weight": "kv_b_proj.weight",
        "kv_layernorm.weight": "kv_a_layernorm.weight",
        "k_layernorm.weight": "k_norm.weight",
        "q_layernorm.weight": "q_a_layernorm.weight" if hf.model_type == "deepseek_v3" else "q_norm.weight",
    }
    shared = "mlp.shared_experts" if hf.model_type == "deepseek_v3" else "mlp.shared_expert"
    if key in ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"):
        return {"input_layernorm.weight": value}
    if key in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"):
        return {"post_attention_layernorm.weight": value}
    if key == "self_attention.linear_qkv.weight" and hf.model_type == "qwen3_next":
        q, gate, k, v = value.view(4, 6, 8, 32).split([2, 2, 1, 1], 1)  # 4 groups of 2 heads of 8
        q = torch.stack([q, gate], 2)
        return {f"self_attn.{n}_proj.weight": t.reshape(-1, 32) for n, t in zip("qkv", (q, k, v), strict=True)}
    if key.startswith("self_attention.linear_qkv."):
        groups, dim = hf.num_key_value_heads, getattr(hf, "head_dim", None) or 4
        q, k, v = value.view(groups, hf.num_attention_heads // groups + 2, dim, *value.shape[1:]).split(
            [hf.num_attention_heads // groups, 1, 1], 1
        )
        kind = key.rpartition(".")[2]
        return {f"self_attn.{n}_proj.{kind}": t.reshape(-1, *value.shape[1:]) for n, t in zip("qkv", (q, k, v), strict=True)}
    if key.startswith("self_attention."):
        return {f"self_attn.{attention[key.removeprefix('self_attention.')]}": value}
    if key == "mlp.router.weight":
        return {"mlp.gate.weight": value}
    if key == "mlp.router.expert_bias":
        return {"mlp.gate.e_score_correction_bias": value}
    if key == "mlp.shared_experts.gate_weight":
        return {"mlp.shared_expert_gate.weight": value}
    if ".experts." in key:
        return {n.replace("mlp.", f"mlp.experts.{e}.", 1): t for e, one in enumerate(value) for n, t in mlp(key, one, "mlp").items()}
    return mlp(key, value, shared if "shared" in key else "mlp")


def mlp(key: str, value: torch.Tensor, prefix: str) -> dict[str, torch.Tensor]:
    if key.endswith("linear_fc2.weight"):
        return {f"{prefix}.down_proj.weight": value}
    assert key.endswith("linear_fc1.weight"), key
    gate, up = value.chunk(2)
    return {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}


def spec_of(name: str):
    """What a source is given: the config, but for norms of Qwen3-Next, which megatron can have less one only on a GPU."""
    return replace(ModelSpec.of(HF[name]), family=FAMILIES["qwen3_moe"]) if name == "qwen3_next" else HF[name]


def whole_model(name: str) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    with mm.rank_of(0, 1):
        mm.fill(mm.chunks(VOCAB, **in_megatron(name)), whole, PADDED)
    return whole


def check(source: MegatronSource, expected: dict[str, torch.Tensor], seen: dict[str, torch.Tensor]) -> None:
    """Every fragment has its box's values, bit for bit. Marks what it covers."""
    placement = Placement.of("r", source.fragments())
    assert len(placement) == len(source.fragments()), "no empty box, for which there would be no need"
    for i, view in enumerate(views(placement, source.buffers())):
        meta = placement.metas[placement.tensor[i]]
        d, n = placement.lo.shape[1], len(meta.shape)
        at = tuple(slice(a, b) for a, b in zip(placement.lo[i, d - n :].tolist(), placement.hi[i, d - n :].tolist(), strict=True))
        assert meta.shape == expected[meta.name].shape, meta.name
        assert torch.equal(view.reshape(view.shape[d - n :]), expected[meta.name][at]), meta.name
        seen.setdefault(meta.name, torch.zeros(meta.shape, dtype=torch.bool))[at] = True


DENSE = [
    ({"tp": 2}, {}),
    ({"tp": 8}, {}),  # fewer groups than ranks
    ({"tp": 2, "pp": 2, "cp": 2}, {}),
    ({"tp": 4, "pp": 2, "vpp": 2}, {}),
    ({"pp": 2}, {"num_layers_in_first_pipeline_stage": 1}),
    ({"pp": 3}, {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}),
    ({"pp": 3, "tp": 2}, {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}),
    ({"pp": 2, "vpp": 2}, {"pipeline_model_parallel_layout": "Et|t|tt|L"}),
]
EXPERTS = [
    ({"ep": 4}, {}),
    ({"tp": 2, "ep": 2, "etp": 1}, {}),
    ({"tp": 4, "ep": 2, "etp": 2, "pp": 2}, {}),
    ({"tp": 1, "ep": 8, "etp": 1, "pp": 2, "vpp": 2}, {}),
    ({"tp": 4, "ep": 1, "etp": 4}, {}),
    ({"tp": 2, "ep": 4, "etp": 1, "pp": 4}, {}),
]
GROUPED = {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True}
CASES = [(n, *layout) for n in ("llama", "qwen2", "qwen3") for layout in DENSE]
CASES += [(n, *layout) for n in ("qwen3_moe", "qwen2_moe", "deepseek_v3") for layout in EXPERTS]
CASES += [("qwen3_moe", layout, GROUPED) for layout, _ in EXPERTS]
CASES += [("qwen3_next", layout, {}) for layout in ({"tp": 2, "ep": 4, "etp": 1}, {"tp": 8, "pp": 2})]
IDS = ["-".join([n, *(f"{a}{b}" for a, b in layout.items()), *(str(v) for v in more.values())]) for n, layout, more in CASES]


@pytest.mark.parametrize(("name", "layout", "more"), CASES, ids=IDS)
def test_boxes_are_megatrons(name, layout, more):
    whole = whole_model(name)
    expected = to_transformers(name, whole)
    world = layout.get("pp", 1) * max(
        layout.get("tp", 1) * layout.get("cp", 1), layout.get("ep", 1) * layout.get("etp", layout.get("tp", 1))
    )
    seen: dict[str, torch.Tensor] = {}
    for rank in range(world):
        with mm.rank_of(rank, world, **layout):
            own = more | ({"context_parallel_size": layout["cp"]} if "cp" in layout else {})
            models = mm.chunks(-(-VOCAB // layout.get("tp", 1)) * layout.get("tp", 1), vpp=layout.get("vpp"), **in_megatron(name), **own)
            mm.fill(models, whole, PADDED)
            check(MegatronSource(models, spec_of(name)), expected, seen)
    assert seen.keys() == expected.keys()
    assert all(bool(s.all()) for s in seen.values())


@pytest.mark.parametrize("name", HF)
def test_logits_are_transformers(name):
    """So `to_transformers` is right, which the other tests compare with."""
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    whole = whole_model(name)
    with mm.rank_of(0, 1), torch.no_grad():
        [model] = mm.chunks(VOCAB, **in_megatron(name) | {"mtp": 0})
        mm.fill([model], whole, PADDED)
        ours = model(tokens, torch.arange(9).expand(2, 9), None)
    reference = AutoModelForCausalLM.from_config(HF[name]).eval()
    state = {k: v for k, v in to_transformers(name, whole).items() if not k.startswith("model.layers.4.")}
    if name == "qwen3_next":
        state = {k: v - 1 if "norm" in k else v for k, v in state.items()}
    reference.load_state_dict(fused(state, reference.state_dict().keys()))
    with torch.no_grad():
        theirs = reference(tokens).logits
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


def fused(state: dict[str, torch.Tensor], names) -> dict[str, torch.Tensor]:
    """As transformers keeps experts in memory: in one tensor."""
    out = {k: v for k, v in state.items() if ".experts." not in k}
    for name in names - out.keys():
        prefix, _, kind = name.rpartition(".")
        each = [
            [state[f"{prefix}.{e}.{p}.weight"] for p in (["gate_proj", "up_proj"] if "gate" in kind else ["down_proj"])] for e in range(8)
        ]
        out[name] = torch.stack([torch.cat(parts) for parts in each])
    return out


@pytest.mark.parametrize(
    ("name", "layout"), [("qwen3", {"tp": 4, "pp": 2, "vpp": 2}), ("deepseek_v3", {"tp": 2, "ep": 2, "etp": 1, "pp": 2})]
)
def test_all_ranks_are_a_source_of_the_whole(name, layout):
    """The planner's proof: no two boxes overlap but as replicas, and every element of Hugging Face's model is there."""
    expected = to_transformers(name, whole_model(name))
    metas = {n: ParamMeta(n, "float32", tuple(t.shape)) for n, t in expected.items()}
    parts = []
    for rank in range(8):
        with mm.rank_of(rank, 8, **layout):
            models = mm.chunks(64, vpp=layout.get("vpp"), **in_megatron(name))
            source = MegatronSource(models, HF[name])
            parts.append(Placement.of(f"t/{rank}", source.fragments()))
    publication = publish_plan(Placement.join(parts))
    for wanted in (expected.keys(), expected.keys() - source.aliases.keys()):
        target = [Fragment(metas[n], (0,) * len(m), m, n, 0, (0,) * len(m)) for n in wanted for m in [metas[n].shape]]
        deliver_plan(publication, Placement.of("e/0", target), ignore=source.aliases)


def test_wrapped_for_training():
    """In bfloat16, with parameters in the data-parallel wrapper's own buffers, as a trainer has them; routers' biases in float32."""
    whole = whole_model("deepseek_v3")
    expected = {k: v if "bias" in k else v.bfloat16() for k, v in to_transformers("deepseek_v3", whole).items()}
    seen: dict[str, torch.Tensor] = {}
    for rank in range(4):
        with mm.rank_of(rank, 4, tp=2, ep=2, etp=1):
            models = mm.chunks(62, bf16=True, params_dtype=torch.bfloat16, **in_megatron("deepseek_v3"))
            wrapped = [mm.as_trained(model) for model in models]
            assert next(wrapped[0].parameters()).untyped_storage().nbytes() > 4096, "one buffer for many"
            source = MegatronSource(wrapped, HF["deepseek_v3"])
            mm.fill(models, whole, PADDED)
            check(source, expected, seen)
    assert seen.keys() == expected.keys()
    assert all(bool(s.all()) for s in seen.values())


def test_what_the_trainer_decides_is_as_it_decides():
    """Whether the output layer is the embedding, and whether there is multi-token prediction, whatever the config on the hub says."""
    with mm.rank_of(0, 1):
        untied = MegatronSource(mm.chunks(VOCAB, **in_megatron("qwen3") | {"tied": False}), HF["qwen3"])
        tied = MegatronSource(mm.chunks(VOCAB, **in_megatron("llama") | {"tied": True}), HF["llama"])
        without = MegatronSource(mm.chunks(VOCAB, **in_megatron("deepseek_v3") | {"mtp": 0}), HF["deepseek_v3"])
    head = [[f.buffer for f in s.fragments() if f.meta.name == "lm_head.weight"] for s in (untied, tied)]
    assert head == [["0.output_layer.weight"], ["0.embedding.word_embeddings.weight"]]
    assert (untied.aliases, list(tied.aliases), without.aliases) == ({}, ["lm_head.weight"], {})
    assert max(f.meta.layer for f in without.fragments()) == 3


def test_a_wrong_config_is_told():
    with mm.rank_of(1, 2, tp=2):
        models = mm.chunks(62, **in_megatron("llama"))
        other = LlamaConfig(**SIZES | {"intermediate_size": 64}, num_key_value_heads=4, head_dim=8)
        with pytest.raises(PlanError, match=r"layers.0.mlp.linear_fc1.weight is \[48, 32\] here, but part 1 of 2 of it is \[64, 32\]"):
            MegatronSource(models, other)


LAYOUTS = [
    (16, {"tp": 2, "pp": 2, "cp": 2}),
    (16, {"tp": 2, "ep": 4, "etp": 1, "pp": 2}),
    (16, {"tp": 4, "ep": 2, "etp": 2, "pp": 2, "cp": 1}),
    (12, {"tp": 2, "cp": 3, "ep": 3, "etp": 2}),
    (8, {"tp": 4, "ep": 2}),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_places_are_megatrons(world, layout):
    for rank in range(world):
        with mm.rank_of(rank, world, **layout):
            assert Ranks.of(rank, world, **layout) == Ranks.current()


def test_without_parallelism_the_place_must_be_given():
    with pytest.raises(PlanError, match="not initialised; give `ranks`"):
        Ranks.current()


@st.composite
def pipelines(draw):
    pp, vpp = draw(st.integers(2, 4)), draw(st.sampled_from([None, 1, 2, 3]))
    chunk = vpp or 1
    each = draw(st.integers(1, 3)) * chunk
    config = dict.fromkeys(("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout"))
    config |= {"account_for_embedding_in_pipeline_split": False, "account_for_loss_in_pipeline_split": False}
    layers = [each] * pp
    if draw(st.booleans()):
        for stage, name in ((0, "first"), (-1, "last")):
            if draw(st.booleans()):
                layers[stage] = config[f"num_layers_in_{name}_pipeline_stage"] = draw(st.integers(1, 3)) * chunk
    else:
        for stage, name in ((0, "embedding"), (-1, "loss")):
            if draw(st.booleans()):
                config[f"account_for_{name}_in_pipeline_split"] = True
                layers[stage] -= 1
    if pp == 2 and config["num_layers_in_first_pipeline_stage"] and config["num_layers_in_last_pipeline_stage"]:
        vpp = None  # megatron divides by the stages between these two, with virtual ones
    return config | {"num_layers": sum(layers), "pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": vpp}


@given(pipelines())
@settings(deadline=None, max_examples=200)
def test_stages_are_megatrons(config):
    given = SimpleNamespace(**config)
    pp, vpp = given.pipeline_model_parallel_size, given.virtual_pipeline_model_parallel_size
    ours = layers_of_stages(
        given.num_layers,
        pp,
        vpp or 1,
        first=given.num_layers_in_first_pipeline_stage,
        last=given.num_layers_in_last_pipeline_stage,
        embedding=given.account_for_embedding_in_pipeline_split,
        loss=given.account_for_loss_in_pipeline_split,
    )
    for stage in range(pp):
        for v in range(vpp or 1):
            at = v if vpp else None
            n = mm.get_num_layers_to_build(given, at, stage)
            first = mm.get_transformer_layer_offset(given, at, stage)
            assert ours[stage][v] == range(first, first + n)


PLACED = [["embedding", "decoder"], ["decoder", "loss"]]


@pytest.mark.parametrize(("layout", "pp"), [("Et|t|tt|L", 2), ("Et*3|(tt|)*5,m|L", 4), ("E|(t|tt|)*3mL", 2), (PLACED, 2)])
def test_layout_strings_are_megatrons(layout, pp):
    theirs = mm.PipelineParallelLayerLayout(layout, pp)
    counts = [[chunk.count(mm.LayerType.decoder) for chunk in stage] for stage in theirs.layout]
    ours = layers_of_stages(sum(map(sum, counts)), pp, layout=layout)
    assert [[len(chunk) for chunk in stage] for stage in ours] == counts
    in_order = [i for v in range(len(ours[0])) for stage in ours for i in stage[v]]
    assert in_order == list(range(len(in_order)))
