"""Python values in a block come back as they were: types, bits, order, and what is one object."""

from __future__ import annotations

import datetime
import json
import pickle
import struct
import sys

import numpy as np
import pytest
import torch
from block_sample import TORCH_TYPES, Block, Colour, Record, Row, Text, anything, arrays, check, columns, same, thorough
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.data.block import values
from mooncake_ray.data.block.chunk import Builder

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@thorough
@given(st.lists(anything, max_size=8))
def test_anything(rows):
    check(rows)


@thorough
@given(columns())
def test_columns(rows):
    check(rows)


# What other planes get wrong

TRAPS = {
    "an odd int that no double holds": [[2**53 + 1], [2**53 + 1, -1]],
    "the largest uint64": [2**64 - 1, 0, 2**63],
    "the largest uint64 in lists": [[2**64 - 1], [], [0]],
    "uint64 next to negative ints": [2**64 - 1, -1, 2**63, 2**63 - 1, -(2**63)],
    "ints larger than any type": [2**64, -(2**63) - 1, 7, 2**200],
    "an empty row": [[1, 2, 3], [], [4]],
    "only empty rows": [[], [], ()],
    "ints next to floats": [[1, 2.0], [3], [4.5], 1, 1.0],
    "bools next to ints": [[True, 1], [0, False], True, 1, 0],
    "all None": [None] * 5,
    "lists of None": [[None], [], [None, None]],
    "None next to numbers": [None, 1.5, None, -0.0],
    "None in lists of floats": [[None, -0.5], [0.25], None, []],
    "None next to dicts": [None, {"a": 1}, {"a": None}],
    "tuples in dicts": [{"a": (1, 2), "b": ((), [()])}, {"a": (3,), "b": ((4,), [])}],
    "records of several kinds": [(1, "a", None)] * 3 + [(n, str(n), n / 3) for n in range(20)],
    "records of different lengths": [(0, "a")] + [(n, "b", n) for n in range(20)] + [(1, "c", None, 2)],
    "records as lists": [[n, True, (n, "x")] for n in range(20)],
    "int keys": [{1: "a", 2: "b"}, {2: "c", 1: "d"}],
    "keys that are equal": [{1: "a"}, {True: "b"}, {1.0: "c"}, {0.0: 1}, {-0.0: 1}],
    "keys that are equal, often": [{[0.0, -0.0, 1, True, 1.0][n % 5]: n} for n in range(100)],
    "plain keys that are equal, often": [{[0, False, 1, True][n % 4]: n} for n in range(100)],
    "NaN keys": [{float("nan"): 1, float("nan"): 2}, {float("nan"): 3, float("nan"): 4}],
    "key order": [{"a": 1, "b": 2}, {"b": 2, "a": 1}] * 5,
    "empty dicts": [{}, {}, {}],
    "empty dicts next to others": [{}, {"a": 1}] * 8,
    "sets": [{1, 2}, set(), frozenset({3})],
    "datetimes": [datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.UTC), datetime.date(2020, 1, 1), datetime.timedelta(3)],
    "complex": [1 + 2j, complex(-0.0, 0.0), complex("nan")],
    "complex arrays and tensors": [np.array([1 + 2j]), torch.tensor([1 - 2j])],
    "bfloat16 of different lengths": [torch.ones(n, dtype=torch.bfloat16) for n in (3, 0, 2)],
    "tensors of different types": [torch.ones(2), torch.ones(2, dtype=torch.uint16), torch.ones(2, dtype=torch.float8_e4m3fn)],
    "NaN payloads": [struct.unpack("<d", struct.pack("<Q", n))[0] for n in (0x7FF0000000000001, 0x7FF8000000000123, 0xFFF8000000000000)],
    "the same NaN payload": [struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000001))[0] for _ in range(4)],
    "negative zeros": [-0.0] * 3,
    "both zeros": [0.0, -0.0, 0.0],
    "lone surrogates": ["\ud83d", "\ude00", "\ud83d" + "\ude00", "😀", "\ud800" * 40],
    "one long text": ["x" * 1000] * 3,
    "enums and subclasses": [Colour.RED, 1, Text("a"), "a", Row(1, 2), (1, 2)],
    "NumPy scalars next to numbers": [np.float64(1.0), 1.0, np.int64(1), 1, np.bool_(True), True, np.float32(1)],
    "dates of different units": [np.datetime64("2020"), np.datetime64("2020-01-01"), np.datetime64("NaT", "ns")],
    "arrays without dimensions": [np.array(1.5), np.array(2.5)],
    "arrays of objects and records": [np.array([1, None, "a"], object), np.zeros(2, [("a", "i4"), ("b", "f8")])],
    "arrays of different ranks": [np.zeros((2, 3)), np.zeros(6), np.zeros((1, 2, 3)), np.zeros((0, 7, 2))],
    "multimodal inputs": [{"pixel_values": torch.rand(n, 4), "grid": torch.tensor([[1, n, 4]])} if n else None for n in (0, 3, 2, 0)],
    "a column of nothing": [],
}


