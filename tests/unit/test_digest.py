"""Content digests: what the page says they are, by NumPy; that parts add up; that what goes wrong is seen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.weights.digest import content_digest

ITEMS = (1, 2, 4, 8)


def terms(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """As the module says, with 64-bit integers: `index` in the whole tensor of each of `values`."""
    low = np.uint64(0xFFFFFFFF)

    def part(a, b):  # a * b modulo 2^32
        return a * np.uint64(b) & low

    x, i = values.astype(np.uint64), index.astype(np.uint64)
    x_lo, x_hi, i_lo, i_hi = x & low, x >> np.uint64(32), i & low, i >> np.uint64(32)
    u = (part(i_lo, 0x9E3779B1) + part(i_hi, 0x7FEB352D)) & low
    u ^= u >> np.uint64(15)
    u = part(u, 0xD168AAAD)
    u ^= u >> np.uint64(15)
    a = (part(x_lo, 0xAF723597) + part(x_hi, 0x31848BAB) + u) & low
    turned = (u << np.uint64(16) | u >> np.uint64(16)) & low
    b = (part(x_lo, 0x2C1B3C6D) + part(x_hi, 0x297A2D39) + turned + part(i_hi, 0x846CA68B)) & low
    return a * b


def oracle(values: np.ndarray, lo, shape) -> int:
    index = np.zeros(values.shape, object)
    step = 1
    for k in range(values.ndim - 1, -1, -1):
        at = (np.arange(values.shape[k]).astype(object) + lo[k]) * step
        index = index + at.reshape([-1 if j == k else 1 for j in range(values.ndim)])
        step *= shape[k]
    return int(np.sum(terms(values, index.astype(np.uint64)), dtype=np.uint64)) if values.size else 0


def bits(rng, shape, item) -> np.ndarray:
    return rng.integers(0, 1 << 8 * item, shape, f"uint{8 * item}", endpoint=False)


@st.composite
def boxes(draw):
    """Item size, extents of a box, where it is, and the shape of the tensor: possibly a huge one."""
    d = draw(st.integers(0, 4))
    extents = [draw(st.integers(0, 70 if d < 3 else 9)) for _ in range(d)]
    far = draw(st.sampled_from([0, 5, 1 << 20, 1 << 33]))
    lo = [draw(st.integers(0, far if k < 2 else 5)) for k in range(d)]
    shape = [a + n + draw(st.integers(0, 3)) for a, n in zip(lo, extents, strict=True)]
    return draw(st.sampled_from(ITEMS)), extents, lo, shape, draw(st.integers(0, 1 << 32))


@settings(max_examples=200, deadline=None)
@given(boxes())
def test_it_is_what_the_page_says(box):
    item, extents, lo, shape, seed = box
    if np.prod([float(s) for s in shape]) >= 2.0**63:
        return
    values = bits(np.random.default_rng(seed), extents, item)
    assert content_digest(values, lo, shape) == oracle(values, lo, shape)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_strides_do_not_matter(data):
    d = data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    item = data.draw(st.sampled_from(ITEMS))
    extents = [data.draw(st.integers(1, 20)) for _ in range(d)]
    order = data.draw(st.permutations(range(d)))
    every = [data.draw(st.integers(1, 3)) for _ in range(d)]
    memory = bits(rng, [extents[k] * every[k] for k in order], item)
    view = memory.transpose(np.argsort(order))[tuple(slice(None, None, e) for e in every)]
    assert view.shape == tuple(extents)
    values = np.ascontiguousarray(view)
    assert content_digest(view, [0] * d, extents) == oracle(values, [0] * d, extents)
    assert content_digest(view[::-1], [0] * d, extents) == oracle(values[::-1], [0] * d, extents)
    tensor = torch.from_numpy(memory.view(f"int{8 * item}")).permute(*np.argsort(order).tolist())
    tensor = tensor[tuple(slice(None, None, e) for e in every)]
    assert content_digest(tensor, [0] * d, extents) == oracle(values, [0] * d, extents)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_parts_add_up_in_any_layout(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    shape = (data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40)), data.draw(st.integers(1, 6)))
    values = bits(rng, shape, data.draw(st.sampled_from(ITEMS)))
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    total = 0
    for a, b in itertools.pairwise(cuts[0]):
        for c, d in itertools.pairwise(cuts[1]):
            for e, f in itertools.pairwise(cuts[2]):
                total += content_digest(values[a:b, c:d, e:f], (a, c, e), shape)
    assert total % 2**64 == content_digest(values, (0, 0, 0), shape)


def test_many_elements_on_several_threads():
    values = bits(np.random.default_rng(3), (3001, 1777), 2)
    whole = content_digest(values, (0, 0), values.shape)
    assert whole == oracle(values, (0, 0), values.shape)
    turned = np.asfortranarray(values)
    assert content_digest(turned, (0, 0), values.shape) == whole
    parts = content_digest(values[:, :5], (0, 0), values.shape) + content_digest(values[:, 5:], (0, 5), values.shape)
    assert parts % 2**64 == whole


@pytest.mark.parametrize("item", ITEMS)
def test_every_bit_and_every_place_matters(item):
    rng = np.random.default_rng(item)
    values = bits(rng, (64, 48), item)
    whole = content_digest(values, (0, 0), values.shape)
    seen = {whole}
    for _ in range(300):
        i, j, bit = rng.integers(64), rng.integers(48), int(rng.integers(8 * item))
        other = values.copy()
        other[i, j] ^= values.dtype.type(1 << bit)
        seen.add(content_digest(other, (0, 0), values.shape))
        if values[i, j] != values[i - 1, j]:
            other = values.copy()
            other[[i, i - 1], j] = other[[i - 1, i], j]
            assert content_digest(other, (0, 0), values.shape) != whole
    assert len(seen) > 250  # as many as there were different changes, but for repeated ones
    assert content_digest(values, (0, 0), (64, 49)) != whole  # a tensor of another shape
    assert content_digest(values, (1, 0), (65, 48)) != whole  # shifted
    zeros = np.zeros((64, 48), values.dtype)
    assert content_digest(zeros[:63], (0, 0), (64, 48)) != content_digest(zeros, (0, 0), (64, 48))  # a row is missing


def test_leading_ones_and_dtypes():
    weight = torch.randn(6, 10).to(torch.bfloat16)
    plain = content_digest(weight, (2, 0), (9, 10))
    assert content_digest(weight.view(1, 1, 6, 10), (0, 0, 2, 0), (9, 10)) == plain
    assert content_digest(weight, (0, 2, 0), (1, 9, 10)) == plain
    assert content_digest(weight.view(torch.int16), (2, 0), (9, 10)) == plain
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.int8, torch.float64, torch.complex64):
        value = torch.zeros(3).to(dtype)
        assert content_digest(value, (0,), (3,)) == oracle(np.zeros(3, f"uint{8 * value.element_size()}"), (0,), (3,))


def test_what_it_refuses():
    with pytest.raises(ValueError, match=r"at \(3,\) is not in a tensor of shape \(5,\)"):
        content_digest(np.zeros(3, np.uint16), (3,), (5,))
    with pytest.raises(ValueError, match="elements of 16 bytes"):
        content_digest(torch.zeros(3, dtype=torch.complex128), (0,), (3,))
    with pytest.raises(ValueError, match="on meta"):
        content_digest(torch.zeros(3, device="meta"), (0,), (3,))
