"""Megatron's layouts in plain numbers: random models and parallel sizes, cut as Megatron documents it, and what a source makes of the parts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron_cut import Cut, as_module

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.layouts.megatron import MegatronSource
from mooncake_ray.weights.layouts.ranks import Ranks
from mooncake_ray.weights.layouts.spec import Latent, ModelSpec
from mooncake_ray.weights.layouts.stages import layers_of_stages
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.shard import Shard, views


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]  # NaNs are not equal
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


def check(source: MegatronSource, whole: dict[str, torch.Tensor], seen: dict[str, torch.Tensor]) -> None:
    """Each fragment is its box of the whole tensor, bit for bit. Counts in `seen`."""
    placement = Placement.of("r", source.fragments())
    here = {}
    for i, view in enumerate(views(placement, source.buffers())):
        meta = placement.metas[placement.tensor[i]]
        d, n = placement.lo.shape[1], len(meta.shape)
        at = tuple(slice(a, b) for a, b in zip(placement.lo[i, d - n :].tolist(), placement.hi[i, d - n :].tolist(), strict=True))
        assert same(view.reshape(view.shape[d - n :]), whole[meta.name][at]), meta.name
        here.setdefault(meta.name, torch.zeros(meta.shape, dtype=torch.int16))[at] += 1
    for name, count in here.items():
        seen.setdefault(name, torch.zeros_like(count)).add_(count)


POWERS = st.sampled_from([1, 2, 4])


@st.composite
def models(draw):
    """A config, how it is laid out, and how it is built."""
    tp, ep, etp, pp, vpp = draw(POWERS), draw(POWERS), draw(POWERS), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    kind = draw(st.sampled_from(["qwen3", "qwen3_moe", "qwen2_moe", "deepseek_v3"]))
    hf = {"model_type": kind, "num_hidden_layers": pp * vpp * draw(st.integers(1, 2)), "hidden_size": tp * draw(st.integers(1, 2))}
    groups, dim = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    heads = groups * draw(st.integers(1, 3))
    gate = kind == "qwen3" and draw(st.booleans())
    latent = kind == "deepseek_v3"
    if latent:
        heads = tp * draw(st.integers(1, 2))
        hf |= {"kv_lora_rank": tp * draw(st.integers(1, 2)), "q_lora_rank": draw(st.sampled_from([None, tp, 2 * tp]))}
        hf |= {"qk_nope_head_dim": draw(st.integers(1, 3)), "qk_rope_head_dim": tp, "v_head_dim": draw(st.integers(1, 3))}
    else:
        assume(heads * dim % tp == 0 and groups * (heads // groups * (2 if gate else 1) + 2) * dim % tp == 0)
    hf |= {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": dim, "intermediate_size": tp * draw(st.integers(1, 3))}
    hf |= {"vocab_size": draw(st.integers(1, 40)), "tie_word_embeddings": draw(st.booleans())}
    if kind != "qwen3":
        n = ep * draw(st.integers(1, 2))
        hf |= {"num_experts": n, "moe_intermediate_size": tp * etp * draw(st.integers(1, 2))}
        hf |= {"n_shared_experts": 1} if latent else {}
        hf |= {"shared_expert_intermediate_size": tp * 2} if kind == "qwen2_moe" else {}
    build = {
        "tp": tp,
        "ep": ep if kind != "qwen3" else 1,
        "etp": etp if kind != "qwen3" else tp,
        "gate": gate,
        "mtp": draw(st.integers(0, 2)) if latent else 0,
    }
    build |= {
        "experts": draw(st.sampled_from(["te", "sequential", "grouped"])),
        "fused_norms": draw(st.booleans()),
        "pad": draw(st.integers(1, 5)),
    }
    build |= {"duplicated": draw(st.booleans())}
    return hf, pp, vpp, build


def spec_of(hf: dict, build: dict) -> ModelSpec:
    return replace(ModelSpec.of(hf), predict=build.get("mtp", 0), output_gate=build.get("gate", False))


@given(models())
@settings(deadline=None, max_examples=120)
def test_every_rank_holds_what_it_says(model):
    hf, pp, vpp, build = model
    stages = layers_of_stages(hf["num_hidden_layers"], pp, vpp)
    cut, spec = Cut(hf, stages, **build), spec_of(hf, build)
    seen: dict[str, torch.Tensor] = {}
    tp, ep, etp = build["tp"], build["ep"], build["etp"]
    world = max(tp, ep * etp)  # powers of two
    places = {Ranks.of(r, world, tp=tp, ep=ep, etp=etp) for r in range(world)}
    assert len({(p.tp_rank) for p in places}) == tp and len({(p.ep_rank, p.etp_rank) for p in places}) == ep * etp
    for place, stage in itertools.product(places, range(pp)):
        here = cut.rank(place.tp_rank, stage, place.ep_rank, place.etp_rank)
        source = MegatronSource(
            [as_module(chunk, "module.") for chunk in here],
            spec,
            Ranks(tp, place.tp_rank, pp, stage, ep, place.ep_rank, etp, place.etp_rank),
            stages[stage],
        )
        assert isinstance(source, Shard)
        check(source, cut.whole, seen)
    assert seen.keys() == cut.whole.keys()
    for name, count in seen.items():
        assert count.min() > 0, name
        assert spec.aliases.get(name, name) == name or torch.equal(count, seen[spec.aliases[name]])


DENSE = {"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2}
DENSE |= {"intermediate_size": 6, "vocab_size": 11, "tie_word_embeddings": True}


def stage(hf: dict, pp_rank: int, pp: int = 2, tp_rank: int = 0, tp: int = 1, **build) -> tuple[MegatronSource, Cut, list[torch.nn.Module]]:
    stages = layers_of_stages(hf["num_hidden_layers"], pp)
    cut = Cut(hf, stages, tp=tp, etp=tp, **build)
    modules = [as_module(chunk) for chunk in cut.rank(tp_rank, pp_rank, 0, tp_rank)]
    return MegatronSource(modules, hf, Ranks(tp, tp_rank, pp, pp_rank, 1, 0, tp, tp_rank), stages[pp_rank]), cut, modules


def test_sglang_15890_tied_embeddings_are_on_the_first_stage_and_on_the_last():
    """Both have every row that they hold under either name, so an engine's last stage is not left with an old output layer."""
    for tp_rank in range(2):
        first, last = (stage(DENSE, pp_rank, tp_rank=tp_rank, tp=2)[0] for pp_rank in range(2))
        for source in (first, last):
            assert source.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
            boxes = {f.meta.name: (f.lo, f.hi, f.offset) for f in source.fragments() if f.meta.layer < 0 and "norm" not in f.meta.name}
            low = (6 * tp_rank, 0)
            assert boxes == dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (low, (6 + 5 * tp_rank, 8), 0))


