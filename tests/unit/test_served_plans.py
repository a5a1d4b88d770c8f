"""From trainers that hold a model in random parts to all ranks of an engine that fuses and shards it: what they hold in the end is what their
own loaders would have loaded."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_models import MLA, MOE, Ranks, Sizes, TinyServed, metas_of, whole_model
from test_plan import cuts, delivered, published

from mooncake_ray.engines.torch_module import TorchModuleEngine
from mooncake_ray.weights.placement import Fragment, Placement
from mooncake_ray.weights.plan import deliver_plan, lower, publish_plan
from mooncake_ray.weights.tracing import TracedTarget


@st.composite
def trainers(draw, metas):
    """Each tensor cut along one dimension, each part on some ranks."""
    ranks = [f"t{i}" for i in range(draw(st.integers(1, 3)))]
    held = {rank: [] for rank in ranks}
    for meta in metas:
        dim = draw(st.integers(0, len(meta.shape) - 1))
        edges = cuts(draw, meta.shape[dim], draw(st.integers(1, 3)))
        for n, (a, b) in enumerate(itertools.pairwise(edges)):
            lo, hi = [0] * len(meta.shape), list(meta.shape)
            lo[dim], hi[dim] = a, b
            strides, step = [], meta.itemsize
            for i in reversed(range(len(meta.shape))):
                strides.insert(0, step)
                step *= hi[i] - lo[i]
            for rank in draw(st.sets(st.sampled_from(ranks), min_size=1)):
                held[rank].append(Fragment(meta, tuple(lo), tuple(hi), f"{meta.name}/{n}", 0, tuple(strides)))
    return Placement.join([Placement.of(rank, fragments) for rank, fragments in held.items()])


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_trainer_to_a_served_model(data):
    c = data.draw(st.sampled_from([Sizes(num_hidden_layers=1), replace(MOE, num_hidden_layers=2), replace(MLA, num_hidden_layers=2)]))
    c = replace(c, num_key_value_heads=data.draw(st.sampled_from([1, 2, 4])), tie_word_embeddings=data.draw(st.booleans()))
    tp_size = data.draw(st.sampled_from([1, 2, 4]))
    ep_size = data.draw(st.sampled_from([1, 3])) if c.num_experts else 1
    whole = whole_model(c, 1)
    metas = metas_of(whole)
    source = data.draw(trainers(metas))
    where = [Ranks(tp, tp_size, ep, ep_size) for ep in range(ep_size) for tp in range(tp_size)]
    modules = [TinyServed(c, r) for r in where]
    engines = [TorchModuleEngine(m, shard=TracedTarget(m, metas)) for m in modules]
    target = Placement.join([Placement.of(f"e/{i}", e.shard().fragments()) for i, e in enumerate(engines)])

    publication = publish_plan(source, bucket_bytes=1 << 10)
    delivery = deliver_plan(publication, target)
    objects = published(publication, source, {n: t.numpy() for n, t in whole.items()})
    units = delivered(publication, delivery, objects)
    assert sum(int(lower(publication, delivery, u).runs[:, 3].sum()) for u in range(delivery.units)) >= sum(m.nbytes for m in metas)

    first = 0
    for r, module, engine in zip(where, modules, engines, strict=True):
        placement = Placement.of("", engine.shard().fragments())

        def staged(placement=placement, first=first):
            for i in range(len(placement)):
                box = delivery.box_of[first + i]
                data = units[delivery.unit[box]][delivery.offset[box] :][: delivery.nbytes[box]]
                yield i, torch.from_numpy(data.view(np.float32)).view((placement.hi[i] - placement.lo[i]).tolist())

        engine.start_weight_update()
        engine.pause()
        engine.update_weights({"pieces": staged()})
        engine.finish_weight_update(1)
        first += len(placement)
        loaded = TinyServed(c, r)
        loaded.load_weights(whole.items())
        for (name, a), (_, b) in zip(loaded.named_parameters(), module.named_parameters(), strict=True):
            assert torch.equal(torch.where(a == 0, 0, a), torch.where(a == 0, 0, b)), name
