"""Damaged nodes and buffers of values are errors, and nothing is read outside of them."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
import torch
from block_sample import Block, nodes_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.data.block import values
from mooncake_ray.data.block.read import Runs, run
from mooncake_ray.errors import CorruptBlockError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


# Damage

SAMPLES = [
    [[1, 2], [3], [], [4, 5, 6]],
    [[True, False], [True]],
    ["abc", "", "déf", "\ud800"],
    ["aaaa", "bbbb"] * 9,
    [b"ab", b"c"],
    [1, None, 3],
    [1, 2.5, None, "a", [1], (2, 3)],
    [{"a": 1, "b": "x"}, {"a": 2, "b": "yy"}],
    [{1: 2, 3: 4}, {5: 6}, {}],
    [{"a": n} if n % 2 else {"b": [n]} for n in range(12)],
    [np.arange(3), np.arange(5)],
    [np.zeros((2, 3)), np.zeros((4, 5))],
    [np.zeros((2, 3))] * 2,
    [torch.zeros(2, 3), torch.zeros(1, 3)],
    [np.float32(1), np.float32(2)],
    [{1}, {2, 3}],
    [2.5, 2.5],
    [7, 7],
    [[1, 2], [3]] * 3,
    [True, False, True],
    [(n, "a" * n) for n in range(9)],
]


BAD = [None, -1, 0, 1, 2, 3, 7, 2**40, 2**47, 2**48, 2**64, 2**2000, 1.5, True, "", "int8", "uint8", "float64", "<U0", "|O", "zz"]
BAD += [[], [1], [-1], [2**47, 2**47], [{}], {}, "none", "const", "list", "tuple", "map", "struct", "union", "nullable", "shared"]
BAD += ["arrays", "tensors", "object", "numpy", "text", "bytes", "ints", "strided"]


@pytest.mark.parametrize("rows", SAMPLES, ids=range(len(SAMPLES)))
def test_a_damaged_index(rows):
    """Whatever a field says instead, the answer is an error of ours or some values, and no byte outside is asked for (the fetch checks)."""
    block = Block(rows)
    count = sum(1 for _ in nodes_of(block.node))
    told = 0
    for number in range(count):
        for name in list(list(nodes_of(block.node))[number]):
            for bad in [*BAD, "left out"]:
                node = json.loads(json.dumps(block.node))
                fields = list(nodes_of(node))[number]
                if bad == "left out":
                    del fields[name]
                else:
                    fields[name] = bad
                try:
                    run(values.decode(node, Runs.span(0, len(rows))), block.fetch)
                except CorruptBlockError:
                    told += 1
    assert told > 20 * count


@pytest.mark.parametrize("rows", SAMPLES, ids=range(len(SAMPLES)))
def test_short_buffers(rows):
    block = Block(rows)
    for number, data in enumerate(block.buffers):
        if data.nbytes:
            block.buffers[number] = data[:-1]
            with pytest.raises(CorruptBlockError):
                block.read()
            block.buffers[number] = data
    block.read()


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([rows for n, rows in enumerate(SAMPLES) if n != 15]), st.data())
def test_damaged_buffers(rows, data):
    block = Block(rows)
    if not block.nbytes:
        return
    number = data.draw(st.sampled_from([n for n, each in enumerate(block.buffers) if each.nbytes]))
    changed = block.buffers[number].copy()
    at = data.draw(st.integers(0, changed.nbytes - 1))
    changed[at] = data.draw(st.integers(0, 255))
    block.buffers[number] = changed
    with contextlib.suppress(CorruptBlockError):
        block.read()
        block.at(0, len(rows) - 1)


def test_offsets_that_fall_and_that_wrap_around():
    for wrong in ([0, 3, 2, 6], [0, 7, 7, 7], [5, 4, 3, 6], [0, 2**63 - 1, 2**64 - 2, 6], [2**64 - 1, 1, 2, 6]):
        block = Block([[1, 2], [300], [4, 5, 6]])
        block.buffers[block.node["offsets"]] = np.array(wrong, np.uint64).view(np.uint8)
        block.node["offset_type"] = "uint64"
        with pytest.raises(CorruptBlockError, match="offsets"):
            block.read()


def test_tags_without_a_child():
    block = Block([1, "a"] * 3)
    block.buffers[block.node["tags"]] = np.array([0, 1, 0, 2, 0, 1], np.uint8)
    with pytest.raises(CorruptBlockError, match="child 2 of 2"):
        block.read()


def test_rows_that_are_not_there():
    block = Block([[1], [2, 3]])
    for wrong in (Runs.span(0, 3), Runs.span(-1, 1), Runs.span(2, 1), Runs.of(np.array([0, 2]))):
        with pytest.raises(CorruptBlockError, match="rows"):
            block.read(wrong)