def test_skyrl_1345_stages_with_the_same_names_are_other_layers():
    """Each stage calls its first layer `decoder.layers.0`. What was found out for one must not be used for another."""
    sources = [stage(DENSE, pp_rank)[0] for pp_rank in (0, 1, 0)]
    buffers = [{b for b in s.buffers() if ".layers." in b} for s in sources]
    assert buffers[0] == buffers[1]
    layers = [{f.meta.layer for f in s.fragments()} - {-1} for s in sources]
    assert layers == [{0, 1}, {2, 3}, {0, 1}]


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Storages that are made while it is on."""

    def __init__(self, known: set[int]):
        super().__init__()
        self.known, self.new = known, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.new |= {
            t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)
        } - self.known
        return out


def test_megatron_102_nothing_is_copied():
    """Describing and reading a rank makes no tensor beside the model's own, whatever is fused in it."""
    hf = DENSE | {"model_type": "deepseek_v3", "num_experts": 4, "moe_intermediate_size": 2, "n_shared_experts": 1}
    for experts in ("te", "sequential", "grouped"):
        _, _, modules = stage(hf, 0, experts=experts)
        known = {t.untyped_storage().data_ptr() for m in modules for t in (*m.parameters(), *m.buffers())}
        with Allocations(known) as seen:
            source = MegatronSource(modules, hf, Ranks(pp=2), [range(2)])
            placement = Placement.of("r", source.fragments())
            assert {v.untyped_storage().data_ptr() for v in views(placement, source.buffers())} == known
        assert not seen.new


def test_replaced_parameters_are_seen():
    source, cut, [module] = stage(DENSE, 0)
    for name, parameter in list(module.named_parameters()):
        path, _, last = name.rpartition(".")
        setattr(module.get_submodule(path), last, torch.nn.Parameter(torch.full_like(parameter, 7)))
    check(source, {k: torch.full_like(t, 7) for k, t in cut.whole.items()}, {})
    del module.decoder._modules["layers"]
    with pytest.raises(PlanError, match="is gone since its layout was described"):
        source.buffers()


