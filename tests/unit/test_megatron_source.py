"""Megatron's layouts in plain numbers: random models and parallel sizes, cut as Megatron documents it, and what a source makes of the parts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron_cut import Cut, as_module

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.layouts.megatron import MegatronSource
from mooncake_ray.weights.layouts.ranks import Ranks
from mooncake_ray.weights.layouts.spec import ModelSpec
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
        "mtp": draw(st.integers(0, 1)) if latent else 0,
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
