"""Random models, cut up at random, with real bytes: what tests of snapshots and of deltas on disk begin with."""

from __future__ import annotations

import itertools

import torch
from hypothesis import strategies as st

from mooncake_ray.weights.source import StateDictSource

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.int64, torch.float8_e8m0fnu]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor):
    return tensor.view(INTEGERS[tensor.element_size()])


def same(a, b):
    """Bit for bit: NaNs are what they are."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(bits(a[k]), bits(b[k])) for k in a)


def filled(shape, dtype, seed):
    rng = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=rng).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=rng)
    return raw.view(dtype).reshape(shape)


@st.composite
def models(draw):
    """Whole tensors by name."""
    out = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        name = f"layers.{draw(st.integers(0, 2))}.t{number}" if draw(st.booleans()) else f"t{number}"
        out[name] = filled(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1000)))
    return out


def _cuts(draw, length):
    inner = sorted(draw(st.lists(st.integers(0, length), max_size=2)))
    return list(itertools.pairwise([0, *inner, length]))


@st.composite
def layouts(draw, shapes, prefix):
    """`{rank: {key: (name, lo, hi, permutation)}}`: each tensor cut into a grid, each cell on some ranks, in some order of its dimensions."""
    ranks = [f"{prefix}{n}" for n in range(draw(st.integers(1, 4)))]
    held = {rank: {} for rank in ranks}
    for name, shape in shapes.items():
        for n, cell in enumerate(itertools.product(*(_cuts(draw, length) for length in shape))):
            lo, hi = tuple(a for a, _ in cell), tuple(b for _, b in cell)
            for rank in draw(st.sets(st.sampled_from(ranks), min_size=1)):
                held[rank][f"{name}/{n}"] = (name, lo, hi, tuple(draw(st.permutations(range(len(shape))))))
    return held


def shards(layout, tensors, *, empty=False):
    """A shard for each rank, whose tensors are copies of those parts (or noise), and lie in memory in their permuted order."""
    out = {}
    for rank, cells in layout.items():
        held, boxes = {}, {}
        for key, (name, lo, hi, order) in cells.items():
            cell = tensors[name][tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]
            inverse = [order.index(n) for n in range(len(order))]
            held[key] = cell.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)
            if empty and cell.numel():
                bits(held[key]).copy_(bits(filled(tuple(cell.shape), cell.dtype, 12345)))
            boxes[key] = (tuple(tensors[name].shape), lo, name)
        out[rank] = StateDictSource(held, boxes)
    return out


def is_held(layout, shard_by_rank, tensors):
    """Whether every rank holds exactly its parts of these tensors."""
    wanted = shards(layout, tensors)
    return all(same(dict(shard_by_rank[rank].mapping), dict(wanted[rank].mapping)) for rank in layout)
