"""Tables of engines' layouts against loaders that are written as the engines' are, run on real tensors, and against what tracing says."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_models import MLA, MOE, Ranks, Sizes, TinyServed, metas_of, whole_model
from test_tracing import fill, same

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.layouts import hf, sglang, vllm
from mooncake_ray.weights.layouts.serving import EngineRank, experts_of, shapes_of
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.module_target import ModuleTarget
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.shard import views
from mooncake_ray.weights.tracing import TracedTarget


def rank_of(r: Ranks) -> EngineRank:
    experts = "linear" if r.experts is None else r.experts
    return EngineRank((r.tp, r.tp_size), ep=(r.ep, r.ep_size), expert_tp=(r.tp, r.tp_size), experts=experts)


def config_of(c: Sizes) -> dict:
    return asdict(c) | ({"quantization_config": {"weight_block_size": [c.block, c.block]}} if c.block else {})


def contents(fragments, module) -> list[tuple]:
    """Which box of what is where, one place after the other."""
    places = Placement.of("r", fragments)
    out = []
    for i, view in enumerate(views(places, ModuleTarget(module, fragments).buffers())):
        name = places.buffers[places.buffer[i]]
        at = (name, view.storage_offset(), view.stride())
        out.append((*at, places.metas[places.tensor[i]].name, places.lo[i].tolist(), places.hi[i].tolist()))
    return sorted(out)


def check(c: Sizes, r: Ranks, table, nested: bool, **how) -> list:
    whole = whole_model(c, 1)
    loaded, module = TinyServed(c, r, nested=nested), TinyServed(c, r, nested=nested)
    loaded.load_weights(whole.items())
    fragments = table.fragments(config_of(c), metas_of(whole), shapes_of(module), rank_of(r), **how)
    fill(ModuleTarget(module, fragments), whole)
    for (name, a), (_, b) in zip(loaded.named_parameters(), module.named_parameters(), strict=True):
        rows = (a != 0).flatten(1).any(1) if a.dim() > 1 and ("embed" in name or "lm_head" in name) else slice(None)
        assert torch.equal(a[rows], b[rows]), name
    assert contents(fragments, module) == contents(TracedTarget(module, metas_of(whole)).fragments(), module)
    return fragments


@st.composite
def engines(draw):
    c = draw(st.sampled_from([Sizes(), MOE, MLA]))
    tp_size = draw(st.sampled_from([1, 2, 4]))
    c = replace(
        c,
        vocab_size=draw(st.integers(9, 40)),
        num_key_value_heads=draw(st.sampled_from([1, 2, 4])),
        num_attention_heads=draw(st.sampled_from([4, 8])),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
    )
    ep_size = draw(st.sampled_from([1, 2, 3])) if c.num_experts else 1
    experts = tuple(draw(st.permutations(range(6)))[:3]) if c.num_experts and draw(st.booleans()) else None
    return c, Ranks(draw(st.integers(0, tp_size - 1)), tp_size, draw(st.integers(0, ep_size - 1)), ep_size, experts)


@settings(deadline=None, max_examples=120)
@given(engines(), st.booleans())
def test_vllm(case, nested):
    check(*case, vllm, nested)


@settings(deadline=None, max_examples=20)
@given(engines())
def test_sglang(case):
    c, r = case
    if c.kv_lora_rank is None:
        check(c, r, sglang, nested=False)


def test_sglang_names_its_fused_projection_otherwise():
    whole = whole_model(MLA, 1)
    shapes = shapes_of(TinyServed(MLA, nested=False))
    with pytest.raises(PlanError, match=r"3 parameters .*fused_qkv_a_proj\.weight: the model has no"):
        sglang.fragments({}, metas_of(whole), shapes)
    there = {n.replace("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa"): s for n, s in shapes.items()}
    ours = sglang.fragments({}, metas_of(whole), there)
    theirs = vllm.fragments({}, metas_of(whole), shapes)
    assert [(f.meta, f.lo, f.hi, f.offset, f.strides) for f in ours] == [(f.meta, f.lo, f.hi, f.offset, f.strides) for f in theirs]


BLOCKED = replace(Sizes(), block=4, hidden_size=16, intermediate_size=16)


@pytest.mark.parametrize(("tp_size", "block"), [(1, 4), (1, 5), (2, 4), (4, 4), (2, 8)])
def test_scales_of_blocks(tp_size, block):
    for tp in range(tp_size):
        check(replace(BLOCKED, block=block, intermediate_size=20 if block == 5 else 16), Ranks(tp, tp_size), vllm, nested=False)


def row_split(c: Sizes, tp_size: int, tp: int):
    name = "model.layers.0.mlp.down_proj"
    shapes = shapes_of(TinyServed(c, Ranks(tp, tp_size)))
    only = {n: s for n, s in shapes.items() if n.startswith(f"{name}.")}
    return vllm.fragments(config_of(c), metas_of(whole_model(c, 1)), only, EngineRank((tp, tp_size)))


def test_a_cut_within_a_block_gives_both_sides_its_scale():
    c = replace(BLOCKED, block=8)
    columns = [[(f.lo[1], f.hi[1]) for f in row_split(c, 4, tp) if f.meta.name.endswith("scale_inv")] for tp in range(4)]
    assert columns == [[(0, 1)], [(0, 1)], [(1, 2)], [(1, 2)]]


def test_blocks_that_are_not_the_wholes():
    c = replace(BLOCKED, block=8, intermediate_size=24)  # a rank has columns 12 to 24: half a block, and a whole one
    row_split(c, 2, 0)
    with pytest.raises(PlanError, match=r"down_proj\.weight_scale_inv: elements 12 to 24 of 24 begin within a block of 8"):
        row_split(c, 2, 1)
    c = replace(BLOCKED, block=8, intermediate_size=16)
    with pytest.raises(PlanError, match=r"4 rows of .*gate_proj\.weight_scale_inv are no whole blocks of 8"):
        check(c, Ranks(0, 4), vllm, nested=False)


def expert_metas(count=4, width=8, hidden=6, extra=()):
    return [
        ParamMeta(f"m.mlp.experts.{e}.{n}", "bfloat16", (hidden, width) if n.startswith("down") else (width, hidden))
        for e in range(count)
        for n in ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    ] + list(extra)


def w13(slots, width=16, name="m.mlp.experts.w13_weight"):
    return {name: ((slots, width, 6), "bfloat16")}


def placed(fragments):
    return [(f.meta.name.removeprefix("m.mlp."), f.lo[0], f.hi[0], f.offset // 12) for f in fragments]


def test_up_before_gate():
    where = placed(sglang.fragments({}, expert_metas(1), w13(1), load_up_proj_weight_first=True))
    assert where == [("experts.0.up_proj.weight", 0, 8, 0), ("experts.0.gate_proj.weight", 0, 8, 8)]
    assert placed(vllm.fragments({}, expert_metas(1), w13(1), up_first=True)) == where


def test_a_shared_expert_behind_the_routed_ones():
    shared = [ParamMeta(f"m.mlp.shared_experts.{n}_proj.weight", "bfloat16", (8, 6)) for n in ("gate", "up")]
    rank = EngineRank(ep=(1, 2))
    where = placed(sglang.fragments({}, expert_metas(extra=shared), w13(3), rank, num_fused_shared_experts=1))
    assert [n for n, *_ in where][::2] == [f"experts.{e}.gate_proj.weight" for e in (2, 3)] + ["shared_experts.gate_proj.weight"]


@pytest.mark.parametrize(
    ("placement", "ranks", "here"),
    [
        ("linear", 4, [(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)]),
        ("round_robin", 4, [(0, 4, 8), (1, 5, 9), (2, 6), (3, 7)]),
        ((9, 0, 9), 4, [(9, 0, 9)] * 4),
    ],
)
def test_placements_of_experts(placement, ranks, here):
    assert [experts_of(10, EngineRank(ep=(i, ranks), experts=placement)) for i in range(ranks)] == here


def test_an_expert_may_be_there_twice():
    where = placed(vllm.fragments({}, expert_metas(), w13(3), EngineRank(ep=(0, 2), experts=(2, 0, 2))))
    assert [(n, at) for n, _, _, at in where][::2] == [
        ("experts.2.gate_proj.weight", 0),
        ("experts.0.gate_proj.weight", 16),
        ("experts.2.gate_proj.weight", 32),
    ]


def test_experts_that_are_renamed_are_never_passed_over():
    """Upstream they were moved one level down, under `routed_experts`, and what did not know that skipped them silently."""
    for name in ("m.mlp.experts.w13_weight", "m.mlp.experts.routed_experts.w13_weight"):
        assert len(vllm.fragments({}, expert_metas(), w13(4, name=name))) == 8
    with pytest.raises(PlanError, match=r"1 parameters .*experts\.elsewhere\.w13_weight: the model has no"):
        vllm.fragments({}, expert_metas(), w13(4, name="m.mlp.experts.elsewhere.w13_weight"))


def test_experts_of_old_names():
    metas = [ParamMeta(f"m.mlp.experts.{e}.{n}.weight", "bfloat16", (8, 6)) for e in range(2) for n in ("w1", "w3")]
    assert [f.meta.name[-11:] for f in vllm.fragments({}, metas, w13(2))] == ["0.w1.weight", "0.w3.weight", "1.w1.weight", "1.w3.weight"]


WRONG = {
    "an unknown name": ({"m.odd.weight": ((3,), "bfloat16")}, "m.odd.weight: the model has no m.odd.weight"),
    "too few experts": (w13(3), "has 3 experts, where 4 of 4 are expected"),
    "too narrow": (w13(4, 15), "is more than there is"),
    "too wide": (w13(4, 17), r"w13_weight\[0:1, 16:17, 0:6\] is nothing of the model"),
    "another dtype": ({"m.mlp.experts.w13_weight": ((4, 16, 6), "float32")}, "is float32, the model's .* bfloat16"),
    "other dimensions": ({"m.gate.weight": ((4, 6, 1), "bfloat16")}, "has shape"),
    "odd rows": ({"m.gate.weight": ((3, 6), "bfloat16")}, r"1 times \[3, 6\] is not m.gate.weight, \[4, 6\]"),
    "two dimensions": ({"m.gate.weight": ((2, 3), "bfloat16")}, "split along 2 dimensions"),
    "too small a vocabulary": ({"lm_head.weight": ((9, 6), "bfloat16")}, r"1 times \[9, 6\] does not hold"),
    "fused rows": ({"m.qkv_proj.weight": ((9, 6), "bfloat16")}, "has 9 rows, where 1 ranks with"),
    "fused columns": ({"m.qkv_proj.weight": ((8, 5), "bfloat16")}, "is not made of"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_the_table_does_not_explain(what):
    parameters, says = WRONG[what]
    more = [ParamMeta(f"m.{n}.weight", "bfloat16", (4, 6)) for n in ("gate", "q_proj", "k_proj", "v_proj")]
    more.append(ParamMeta("lm_head.weight", "bfloat16", (10, 6)))
    with pytest.raises(PlanError, match=says):
        vllm.fragments({}, expert_metas(extra=more), parameters)
    assert vllm.fragments({}, expert_metas(extra=more), parameters, ignore=list(parameters)) == []


def test_one_scale_for_each_fused_tensor():
    metas = [ParamMeta(f"m.{n}_proj.weight_scale", "float32", ()) for n in "qkv"]
    made = vllm.fragments({}, metas, {"m.qkv_proj.weight_scale": ((3,), "float32")}, EngineRank((1, 2)))
    assert [(f.meta.name[2], f.offset) for f in made] == [("q", 0), ("k", 4), ("v", 8)]
    with pytest.raises(PlanError, match="is not made of"):
        vllm.fragments({}, metas, {"m.qkv_proj.weight_scale": ((2,), "float32")})


def test_parameters_that_are_turned_around():
    """As some kernels want them. Their shape says nothing of where what is."""
    module = torch.nn.Linear(4, 4, bias=False)
    module.weight = torch.nn.Parameter(module.weight.data.t())
    with pytest.raises(PlanError, match="1 parameters do not lie in C order: weight"):
        shapes_of(module)


def test_ranks_that_there_are_not():
    with pytest.raises(PlanError, match="tp: there is no rank 2 of 2"):
        EngineRank((2, 2))
    with pytest.raises(PlanError, match="not 'random'"):
        EngineRank(experts="random")


def test_attention_that_is_data_parallel():
    """The attention's parameters are whole on each rank, what follows is split."""
    c = Sizes()
    whole, split = TinyServed(c), TinyServed(c, Ranks(1, 2))
    shapes = {n: s for n, s in shapes_of(split).items() if "self_attn" not in n} | {
        n: s for n, s in shapes_of(whole).items() if "self_attn" in n
    }
    fragments = sglang.fragments({}, metas_of(whole_model(c, 1)), shapes, EngineRank((1, 2), attention=(0, 1)))
    assert {f.lo[0] for f in fragments if "k_proj" in f.meta.name} == {0}
    assert {f.lo[0] for f in fragments if "up_proj" in f.meta.name} == {6}