def test_what_has_no_counterpart_is_told():
    hf = {**DENSE, "tie_word_embeddings": False}
    _, _, [module] = stage(hf, 0)
    module.decoder._modules["layers"]._modules["0"].register_parameter("adapter", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(PlanError, match=r"1 of megatron's tensors have no counterpart: decoder\.layers\.0\.adapter"):
        MegatronSource(module, hf, Ranks(pp=2), [range(2)])


def test_a_layer_without_a_number_is_told():
    _, _, [module] = stage(DENSE, 0)
    with pytest.raises(PlanError, match="decoder layer 0 of a chunk does not say which one of the model it is"):
        MegatronSource(module, DENSE, Ranks(pp=2))
    with pytest.raises(PlanError, match="layers of 2 chunks are given, but there are 1"):
        MegatronSource(module, DENSE, Ranks(pp=2), [range(1), range(1)])
    for i, layer in module.decoder.layers.named_children():
        layer.layer_number = 3 + int(i)
    assert {f.meta.layer for f in MegatronSource(module, DENSE, Ranks(pp=2)).fragments()} == {-1, 2, 3}


def test_shapes_that_the_config_does_not_make_are_told():
    _, _, [module] = stage(DENSE, 0)
    with pytest.raises(PlanError, match=r"linear_qkv\.weight: rows of 16 cannot be divided by 3"):
        MegatronSource(module, DENSE, Ranks(tp=3, pp=2), [range(2)])
    with pytest.raises(PlanError, match=r"linear_qkv\.weight is \[16, 8\] here, but part 1 of 2 of it is \[8, 8\] by the config"):
        MegatronSource(module, DENSE, Ranks(tp=2, tp_rank=1, pp=2), [range(2)])
    with pytest.raises(PlanError, match=r"word_embeddings\.weight: 1 times 11 rows are less than a vocabulary of 12"):
        MegatronSource(module, DENSE | {"vocab_size": 12}, Ranks(pp=2), [range(2)])


def test_configs():
    with pytest.raises(PlanError, match="'gpt2' is none of the known families"):
        ModelSpec.of({"model_type": "gpt2"})
    with pytest.raises(PlanError, match="the config of this qwen3 has no vocab_size"):
        ModelSpec.of({k: v for k, v in DENSE.items() if k != "vocab_size"})
    mixtral = ModelSpec.of(DENSE | {"model_type": "mixtral", "num_local_experts": 2})
    assert (mixtral.experts, mixtral.expert_ffn, mixtral.family.expert) == (2, 6, "block_sparse_moe.experts.{}")


def test_a_config_as_its_file_has_it():
    """Kimi-K2's, of which only what matters here."""
    k2 = {"model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64}
    k2 |= {"intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1, "vocab_size": 163840}
    k2 |= {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    k2 |= {"tie_word_embeddings": False, "num_nextn_predict_layers": 0}
    spec = ModelSpec.of(k2)
    assert (spec.experts, spec.expert_ffn, spec.shared_ffn, spec.latent) == (384, 2048, 2048, Latent(1536, 512, 128, 64, 128))
    assert (spec.aliases, spec.output_names) == ({}, ("lm_head.weight",))


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("layernorm_zero_centered_gamma", True, "norms are stored less one on one side only"),
        ("rotary_interleaved", True, "rows are in another order"),
        ("moe_mlp_glu_interleave_size", 32, "gates are interleaved"),
        ("mtp_num_layers", 1, "how checkpoints of this family name 1 layers of multi-token prediction"),
    ],
)
def test_values_that_would_have_to_be_converted_are_told(setting, value, message):
    _, _, [module] = stage(DENSE, 0)
    module.config = SimpleNamespace(**{setting: value})
    with pytest.raises(PlanError, match=message):
        MegatronSource(module, DENSE, Ranks(pp=2), [range(2)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 5, "pp": 2}, "5 layers cannot be divided by 2 stages"),
        ({"layers": 4, "pp": 2, "vpp": 4}, "2 layers cannot be divided by 4 virtual stages"),
        ({"layers": 4, "pp": 2, "first": 1, "loss": True}, "either"),
        ({"layers": 4, "pp": 2, "layout": "Ett|L"}, "2 layers are placed, but the model has 4"),
        ({"layers": 4, "pp": 2, "layout": "Ett|x|L"}, "none of E, t, m, L"),
        ({"layers": 4, "pp": 2, "layout": "Ett|t|tL"}, "3 stages cannot be divided by 2"),
        ({"layers": 0, "pp": 1, "embedding": True, "vpp": 1, "loss": True, "first": None}, None),
    ],
)
def test_stages_that_cannot_be(arguments, message):
    if message is None:
        assert layers_of_stages(**arguments) == [[range(0, 0)]]
        return
    with pytest.raises(PlanError, match=message):
        layers_of_stages(**arguments)
