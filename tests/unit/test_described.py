"""Described layouts against how Megatron and the engines cut tensors, models against their published sizes, traffic against sums by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.errors import ConfigError, PlanError
from mooncake_ray.weights.described import Parallel, described, joined, on_hosts
from mooncake_ray.weights.models import MODELS, config_of, tensors_of
from mooncake_ray.weights.placement import Fragment, Placement
from mooncake_ray.weights.plan import Topology, deliver_plan, divide, publish_plan
from mooncake_ray.weights.traffic import Speeds, traffic_of

PARAMETERS = {  # as their authors' checkpoints have them
    "deepseek-v3": 671_026_419_200,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-8b": 8_190_735_360,
    "qwen3-0.6b": 596_049_920,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
}


@pytest.mark.parametrize("model", PARAMETERS)
def test_models_have_as_many_parameters_as_they_should(model):
    metas = [t.meta for t in tensors_of(config_of(model))]
    biases = sum(m.shape[0] for m in metas if m.name.endswith("e_score_correction_bias"))
    assert sum(m.nbytes // m.itemsize for m in metas) - (0 if model == "deepseek-v3" else biases) == PARAMETERS[model]
    assert len({m.name for m in metas}) == len(metas)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_those_of_transformers(kind, tied):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    there = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {t.meta.name: t.meta.shape for t in tensors_of(config.to_dict(), "float32")} == there


def test_config_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(MODELS["qwen3-8b"])))
    assert config_of(str(tmp_path)) == config_of(str(tmp_path / "config.json")) == config_of("qwen3-8b")
    for text, what in (("{", "config.json: "), ("[]", "not a model's config"), ("{}", "has no model_type")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=what):
            config_of(str(tmp_path))
    with pytest.raises(ConfigError, match=r"no model 'gpt-9': neither a config.json, nor one of kimi-k2"):
        config_of("gpt-9")
    with pytest.raises(ConfigError, match=r"'bert' cannot be described; there are .*llama"):
        tensors_of({"model_type": "bert"})
    with pytest.raises(ConfigError, match="the config of this llama has no hidden_size"):
        tensors_of({"model_type": "llama"})


def test_layouts_are_parsed():
    assert Parallel.parse("tp=8, pp=2,ep16") == Parallel(tp=8, pp=2, ep=16) and str(Parallel.parse("tp=2,dp=3")) == "tp=2,dp=3"
    for text in ("tp=0", "xp=2", "tp", "tp=2,tp=2", "tp=-1"):
        with pytest.raises(ConfigError, match="is not a layout"):
            Parallel.parse(text)


def test_what_cannot_be_divided_is_said():
    def refused(config, parallel, engine, what):
        with pytest.raises(ConfigError, match=what):
            described(config, parallel, engine=engine)

    moe, dense = config_of("qwen3-30b-a3b"), config_of("qwen3-8b")
    refused(moe, Parallel(ep=3, dp=3), False, "128 experts cannot be divided among ep=3")
    refused(dense, Parallel(ep=2, dp=2), False, "0 experts")
    refused(moe, Parallel(ep=8, dp=4), False, "4 ranks of a stage cannot be divided into groups of ep x etp = 8 x 1")
    refused(dense, Parallel(pp=64), False, "36 layers are not enough for pp x vpp = 64 x 1 stages")
    refused(dense, Parallel(tp=7), True, "down_proj.weight has 12288 rows or columns, which 7 ranks cannot share evenly")
    refused({**dense, "num_key_value_heads": 6}, Parallel(tp=4), True, "32 heads in 6 groups cannot be shared by tp=4")
    refused(
        {**dense, "num_key_value_heads": 2, "head_dim": 127},
        Parallel(tp=8),
        False,
        "4572 rows of queries, keys and values cannot be divided by tp=8",
    )


TINY = {
    "model_type": "qwen3_moe", "vocab_size": 100, "hidden_size": 12, "num_hidden_layers": 5, "intermediate_size": 24, "head_dim": 4,
    "moe_intermediate_size": 8, "num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [], "num_attention_heads": 8,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
LATENT = {
    "model_type": "deepseek_v3", "vocab_size": 100, "hidden_size": 12, "num_hidden_layers": 4, "intermediate_size": 24, "q_lora_rank": 6,
    "moe_intermediate_size": 8, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_attention_heads": 8,
    "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
}  # fmt: skip


def whole_model(config):
    fragments = []
    for meta in (t.meta for t in tensors_of(config)):
        fragments.append(Fragment(meta, (0,) * len(meta.shape), meta.shape, meta.name, 0, (0,) * len(meta.shape)))
    return Placement.of("all/0", fragments)


@st.composite
def layouts(draw, engine):
    tp, ep, etp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    dp = draw(st.integers(1, 3)) * max(1, ep * etp // tp)
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2)] if not engine else [(1, 1), (2, 1)]))
    return Parallel(tp, pp, ep, etp, dp, 1 if engine else draw(st.integers(1, 2)), vpp)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([TINY, LATENT]))
def test_any_layout_has_all_of_the_model(data, config):
    """Described trainers hold, and described engines want, every element: proved by planning to and from one rank that has it all."""
    trainer, engine = data.draw(layouts(engine=False)), data.draw(layouts(engine=True))
    if trainer.pp * trainer.vpp > config["num_hidden_layers"]:
        trainer = Parallel(trainer.tp, 2, trainer.ep, trainer.etp, trainer.dp)
    source, target = described(config, trainer, engine=False), described(config, engine, engine=True)
    assert len(source.ranks) == trainer.ranks and len(target.ranks) == engine.ranks
    model = whole_model(config)
    published = publish_plan(source)
    deliver_plan(published, model)
    deliver_plan(published, target)
    wanted = publish_plan(divide(model, 64))  # small enough that few regions are cut
    seen = np.zeros(len(wanted), np.int64)
    delivery = deliver_plan(wanted, target)
    np.add.at(seen, delivery.op_region, delivery.op_nbytes)
    assert np.all(seen >= wanted.nbytes)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 6]))
def test_megatron_cuts_the_fused_matrix_by_rows(groups, queries, size, tp):
    """Each rank has as many rows of the fused matrix as any other, even in the middle of a group: made here row by row."""
    rows = []
    for group in range(groups):
        rows += [("q", group * queries * size + i) for i in range(queries * size)]
        rows += [(part, group * size + i) for part in "kv" for i in range(size)]
    config = {
        "model_type": "llama", "vocab_size": 12, "hidden_size": 12, "num_hidden_layers": 1, "intermediate_size": 12, "head_dim": size,
        "num_attention_heads": groups * queries, "num_key_value_heads": groups,
    }  # fmt: skip
    if len(rows) % tp or groups * queries * size % tp:
        return
    placement = described(config, Parallel(tp=tp), engine=False)
    for rank in range(tp):
        mine = placement.only(f"trainer/{rank}")
        has = []
        for t, lo, hi in zip(mine.tensor.tolist(), mine.lo[:, 0].tolist(), mine.hi[:, 0].tolist(), strict=True):
            if (name := mine.metas[t].name.removesuffix("_proj.weight"))[-2:] in (".q", ".k", ".v"):
                has += [(name[-1], row) for row in range(lo, hi)]
        assert sorted(has) == sorted(rows[rank * len(rows) // tp : (rank + 1) * len(rows) // tp])


def test_experts_have_their_own_ranks():
    """Of 4 ranks with tp=2, ep=2, etp=1: which experts, and that dense tensors are cut by tp."""
    placement = described(TINY, Parallel(tp=2, dp=2, ep=2, etp=1), engine=False)
    for rank in range(4):
        mine = placement.only(f"trainer/{rank}")
        experts = {int(n.split("experts.")[1].split(".")[0]) for t in mine.tensor if "experts." in (n := mine.metas[t].name)}
        assert experts == set(range(4 * (rank % 2), 4 * (rank % 2) + 4))
        at = [m.name for m in mine.metas].index("model.layers.0.mlp.down_proj.weight")
        (row,) = np.flatnonzero(mine.tensor == at)
        assert (mine.lo[row].tolist(), mine.hi[row].tolist()) == ([0, 12 * (rank % 2)], [12, 12 * (rank % 2) + 12])


def test_tied_embeddings_are_on_both_ends_of_a_pipeline():
    placement = described(TINY, Parallel(pp=3), engine=False)
    at = [m.name for m in placement.metas].index("model.embed_tokens.weight")
    assert sorted(placement.rank[placement.tensor == at].tolist()) == [0, 2]


def test_virtual_stages():
    """Five layers in four stages on two ranks: 2, 1, 1, 1 in turns."""
    placement = described(TINY, Parallel(pp=2, vpp=2), engine=False)
    layers = [{placement.metas[t].layer for t in placement.only(f"trainer/{r}").tensor} - {-1} for r in range(2)]
    assert layers == [{0, 1, 3}, {2, 4}]


def test_few_key_heads_are_replicated():
    placement = described(TINY, Parallel(tp=4), engine=True)
    at = [m.name for m in placement.metas].index("model.layers.0.self_attn.k_proj.weight")
    assert placement.lo[placement.tensor == at][:, 0].tolist() == [0, 0, 4, 4]
    assert placement.ranks == ("e0/0", "e0/1", "e0/2", "e0/3")


def test_boxes_lie_packed_and_apart():
    placement = described(LATENT, Parallel(tp=2), engine=True)
    for rank in placement.ranks:
        mine = placement.only(rank)
        for buffer in range(len(mine.buffers)):
            rows = np.flatnonzero(mine.buffer == buffer)
            ends = (mine.offset + mine.nbytes)[rows]
            order = np.argsort(mine.offset[rows])
            assert np.all(mine.offset[rows][order][1:] >= ends[order][:-1]) and np.all(mine.offset % 64 == 0)


# ---------------------------------------------------------------- traffic


def meta(name, n):
    from mooncake_ray.weights.meta import ParamMeta

    return ParamMeta(name, "uint8", (n,))


def holding(rank, metas):
    return Placement.of(rank, [Fragment(m, (0,), m.shape, m.name, 0, (1,)) for m in metas])


def test_traffic_by_hand():
    """Two trainers with a tensor each; three engine ranks that want both: two on one host, one on another."""
    a, b = meta("a", 6 << 20), meta("b", 2 << 20)
    source = Placement.join([holding("t0", [a]), holding("t1", [b])])
    target = Placement.join([holding(f"e{i}", [a, b]) for i in range(3)])
    topology = Topology({"t0": "T0", "t1": "T1", "e0": "E0", "e1": "E0", "e2": "E1"})
    publication = publish_plan(source)
    delivery = deliver_plan(publication, target)
    moved = traffic_of(publication, delivery, topology)
    assert moved.sources == ("T0", "T1") and moved.targets == ("E0", "E1")
    assert moved.leaving == 8 << 20 and moved.read.sum(axis=1).tolist() == [6 << 20, 2 << 20]
    # What E0 did not read itself it has from E1, and the other way round.
    assert moved.relay.tolist() == [[0, moved.read[:, 0].sum()], [moved.read[:, 1].sum(), 0]]
    assert moved.applied.tolist() == [16 << 20, 8 << 20] and moved.wanted.tolist() == [8 << 20, 8 << 20]
    assert moved.sent.sum() == moved.received.sum() == 16 << 20
    hosts, matrix = moved.matrix()
    assert hosts == ("E0", "E1", "T0", "T1") and matrix.sum() == 16 << 20
    slow = moved.predict(Speeds(nic=1 << 20, host=1e15))
    assert slow.move_s == pytest.approx(8.0) and slow.floor_s == pytest.approx(8.0) and slow.bound_by == "what E1 receives"
    still = moved.predict(Speeds(nic=1e15, host=1 << 20))
    assert (still.publish_s, still.apply_s, still.move_s) == (6.0, 16.0, 8.0)


def test_what_stays_on_a_host_takes_no_link():
    source, target = holding("t0", [meta("a", 1 << 20)]), holding("e0", [meta("a", 1 << 20)])
    publication = publish_plan(source)
    moved = traffic_of(publication, deliver_plan(publication, target), Topology({"t0": "h", "e0": "h"}))
    assert moved.read.tolist() == [[1 << 20]] and moved.sent.sum() == moved.received.sum() == 0


def test_hosts_and_racks():
    topology = joined(on_hosts(["t0", "t1", "t2"], 2, "t", 1), on_hosts(["e0"], 2, "e"), nics=1)
    assert topology.hosts == {"t0": "t-0", "t1": "t-0", "t2": "t-1", "e0": "e-0"}
    assert on_hosts([str(i) for i in range(22)], 2, "h")[0]["21"] == "h-10"
    assert on_hosts([str(i) for i in range(22)], 2, "h")[0]["0"] == "h-00"
    assert topology.distances(["t-0"], ["t-0", "t-1", "e-0"]).tolist() == [[0.125, 2.0, 2.0]]
    assert topology.nics_of(["t0", "t1", "t2"])[0].tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="must be positive and rise"):
        Topology(same_host=3.0)


def test_an_unknown_rank_has_no_units():
    publication = publish_plan(holding("t0", [meta("a", 8)]))
    with pytest.raises(PlanError, match="e7 is not a rank of this delivery, which has 1: e0"):
        deliver_plan(publication, holding("e0", [meta("a", 8)])).units_of("e7")
