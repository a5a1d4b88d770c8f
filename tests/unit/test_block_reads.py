"""How many bytes values take in a block, and how many are read of them."""

from __future__ import annotations

import json
import pickle
import uuid

import numpy as np
import pytest
import torch
from block_sample import Block, check, same

from mooncake_ray.data.block.read import Runs

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


# Sizes

ROWS = 1000
LENGTHS = np.random.default_rng(0).integers(0, 200, ROWS).tolist()
ITEMS = sum(LENGTHS)
OFFSETS = 4 * (ROWS + 1)


def ragged(make) -> list:
    return [[make(row, n) for n in range(length)] for row, length in enumerate(LENGTHS)]


@pytest.mark.parametrize(
    ("rows", "nbytes"),
    [
        (ragged(lambda row, n: (row * 7919 + n) % 151_936), 4 * ITEMS + OFFSETS),
        (ragged(lambda row, n: n % 256), ITEMS + OFFSETS),
        (ragged(lambda row, n: -(n % 100)), ITEMS + OFFSETS),
        (ragged(lambda row, n: n % 3 == 0), ITEMS / 8 + 1 + OFFSETS),
        (ragged(lambda row, n: 1), OFFSETS),
        (ragged(lambda row, n: 0.0), OFFSETS),
        (ragged(lambda row, n: True), OFFSETS),
        (ragged(lambda row, n: float(np.float32(0.1) * n)), 4 * ITEMS + OFFSETS),
        (ragged(lambda row, n: 0.1 * n), 8 * ITEMS + OFFSETS),
        ([[n, n + 1] for n in range(ROWS)], 2 * 2 * ROWS),
        ([(n % 7, n % 9) for n in range(ROWS)], 2 * ROWS),
        ([None if n % 2 else n for n in range(ROWS)], ROWS / 8 + 2 * ROWS),
        (["user" if n % 3 else "assistant" for n in range(ROWS)], ROWS + 13 + 3),
        ([str(uuid.UUID(int=n)) for n in range(ROWS)], 36 * ROWS),
        ([{"role": "user", "content": "x" * 10 + str(n).zfill(5), "turn": n} for n in range(ROWS)], 17 * ROWS + 15 + 4),
        ([np.float32(n) for n in range(ROWS)], 4 * ROWS),
        ([np.full((n, 4), n, np.uint8) for n in LENGTHS], 4 * ITEMS + OFFSETS),
        ([torch.full((n, 4), n, dtype=torch.bfloat16) for n in LENGTHS], 8 * ITEMS + OFFSETS),
        ([torch.full((3, 4), n, dtype=torch.int32) for n in LENGTHS], 48 * ROWS),
        ([n if n % 2 else n / 2 for n in range(ROWS)], ROWS * (1 + 2 + 1 + 2)),
        (["ab"[n % 2] for n in range(ROWS)], ROWS),
        ([(n,) if n % 2 else () for n in range(ROWS)], 2 * (ROWS + 1) + ROWS),
        ([[(0.1 * m, m, None) for m in range(n)] for n in LENGTHS], (8 + 1) * ITEMS + OFFSETS),
    ],
    ids=[
        *("tokens", "uint8", "int8", "mask", "ones", "zeros", "trues", "float32", "float64", "pairs", "tuples", "nulls", "roles", "uuids"),
        *("structs", "scalars", "arrays", "tensors", "shape", "union", "letters", "empty", "records"),
    ],
)  # fmt: skip
def test_size(rows, nbytes):
    block = check(rows)
    assert block.nbytes <= nbytes
    assert len(json.dumps(block.node)) < 1500


def test_a_pickle_of_the_same_is_larger():
    rows = [{"role": "user", "content": f"text {n}", "scores": [n / 8, 0.5], "meta": {"turn": n, "tags": ("a", "b")}} for n in range(ROWS)]
    assert check(rows).nbytes < len(pickle.dumps(rows, protocol=5)) / 2


# What is read


@pytest.mark.parametrize("name", ["tokens", "masks", "texts", "dicts", "nested", "arrays", "objects", "union"])
def test_what_is_read_follows_the_rows(name):
    rows = {
        "tokens": ragged(lambda row, n: row * 300 + n),
        "masks": ragged(lambda row, n: n % 3 == 0),
        "texts": ["é" * n + str(row) for row, n in enumerate(LENGTHS)],
        "dicts": [{"a": list(range(n)), "b": f"{row} {n}", "c": None if n % 2 else n} for row, n in enumerate(LENGTHS)],
        "nested": [[[n] * 3, [], list(range(n))] for n in LENGTHS],
        "arrays": [np.arange(n) for n in LENGTHS],
        "objects": [{n, n + 1} for n in LENGTHS],
        "union": [list(range(n)) if n % 2 else f"{row}" * (n // 2) for row, n in enumerate(LENGTHS)],
    }[name]
    block = Block(rows)
    block.read(Runs.span(0, ROWS))
    everything = block.fetched
    assert everything <= block.nbytes
    assert same(block.read(Runs.span(500, 510)), rows[500:510])
    assert block.fetched <= everything * 0.025
    assert block.rounds <= {"nested": 3}.get(name, 3 if name == "union" else 2)
    assert same(block.at(700, 3, 3, 90), [rows[i] for i in (700, 3, 3, 90)])
    assert block.fetched <= everything * 0.015
    block.at()
    assert block.fetched <= 16


def test_columns_of_dicts_are_read_in_as_many_rounds_as_the_deepest():
    block = Block([{"a": [n], "b": {"c": [[n] * (n % 3), []] * (n % 2)}, "d": str(n), "e": n} for n in range(50)])
    block.read()
    assert block.rounds == 3


def test_only_selected_objects_are_unpickled():
    block = Block([Touchy(n) for n in range(10)])
    Touchy.made = 0
    block.at(3, 4)
    assert Touchy.made == 2


class Touchy:
    made = 0

    def __init__(self, n):
        self.n = n

    def __setstate__(self, state):
        Touchy.made += 1
