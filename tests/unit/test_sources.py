"""What plain modules, DTensors and state dicts say they hold is what they hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.dtensor import boxes
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.shard import Shard, views
from mooncake_ray.weights.source import ModuleSource, StateDictSource


def assembled(*shards) -> dict[str, torch.Tensor]:
    """Whole tensors out of shards' boxes; every element must be there."""
    out, seen = {}, {}
    for shard in shards:
        placement = Placement.of("r", shard.fragments())
        for i, view in enumerate(views(placement, shard.buffers())):
            meta = placement.metas[placement.tensor[i]]
            n = len(meta.shape)
            d = placement.lo.shape[1]
            at = tuple(slice(*b) for b in zip(placement.lo[i][d - n :], placement.hi[i][d - n :], strict=True))
            whole = out.setdefault(meta.name, torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype)))
            whole[at] = view.reshape(view.shape[d - n :])
            seen.setdefault(meta.name, torch.zeros(meta.shape, dtype=torch.bool))[at] = True
    assert all(bool(s.all()) for s in seen.values())
    return out


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_module_is_its_state_dict():
    module = Tied()
    source = ModuleSource(module)
    assert isinstance(source, Shard)
    equal(assembled(source), dict(module.state_dict()))  # scratch is not in it; num_batches_tracked has no dimensions


def test_vllm_56689_tied_names_are_not_dropped():
    source = ModuleSource(Tied())
    assert source.aliases == {"head.weight": "embed.weight"}
    rows = {f.meta.name: f for f in source.fragments()}
    assert rows["head.weight"].buffer == rows["embed.weight"].buffer == "embed.weight"


def test_replaced_parameters_are_seen():
    module = torch.nn.Linear(3, 2)
    source = ModuleSource(module)
    module.weight = torch.nn.Parameter(torch.full((2, 3), 7.0))
    equal(assembled(source), dict(module.state_dict()))
    module.weight = torch.nn.Parameter(torch.zeros(3, 2).t())
    with pytest.raises(PlanError, match=r"weight was .* and is"):
        source.buffers()


def test_names():
    module = torch.nn.Linear(3, 2)
    assert {f.meta.name for f in ModuleSource(module, {"weight": "w", "bias": None}.get).fragments()} == {"w"}
    with pytest.raises(PlanError, match="bias has no canonical name"):
        ModuleSource(module, {"weight": "w"})
    with pytest.raises(PlanError, match="w is both weight and bias"):
        ModuleSource(module, lambda name: "w")
    wrapped = torch.nn.Module()
    wrapped._orig_mod = module
    assert {f.meta.name for f in ModuleSource(wrapped).fragments()} == {"weight", "bias"}


def test_parts_of_a_state_dict():
    whole = torch.arange(35).reshape(5, 7)
    parts = {"a": whole[:2].clone(), "b": whole[2:, :3], "c": whole[2:, 3:].t().contiguous().t()}
    source = StateDictSource(parts, {"a": ((5, 7), (0, 0), "w"), "b": ((5, 7), (2, 0), "w"), "c": ((5, 7), (2, 3), "w")})
    equal(assembled(source), {"w": whole})
    with pytest.raises(PlanError, match="is not in a tensor"):
        StateDictSource({"a": whole}, {"a": ((5, 8), (0, 2))})
    with pytest.raises(PlanError, match="boxes are given for 1 tensors that are not there: z"):
        StateDictSource({"a": whole}, {"z": ((5, 7), (0, 0))})


@st.composite
def sharded(draw):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    kinds = st.one_of(
        st.just(Replicate()), dims.map(Shard), st.builds(lambda d, n: _StridedShard(d, split_factor=n), dims, st.integers(1, 4))
    )
    return shape, mesh, [draw(kinds) for _ in mesh]


@given(sharded())
@settings(deadline=None, max_examples=150)
def test_boxes_are_torchs(case):
    """Against torch's own split of the whole, placement by placement."""
    shape, mesh, placements = case
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for coordinate in torch.cartesian_prod(*(torch.arange(n) for n in mesh)).reshape(-1, len(mesh)).tolist():
        local = whole
        for size, at, placement in zip(mesh, coordinate, placements, strict=True):
            if not placement.is_replicate():
                local = placement._split_tensor(local, size, with_padding=False, contiguous=False)[0][at]
        there = torch.full(local.shape, -1)
        for lo, hi, at in boxes(shape, mesh, coordinate, placements):
            assert all(a < b for a, b in zip(lo, hi, strict=True))
            box = whole[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]
            there[tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))] = box
        assert torch.equal(there, local)
