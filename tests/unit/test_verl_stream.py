"""The stream of named tensors: whoever sees the same tensors cuts the same buckets, and joined again they are the same tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.errors import PlanError
from mooncake_ray.integrations.verl_weights.stream import Cutter, Joiner

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float64]
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
models = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=12)


def tensors_of(model) -> dict[str, torch.Tensor]:
    made = {}
    for n, (shape, dtype) in enumerate(model):
        draw = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=torch.Generator().manual_seed(n))
        made[f"t{n}"] = draw.to(dtype)
    return made


def cut_by(tensors, size: int, world: int):
    """What each rank writes, by bucket; and what each has seen."""
    written, seen = {}, []
    for rank in range(world):
        cutter = Cutter(size, rank, world)
        cuts = [cut for name, tensor in tensors.items() for cut in cutter.add(name, tensor)] + list(cutter.finish())
        for cut in cuts:
            out = np.full(cut.nbytes, 0xAA, np.uint8)
            cut.write(out)
            assert cut.number not in written and cut.number % world == rank
            written[cut.number] = tuple(cut.tensors), out
        seen.append((cutter.digest, cutter.buckets, cutter.nbytes))
    assert len(set(seen)) == 1
    return written, seen[0]


@settings(deadline=None, max_examples=300)
@given(models, st.integers(1, 6).map(lambda n: 64 * n), st.integers(1, 4))
def test_joined_they_are_the_same_tensors(model, size, world):
    tensors = tensors_of(model)
    written, (_, buckets, nbytes) = cut_by(tensors, size, world)
    assert sorted(written) == list(range(buckets)) and nbytes == sum(t.nbytes for t in tensors.values())
    assert all(len(out) <= size for _, out in written.values())
    joiner = Joiner(size)
    got = [item for number in range(buckets) for item in joiner.add(number, *written[number])]
    assert [name for name, _ in got] == list(tensors)
    for name, tensor in got:
        assert tensor.dtype == tensors[name].dtype and tensor.shape == tensors[name].shape
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), tensors[name].reshape(-1).view(torch.uint8))


@settings(deadline=None, max_examples=100)
@given(models, st.integers(1, 6).map(lambda n: 64 * n), st.integers(1, 4))
def test_what_is_written_depends_on_nothing_else(model, size, world):
    """Gaps are zeros: the same tensors are the same bytes, whoever writes them."""
    tensors = tensors_of(model)
    alone, together = cut_by(tensors, size, 1)[0], cut_by(tensors, size, world)[0]
    assert all(np.array_equal(alone[k][1], together[k][1]) for k in together) and alone.keys() == together.keys()


def test_other_tensors_have_another_digest():
    def digest(**tensors):
        return cut_by(tensors, 64, 1)[1][0]

    a = torch.zeros(4)
    assert digest(a=a, b=a) == digest(a=a + 1, b=a)
    assert len({digest(a=a, b=a), digest(b=a, a=a), digest(a=a.half(), b=a), digest(a=a.view(2, 2), b=a), digest(a=a)}) == 5


def test_tensors_that_are_not_contiguous():
    base = torch.arange(12, dtype=torch.float32).view(3, 4)
    written, (_, buckets, _) = cut_by({"t": base.t(), "step": base[:, ::2]}, 64, 2)
    joiner = Joiner(64)
    got = dict(item for number in range(buckets) for item in joiner.add(number, *written[number]))
    assert torch.equal(got["t"], base.t()) and torch.equal(got["step"], base[:, ::2])


def test_what_cannot_be_cut():
    with pytest.raises(PlanError, match="64"):
        Cutter(100, 0, 1)
    cutter = Cutter(64, 0, 1)
    list(cutter.add("a", torch.zeros(2)))
    with pytest.raises(PlanError, match="two tensors of the name 'a'"):
        list(cutter.add("a", torch.zeros(2)))
    with pytest.raises(PlanError, match="sparse"):
        list(cutter.add("b", torch.zeros(2).to_sparse()))


def test_a_bucket_that_is_missing():
    written, _ = cut_by({"a": torch.zeros(64)}, 64, 1)
    joiner = Joiner(64)
    list(joiner.add(0, *written[0]))
    with pytest.raises(PlanError, match="bucket 2"):
        list(joiner.add(2, *written[2]))