@pytest.mark.parametrize("rows", TRAPS.values(), ids=TRAPS.keys())
def test_trap(rows):
    check(rows)


def test_depth_and_cycles():
    deep: list = []
    for _ in range(200):
        deep = [deep]
    cyclic: list = [1]
    cyclic.append(cyclic)
    within = {"a": [1]}
    within["a"].append(within)
    block = Block([[1, 2], deep, cyclic, [3], within])
    got = block.read()
    assert same(got[:2], [[1, 2], deep])
    assert got[2][0] == 1 and got[2][1] is got[2]
    assert same(got[3], [3])
    assert got[4]["a"][1] is got[4]
    assert same(block.at(3, 0), [[3], [1, 2]])
    assert same(Block([deep]).read(), [deep])


@pytest.mark.parametrize("depth", [30, 31, 32, 33, 34])
def test_depth_at_the_limit(depth):
    value: object = 1
    for n in range(depth):
        value = [value] if n % 3 else {"k": value}
    check([value, 5, [value], (1,)])


@pytest.mark.parametrize(
    "double",
    [
        lambda v: (v, v),
        lambda v: (v, v, ()),
        lambda v: [v, v],
        lambda v: {"a": v, "b": v},
        lambda v: (v, [v]),
        lambda v: [v, {"a": v}, (v,)],
    ],
    ids=["tuple", "tuple with an empty one", "list", "dict", "tuple and list", "three"],
)
def test_a_doubled_value_does_not_double_the_bytes(double):
    value: object = (1, 2)
    for _ in range(31):
        value = double(value)
    block = Block([value, 1, [2.5]])
    assert block.nbytes < 8192
    assert len(json.dumps(block.node)) < 20_000
    got = block.read()
    a, b = got[0].values() if isinstance(value, dict) else got[0][:2]
    assert a is b or isinstance(b, list | dict)
    assert same(got[1:], [1, [2.5]])


def test_values_that_are_too_little_alike_are_pickled():
    rows = [{f"{n}": {f"{m}": n * m + row for m in range(16)} for n in range(16)} for row in range(10)]
    block = check(rows)
    assert block.node["kind"] == "object"
    assert check(rows * 10).node["kind"] == "shared"
    more = [{name: dict(inner) for name, inner in row.items()} for row in rows * 10]
    assert check(more).node["kind"] == "struct"  # for 100 rows it pays


@pytest.mark.parametrize("total", [255, 256, 257, 65535, 65536, 65537])
def test_totals_at_the_limits_of_types(total):
    check([list(range(total - 2)), [1], [2]])
    check(["a" * (total - 3), "bc", "d"])
    check([(n,) if n % 2 else [n] for n in range(2 * total)])


