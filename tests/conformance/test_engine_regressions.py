"""What went wrong with weights in other engines, told by their trackers, does not here."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from engine_suite import pieces
from serving_models import MLA, MOE, Linear, Ranks, Sizes, TinyServed, metas_of, whole_model
from torch import nn

from mooncake_ray.engines.torch_module import TorchModuleEngine
from mooncake_ray.errors import PlanError
from mooncake_ray.weights.tracing import TracedTarget


def engine_of(module, whole, **how):
    return TorchModuleEngine(module, shard=TracedTarget(module, metas_of(whole), ignore=how.pop("ignore", ())), **how)


def update(engine, whole, version=1, calls=None):
    """All fragments, in one call or in those that `calls` makes of their numbers."""
    engine.start_weight_update()
    engine.pause()
    there = list(pieces(engine, whole))
    for numbers in calls(range(len(there))) if calls else [range(len(there))]:
        engine.update_weights({"pieces": [there[i] for i in numbers]})
    engine.finish_weight_update(version)
    engine.resume()


def one_each(numbers):
    return [[i] for i in numbers]


def backwards(numbers):
    return [[i] for i in reversed(numbers)]


class KeepsHalves(TinyServed):
    """Joins the two halves of a fused projection when it has both, and forgets what it has at the end of a call, as SGLang does."""

    def load_weights(self, weights):
        halves = {}

        def joined():
            for name, tensor in weights:
                if "q_a_proj" not in name and "kv_a_proj" not in name:
                    yield name, tensor
                    continue
                layer = name.partition(".self_attn")[0]
                there = halves.setdefault(layer, {})
                there["q_a" if "q_a_proj" in name else "kv_a"] = tensor
                if len(there) == 2:
                    whole = torch.cat([there["q_a"], there["kv_a"]], dim=0)
                    self.get_parameter(f"{layer}.self_attn.fused_qkv_a_proj.weight").data.copy_(whole)

        return super().load_weights(joined())


@pytest.mark.parametrize("calls", [None, one_each, backwards])
@pytest.mark.parametrize("kind", [TinyServed, KeepsHalves])
def test_fused_halves_in_calls_of_their_own(kind, calls):
    """sglang#14178, sglang#38298: small buckets split the halves of a fused projection, and one was lost."""
    whole, module, loaded = whole_model(MLA, 1), kind(MLA), kind(MLA)
    loaded.load_weights(whole.items())
    update(engine_of(module, whole), whole, calls=calls)
    for (name, a), (_, b) in zip(loaded.named_parameters(), module.named_parameters(), strict=True):
        assert torch.equal(a, b) or "embed" in name or "lm_head" in name, name


class Absorbed(nn.Module):
    """Latent attention that keeps what it computes of `kv_b_proj`, and a captured graph that reads it where it was."""

    def __init__(self):
        super().__init__()
        self.kv_b_proj = Linear(Sizes(), Ranks(), [4 * 8], 5, split="rows")
        self.kv_b_proj.weight.data.zero_()
        self.w_kc, self.w_vc = self.absorb(self)
        self.graph = (self.w_kc, self.w_vc)

    @staticmethod
    def absorb(module):
        return tuple(w.transpose(1, 2).contiguous() for w in module.kv_b_proj.weight.unflatten(0, (4, 8)).split([4, 4], dim=1))

    def load_weights(self, weights):
        for _, tensor in weights:
            self.kv_b_proj.weight_loader(self.kv_b_proj.weight, tensor)


def test_what_is_absorbed_stays_at_its_address():
    """sglang#6265, sglang#4961: w_kc and w_vc were made anew elsewhere, and CUDA graphs read the old ones."""
    module, whole = Absorbed(), {"kv_b_proj.weight": torch.randn(32, 5)}
    derived = {"w_kc": lambda m: Absorbed.absorb(m)[0], "w_vc": lambda m: Absorbed.absorb(m)[1]}
    engine = engine_of(module, whole, derived=derived)
    update(engine, whole)
    expected = [w.transpose(1, 2) for w in whole["kv_b_proj.weight"].view(4, 8, 5).split([4, 4], dim=1)]
    assert all(torch.equal(a, b) for a, b in zip(module.graph, expected, strict=True))
    assert module.w_kc is module.graph[0] and module.w_vc is module.graph[1]


