"""Boxes that lie anywhere are copied, and checked first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.engines.packed import PackedPieces
from mooncake_ray.errors import PlanError
from mooncake_ray.weights.laid import Laid, Sources, copy, in_memory
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.shard import fitting, views
from mooncake_ray.weights.source import StateDictSource

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


@st.composite
def shards(draw):
    """Tensors of any dtype and layout."""
    out = {}
    for n in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=3))
        tensor = torch.randint(0, 100, shape).to(draw(st.sampled_from(DTYPES)))
        order = draw(st.permutations(range(len(shape))))
        out[f"t{n}"] = tensor.permute(*order).contiguous().permute(*np.argsort(order).tolist()) if shape else tensor
    return StateDictSource(out)


@settings(max_examples=60, deadline=None)
@given(shards(), st.data())
def test_what_is_packed_comes_back(shard, data):
    placement = Placement.of("r", shard.fragments())
    which = np.array(data.draw(st.permutations(range(len(placement)))), np.int64)
    nbytes = placement.nbytes[which]
    offsets = np.concatenate([[0], np.cumsum(-(-nbytes // 64) * 64)])
    out = np.zeros(int(offsets[-1]), np.uint8)
    Sources(placement, shard.buffers()).pack(which, out, offsets[:-1])
    whole = list(views(placement, shard.buffers()))
    for i, at, n in zip(which.tolist(), offsets.tolist(), nbytes.tolist(), strict=False):
        assert torch.equal(torch.from_numpy(out[at : at + n]).view(whole[i].dtype).view(whole[i].shape), whole[i])

    back = StateDictSource({name: torch.zeros_like(t) for name, t in shard.buffers().items()})
    at = np.empty(len(which), np.int64)
    at[which] = offsets[:-1]
    pieces = PackedPieces(placement, [out], np.zeros(len(which), np.int64), at)
    copy(pieces.laid(), Laid.of(placement, back.buffers()))
    assert all(torch.equal(a, back.buffers()[name]) for name, a in shard.buffers().items())
    assert all(torch.equal(piece, whole[i]) for i, piece in pieces)


def test_what_is_there_twice_is_written_once():
    tensor = torch.zeros(4)
    there = Laid.of(*placed({"a": tensor, "b": tensor, "c": torch.zeros(4)}))
    assert there.distinct.tolist() == [0, 2]


def test_other_shapes_are_refused():
    a, b = (Laid.of(*placed({"a": torch.zeros(n)})) for n in (3, 4))
    with pytest.raises(ValueError, match="1 boxes are to be copied to 1 of other shapes"):
        copy(a, b)


@pytest.mark.parametrize(
    ("buffers", "why"),
    [
        ({}, "a: there is no buffer 'a'"),
        ({"a": torch.zeros(4, dtype=torch.float16)}, "a: buffer 'a' is torch.float16, not float32"),
        ({"a": torch.zeros(3)}, "a: ends at byte 16 of buffer 'a', which has 12"),
    ],
)
def test_what_does_not_fit(buffers, why):
    placement, _ = placed({"a": torch.zeros(4)})
    for look in (fitting, Laid.of, Sources, lambda p, b: list(views(p, b))):
        with pytest.raises(PlanError, match=why):
            look(placement, buffers)


def test_a_device_is_no_memory():
    assert in_memory({"a": torch.zeros(1)}) and not in_memory({"a": torch.zeros(1), "b": torch.zeros(1, device="meta")})


def placed(tensors):
    shard = StateDictSource(tensors)
    return Placement.of("r", shard.fragments()), shard.buffers()