def test_one_object_in_several_rows_is_one_object_again():
    one, other, array, tensor = [1, 2], {"a": [1]}, np.arange(100_000), torch.arange(100_000)
    record = Record(1, [])
    for rows in (
        [one, [1, 2], one, one],
        [other, {"a": [2]}, other],
        [array, array, array + 1],
        [tensor, tensor, tensor + 1],
        [record, Record(1, []), record],
    ):
        got = check(rows).read()
        assert [[a is b for a in rows] for b in rows] == [[a is b for a in got] for b in got]
    assert Block([array] * 8).nbytes < array.nbytes * 1.1
    assert Block([[array, one], [one, array]]).nbytes < array.nbytes * 1.1
    got = Block([[one, one], [one]]).read()
    assert got[0][0] is got[0][1] is got[1][0]
    got = Block([[], []]).read()
    assert got[0] is not got[1]


def test_nans_are_different_objects():
    """As they were: a dict or a set that is made of them has both."""
    (pair,) = Block([[float("nan"), float("nan")]]).read()
    assert len(set(pair)) == 2


def test_equal_rows_are_different_objects():
    got = Block([[7, 7]] * 1 + [[7, 7]]).read()
    assert got[0] is not got[1]
    block = Block([[1, 2], [3]])
    first, again = block.at(0, 0)
    first.append(9)
    assert again == [1, 2]
    array, copy = Block([np.arange(3), np.arange(4)]).at(0, 0)
    array[0] = 9
    assert copy[0] == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(arrays(), min_size=1, max_size=5), st.booleans())
def test_arrays_as_pickle_would_have_them(rows, private):
    """Writable or not, in the same order, whether what is fetched can be written or not; and what is written never gets into the block."""
    block = Block(rows)
    block.private = private
    for value, got in zip(rows, block.read(), strict=True):
        plain = pickle.loads(pickle.dumps(value, protocol=5))
        assert same(got, value)
        assert (got.flags.writeable, got.flags.c_contiguous, got.flags.f_contiguous) == (
            plain.flags.writeable,
            plain.flags.c_contiguous,
            plain.flags.f_contiguous,
        )
        if got.flags.writeable:
            got[...] = np.zeros((), got.dtype)
    assert same(block.read(), rows)


def test_tensors_that_are_not_plain_memory():
    rows = [
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
        torch.ones(2, 3).t(),
        torch.ones(1).expand(4, 5),
        torch.empty(0, 3),
        torch.tensor(2.5),
    ]
    got = check(rows).read()
    got[-1].add_(1)  # writable, and its own
    assert rows[-1].item() == 2.5


# What must not be in a block


class Handle:
    def __reduce__(self):
        return Handle, ()


WHERE = {
    "as it is": lambda handle: handle,
    "in a list": lambda handle: [handle],
    "in a tuple in a dict": lambda handle: {"a": (1, handle)},
    "as a key": lambda handle: {handle: 1},
    "in an object": lambda handle: Record(1, [handle]),
    "in a closure": lambda handle: lambda: handle,
    "in an array": lambda handle: np.array([handle, None], object),
}


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE.keys())
def test_handles_that_ray_counts_are_refused(where, monkeypatch):
    import ray

    with pytest.raises(values.NotStorable, match="ObjectRef"):
        values.encode([1, where(ray.ObjectRef(b"r" * 28))], Builder())
    Block([1, where(Handle())]).read()
    monkeypatch.setattr(sys.modules["ray.actor"], "ActorHandle", Handle)  # to make a real one takes a cluster
    with pytest.raises(values.NotStorable, match="Handle"):
        values.encode([1, where(Handle())], Builder())


def test_what_cannot_be_pickled_says_so():
    import threading

    with pytest.raises(TypeError, match="pickle"):
        values.encode([threading.Lock()], Builder())


@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
def test_tensors_within_objects(dtype):
    check([Record(1, [torch.ones(3).to(dtype), torch.empty(0, 2, dtype=dtype)]), Record(2, [torch.ones(2, 3).to(dtype).t()])])


def test_functions_go_by_value():
    add = 5
    got = Block([lambda x: x + add]).read()
    assert got[0](1) == 6