def test_a_local_copy_of_a_parameter_follows_it():
    """sglang#29916: each rank's own part of the attention sinks was a copy that nobody made anew."""

    class Sinks(nn.Module):
        def __init__(self):
            super().__init__()
            self.sinks = nn.Parameter(torch.zeros(8))
            self.attn_sink_local = self.sinks[4:].detach().clone()

    module, whole = Sinks(), {"sinks": torch.arange(8.0)}
    engine = TorchModuleEngine(module, derived={"attn_sink_local": lambda m: m.sinks[4:]})
    local = module.attn_sink_local
    for version in (1, 2):
        update(engine, {"sinks": whole["sinks"] * version}, version)
        assert local.tolist() == [4.0 * version, 5.0 * version, 6.0 * version, 7.0 * version]


def test_parameters_keep_what_is_attached_to_them():
    """vllm#28425: a reload put new parameters in the place of the old, without their `weight_loader`."""
    module = TinyServed(replace(Sizes(), block=4))
    before = dict(module.named_parameters())
    for version in (1, 2):
        whole = whole_model(module.c, version)
        update(engine_of(module, whole), whole, version)
        assert all(p is before[n] for n, p in module.named_parameters())
        assert all(hasattr(p, "weight_loader") for n, p in module.named_parameters() if "norm" not in n)
        module.load_weights(whole.items())


FP8 = replace(Sizes(), block=4, hidden_size=16, intermediate_size=16)


def test_scales_come_with_what_they_scale():
    """vllm#45835: scales were NaN after a reload, since nothing had been loaded into them."""
    module, whole = TinyServed(FP8), whole_model(FP8, 1)
    update(engine_of(module, whole), whole)
    scales = {n: p for n, p in module.named_parameters() if n.endswith("weight_scale_inv")}
    assert len(scales) == 4 and not any(p.isnan().any() for p in scales.values())
    missing = {n: t for n, t in whole.items() if "gate_proj.weight_scale_inv" not in n}
    with pytest.raises(PlanError, match=r"leaves 2 parameters .*gate_up_proj\.weight_scale_inv\[0:4, 0:4\]"):
        engine_of(module, missing)


class Packs(nn.Module):
    """Keeps scales also as a kernel wants them: exponents only, four in a word."""

    def __init__(self):
        super().__init__()
        self.weight_scale_inv = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.packed = self.pack(self)

    @staticmethod
    def pack(module):
        return (module.weight_scale_inv.data.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32).view(4)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def test_scales_that_are_packed_for_a_kernel():
    """vime#133: scales that were packed already were taken for scales as the model has them."""
    whole = {"weight_scale_inv": 2.0 ** torch.arange(-8, 8).view(4, 4)}
    module = Packs()
    engine = engine_of(module, whole, derived={"packed": Packs.pack})
    packed = module.packed
    update(engine, whole)
    assert packed.view(torch.uint8).tolist() == list(range(127 - 8, 127 + 8)) and module.packed is packed

    module.weight_scale_inv = nn.Parameter(packed, requires_grad=False)  # in their place, as after some engines' loading
    with pytest.raises(PlanError, match=r"weight_scale_inv was .*float32.* and is .*int32"):
        engine.start_weight_update()
    with pytest.raises(PlanError, match=r"is torch\.float32 and parameter weight_scale_inv is torch\.int32"):
        engine_of(module, whole)


class PassesOver(TinyServed):
    """Skips names it does not know, as many loaders do."""

    def load_weights(self, weights):
        for weight in weights:
            with contextlib.suppress(KeyError):
                super().load_weights([weight])


@pytest.mark.parametrize("kind", [TinyServed, PassesOver])
def test_renamed_experts_are_not_passed_over(kind):
    """vllm#44953, vllm#45818, vllm#47031: experts moved to `routed_experts`; loaders failed, or left them as they were."""
    module = kind(MOE, nested=True)
    module.nested = False  # the loader has the old names
    says = (
        "KeyError: .*w13_weight" if kind is TinyServed else r"leaves 4 parameters .*experts\.routed_experts\.w13_weight\[0:6, 0:16, 0:8\]"
    )
    with pytest.raises(PlanError, match=says):
        TracedTarget(module, metas_of(whole_model(MOE, 1)))


def test_a_draft_that_shares_memory_with_its_model():
    """sglang#17870: a draft model that has the embedding in common with the model asked for the same memory a second time, and hung. Here both
    are one target: the shared memory is in it once."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.target, self.draft = nn.Embedding(5, 3), nn.Embedding(5, 3)
            self.draft.weight = self.target.weight

        def load_weights(self, weights):
            for _, tensor in weights:
                for part in (self.target, self.draft):
                    part.weight.data.copy_(tensor)

    module, whole = Both(), {"embed_tokens.weight": torch.randn(5, 3)}
    engine = engine_of(module, whole)
    assert len(engine.shard().fragments()) == len(engine.shard().buffers()) == 1
    update(engine, whole)
    assert torch.equal(module.draft.weight, whole["embed_tokens.weight"])