def test_a_transformers_module():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(1)
    module = transformers.Qwen3MoeForCausalLM(config).requires_grad_(False)
    checkpoint = {n: t for n, t in module.state_dict().items() if n != "lm_head.weight"}
    for name in [n for n in checkpoint if ".experts." in n]:
        at = name.rpartition(".")[0]
        for e, stacked in enumerate(checkpoint.pop(name)):
            parts = (
                {"down_proj": stacked} if name.endswith("down_proj") else dict(zip(("gate_proj", "up_proj"), stacked.chunk(2), strict=True))
            )
            checkpoint |= {f"{at}.{e}.{n}.weight": t.clone() for n, t in parts.items()}
    other = transformers.Qwen3MoeForCausalLM(config).requires_grad_(False)
    fragments = hf.fragments(config, metas_of(checkpoint), shapes_of(other))
    fill(ModuleTarget(other, fragments), checkpoint)
    tokens = torch.tensor([[1, 5, 9]])
    assert torch.equal(other(tokens).logits, module(tokens).logits)
    stacked = hf.fragments(config, metas_of(dict(module.named_parameters())), shapes_of(other))
    assert len(stacked) < len(fragments)
    served = Stacked(module)
    named = dict(module.named_parameters())
    experts = [{n: t for n, t in w.items() if ".experts." in n} for w in (named, checkpoint)]
    fill(ModuleTarget(served, vllm.fragments(config, metas_of(experts[0]), shapes_of(served))), experts[0])
    other = Stacked(module)
    fill(ModuleTarget(other, vllm.fragments(config, metas_of(experts[1]), shapes_of(other))), experts[1])
    same(served, other)


class Stacked(torch.nn.Module):
    """The experts of a transformers module, in parameters of vLLM's names."""

    def __init__(self, module):
        super().__init__()
        for name, tensor in module.named_parameters():
            if ".experts." in name:
                owner = self
                *path, leaf = name.split(".")
                for part in path:
                    if part not in dict(owner.named_children()):
                        owner.add_module(part, torch.nn.Module())
                    owner = owner.get_submodule(part)
                empty = torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
                owner.register_parameter("w2_weight" if leaf == "down_proj" else "w13_weight", empty)
