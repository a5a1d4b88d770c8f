"""Views as boxes, and what of a tensor is written: against index arithmetic done element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.coverage import Coverage
from mooncake_ray.weights.strided import Axis, boxes, storage_order


def elements(shape, view, target_strides, to):
    """Each element of the view: (its index in the whole, its index at the other end), by brute force."""
    numbers = torch.arange(math.prod(shape)).as_strided(view.shape, view.stride(), view.storage_offset())
    out = []
    for index in np.ndindex(*view.shape):
        out.append((int(numbers[index]), to + sum(i * s for i, s in zip(index, target_strides, strict=True))))
    return sorted(out)


def expanded(shape, pieces):
    steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    out = []
    for p in pieces:
        for index in np.ndindex(*(b - a for a, b in zip(p.lo, p.hi, strict=True))):
            at = sum((a + i) * s for a, i, s in zip(p.lo, index, steps, strict=True))
            out.append((at, p.offset + sum(i * s for i, s in zip(index, p.strides, strict=True))))
    return sorted(out)


@st.composite
def chains(draw):
    """A tensor, and a view of it that some view operations made."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    view = torch.arange(math.prod(shape)).view(shape)
    for _ in range(draw(st.integers(0, 5))):
        kinds = ["flatten", "unsqueeze", "squeeze", "reshape"]
        if view.dim():
            kinds += ["narrow", "transpose", "select", "step", "unflatten"]
        kind = draw(st.sampled_from(kinds))
        dim = draw(st.integers(0, max(view.dim() - 1, 0)))
        if kind == "narrow":
            begin = draw(st.integers(0, view.shape[dim]))
            view = view.narrow(dim, begin, draw(st.integers(0, view.shape[dim] - begin)))
        elif kind == "transpose":
            view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
        elif kind == "select" and view.shape[dim]:
            view = view.select(dim, draw(st.integers(0, view.shape[dim] - 1)))
        elif kind == "step":
            index = [slice(None)] * dim + [slice(None, None, draw(st.integers(1, 3)))]
            view = view[tuple(index)]
        elif kind == "unflatten" and view.shape[dim]:
            parts = [n for n in range(1, view.shape[dim] + 1) if view.shape[dim] % n == 0]
            view = view.unflatten(dim, (draw(st.sampled_from(parts)), -1))
        elif kind == "unsqueeze":
            view = view.unsqueeze(dim)
        elif kind == "squeeze":
            view = view.squeeze()
        elif kind == "flatten" and view.is_contiguous():
            view = view.view(-1)
        elif kind == "reshape" and view.is_contiguous():
            parts = [n for n in range(1, view.numel() + 1) if view.numel() % n == 0]
            view = view.view(draw(st.sampled_from(parts)) if parts else 0, -1) if view.numel() else view
    packed = draw(st.permutations(range(view.dim())))
    strides, step = [0] * view.dim(), draw(st.integers(1, 3))
    for i in packed:
        strides[i] = step
        step *= max(view.shape[i], 1)
    return shape, view, strides, draw(st.integers(0, 5))


@settings(deadline=None, max_examples=400)
@given(chains())
def test_boxes(case):
    shape, view, strides, to = case
    axes = [Axis(n, s, t) for n, s, t in zip(view.shape, view.stride(), strides, strict=True)]
    assert expanded(shape, boxes(shape, axes, view.storage_offset(), to)) == elements(shape, view, strides, to)


def count(view, shape):
    axes = [Axis(n, s, math.prod(view.shape[i + 1 :])) for i, (n, s) in enumerate(zip(view.shape, view.stride(), strict=True))]
    return len(list(boxes(shape, axes, view.storage_offset())))


def test_common_layouts_are_few_boxes():
    whole = torch.empty(24, 10)
    assert count(whole, (24, 10)) == count(whole.t(), (24, 10)) == count(whole.view(-1), (24, 10)) == 1
    assert count(whole.view(4, 6, 10)[:, :2], (24, 10)) == 4, "a band a group"
    assert count(whole.view(-1)[5:47], (24, 10)) == 3, "the end of a row, whole rows, the beginning of one"
    assert count(whole[::2], (24, 10)) == 12


def test_an_element_has_one_place():
    with pytest.raises(PlanError, match="repeated"):
        list(boxes((3, 1), [Axis(3, 1, 4), Axis(4, 0, 1)], 0))
    assert list(boxes((3, 1), [Axis(0, 1, 4), Axis(4, 0, 1)], 0)) == []


def test_too_scattered():
    whole = torch.empty(1 << 18)
    with pytest.raises(PlanError, match="65536 boxes"):
        count(whole[::2], (1 << 18,))
    with pytest.raises(PlanError, match="65536 boxes"):
        count(torch.empty(600, 600)[::2, ::2], (600, 600))


def test_storage_order():
    assert storage_order((2, 3), (3, 1)) == [0, 1]
    assert storage_order((2, 3), (1, 2)) == [1, 0]
    assert storage_order((2, 3), (4, 1)) is None
    assert storage_order((2, 1, 3), (3, 99, 1)) is not None


rectangles = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))


@settings(deadline=None, max_examples=300)
@given(st.lists(rectangles, max_size=4), st.lists(rectangles, max_size=3))
def test_coverage(loads, fills):
    whole = Coverage("w", (4, 4), (4, 1))
    written = np.zeros((4, 4), int)
    filled = np.zeros((4, 4), bool)

    def place(r):
        a, b, c, d = min(r[0], r[1]), max(r[0], r[1]), min(r[2], r[3]), max(r[2], r[3])
        return slice(a, b), slice(c, d), 4 * a + c, (b - a, d - c)

    for r in fills:
        rows, columns, offset, lengths = place(r)
        whole.fill(offset, lengths, (4, 1))
        filled[rows, columns] = True
    for r in loads:
        rows, columns, offset, lengths = place(r)
        whole.load("q", offset, lengths, (4, 1))
        written[rows, columns] += 1
    if (written > 1).any():
        with pytest.raises(PlanError, match="same place"):
            whole.gap()
    else:
        assert (whole.gap() == "") == bool((filled | (written == 1)).all())
