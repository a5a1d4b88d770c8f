"""Python values through a block in memory: what comes out, how many bytes it took, and how many were read for some rows."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import datetime
import decimal
import enum
import json
import math
import pickle
import struct
import sys
import uuid
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_ray.data.block import values
from mooncake_ray.data.block.chunk import Builder
from mooncake_ray.data.block.read import Runs, run
from mooncake_ray.errors import CorruptBlockError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


class Block:
    """Values as the bytes of a block, each buffer with its place; counts what is fetched of them."""

    def __init__(self, rows: list) -> None:
        out = Builder()
        self.node = json.loads(json.dumps(values.encode(rows, out)))
        self.rows = len(rows)
        self.buffers = []
        for chunk in out.chunks:
            # Garbage before and after: whoever writes or reads too much is seen.
            memory = np.full(chunk.nbytes + 192, 0xA5, np.uint8)
            start = -memory.ctypes.data % 64 + 64
            data = memory[start : start + chunk.nbytes]
            if chunk.write is None:
                ctypes.memmove(data.ctypes.data, chunk.address, chunk.nbytes)
            else:
                chunk.write(data.ctypes.data)
            assert (memory[:start] == 0xA5).all() and (memory[start + chunk.nbytes :] == 0xA5).all()
            data.flags.writeable = False
            self.buffers.append(data)
        self.fetched = self.rounds = 0

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for data in self.buffers)

    def fetch(self, reads):
        self.rounds += 1
        answers = []
        for read in reads:
            spans = list(zip(read.runs.starts.tolist(), read.runs.lengths.tolist(), strict=True))
            assert all(start >= 0 and length >= 0 for start, length in spans)
            data = self.buffers[read.buffer] if read.buffer < len(self.buffers) else np.empty(0, np.uint8)
            parts = [data[start : start + length] for start, length in spans]  # what is not there is left out
            self.fetched += sum(part.nbytes for part in parts)
            answers.append(parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, np.uint8)]))
        return answers

    def read(self, runs: Runs | None = None) -> list:
        self.fetched = self.rounds = 0
        return run(values.decode(self.node, Runs.span(0, self.rows) if runs is None else runs), self.fetch)

    def at(self, *positions: int) -> list:
        return self.read(Runs.of(np.array(positions, np.int64)))


def same(a, b) -> bool:
    """Whether two values are the same in types, bits and order, written without a look at what is tested."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex) and not isinstance(a, np.generic):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, Record):
        return same([a.a, a.b], [b.a, b.b])
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, set | frozenset):
        return a == b and sorted(map(repr, a)) == sorted(map(repr, b))
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.dtype.str == b.dtype.str and a.tobytes() == b.tobytes()
    if isinstance(a, np.ndarray):
        alike = (a.dtype.str, a.shape) == (b.dtype.str, b.shape)
        if a.dtype.hasobject:
            return alike and same(a.tolist(), b.tolist())
        return alike and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.requires_grad != b.requires_grad or a.layout != b.layout:
            return False
        if a.layout is not torch.strided:
            return same(a.to_dense(), b.to_dense())
        a, b = a.detach().resolve_conj().resolve_neg().contiguous(), b.detach().resolve_conj().resolve_neg().contiguous()
        nbytes = a.numel() * a.element_size()
        return not nbytes or ctypes.string_at(a.data_ptr(), nbytes) == ctypes.string_at(b.data_ptr(), nbytes)
    return a == b or (a != a and b != b)


def check(rows: list) -> Block:
    """Encodes rows, and reads all of them, some of them, and none."""
    block = Block(rows)
    got = block.read()
    assert same(got, rows)
    n = len(rows)
    assert block.at() == []
    if n:
        a, b = n // 3, n - n // 4
        assert same(block.read(Runs.span(a, b)), rows[a:b])
        some = [n - 1, 0, n // 2, n // 2, *range(n // 4, n // 2), 0]
        assert same(block.at(*some), [rows[i] for i in some])
    return block


# What is stored


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


class Row(collections.namedtuple("Row", "a b")):
    pass


@dataclass
class Record:
    a: int
    b: list


floats = st.one_of(
    st.floats(width=32),
    st.floats(),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf]),
    st.integers(0, 2**64 - 1).map(lambda n: struct.unpack("<d", struct.pack("<Q", n))[0]),
)
ints = st.one_of(
    st.integers(-3, 300),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63)]),
)
texts = st.one_of(st.text(max_size=12), st.sampled_from(["", "user", "assistant", "\ud800", "\udc00", "\ud83d\ude00"[0], "é" * 9]))
keys = st.one_of(texts, st.integers(-2, 3), st.booleans(), st.none(), floats, st.binary(max_size=2), st.tuples(st.integers(0, 2), texts))
numpy_scalars = st.one_of(
    st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint16, np.int8, np.complex64]).flatmap(
        lambda kind: st.integers(0, 100).map(kind)
    ),
    st.sampled_from(
        [
            np.bool_(True),
            np.float32("nan"),
            np.float64(-0.0),
            np.datetime64("2020-01-01"),
            np.datetime64(5, "ns"),
            np.timedelta64(3, "s"),
            np.str_("x"),
        ]
    ),
)
others = st.one_of(
    st.sampled_from(
        [Colour.RED, Text("t"), Row(1, 2), decimal.Decimal("1.5"), uuid.UUID(int=7), Record(1, [2]), ..., range(3), int, frozenset({1, 2})]
    ),
    st.sets(st.integers(0, 5), max_size=3),
    st.datetimes(),
    st.complex_numbers(allow_nan=False),
    st.dictionaries(texts, st.integers(), max_size=2).map(collections.OrderedDict),
    st.dictionaries(texts, st.integers(), max_size=2).map(lambda d: collections.defaultdict(list, d)),
    st.binary(max_size=3).map(bytearray),
)


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(["<f4", "<f8", "<f2", "<i8", "|u1", "|b1", "<u2", ">i4", "<c8", "<M8[ms]", "<U3", "|S2"])))
    shape = draw(st.one_of(st.sampled_from([(), (0,), (3,), (2, 0)]), st.lists(st.integers(0, 4), max_size=3).map(tuple)))
    size = math.prod(shape)
    if dtype.kind in "US":
        array = np.array(draw(st.lists(st.sampled_from(["", "ab", "c"]), min_size=size, max_size=size)), dtype).reshape(shape)
    else:
        raw = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
        raw = bytes(byte & 1 for byte in raw) if dtype.kind == "b" else raw
        array = np.frombuffer(raw, dtype).reshape(shape)  # read-only
    how = draw(st.sampled_from(["as it is", "writable", "fortran", "strided"]))
    if how == "writable":
        return array.copy()
    if how == "fortran":
        return np.asfortranarray(array)
    return np.repeat(array, 2, 0)[::2] if how == "strided" and array.ndim else array


TORCH_TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool]
TORCH_TYPES += [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
TORCH_TYPES += [torch.complex64, torch.complex32]


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(TORCH_TYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype is torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if size else torch.empty(0, dtype=dtype)
    tensor = flat.view(shape)
    how = draw(st.sampled_from(["as it is", "transposed", "grad"]))
    if how == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, 1)
    return tensor.requires_grad_() if how == "grad" and tensor.is_floating_point() and dtype.itemsize > 1 else tensor


scalars = st.one_of(st.none(), st.booleans(), ints, floats, texts, st.binary(max_size=6))
leaves = st.one_of(scalars, numpy_scalars, others, arrays(), tensors())
anything = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.lists(st.lists(ints, max_size=3), max_size=3),
    ),
    max_leaves=12,
)
MEMBERS = {
    "none": st.none(),
    "bool": st.booleans(),
    "int": ints,
    "float": floats,
    "text": texts,
    "bytes": st.binary(max_size=6),
    "numpy": numpy_scalars,
    "other": others,
    "array": arrays(),
    "tensor": tensors(),
}


@st.composite
def columns(draw):
    """Rows that are alike, as those of a batch are: of one or two kinds, at some depth."""
    few = draw(st.lists(st.sampled_from(sorted(MEMBERS)), min_size=1, max_size=2))
    inner = st.one_of([MEMBERS[name] for name in few])
    for shape in draw(st.lists(st.sampled_from(["list", "tuple", "pair", "record", "struct", "map", "structs", "nullable"]), max_size=3)):
        inner = {
            "list": st.lists(inner, max_size=4),
            "tuple": st.lists(inner, max_size=4).map(tuple),
            "pair": st.lists(inner, min_size=2, max_size=2),
            "record": st.tuples(inner, st.integers(0, 9)),
            "struct": st.fixed_dictionaries({"a": inner, "b": inner, 3: st.integers(0, 9)}),
            "map": st.dictionaries(keys, inner, max_size=3),
            "structs": st.one_of(st.fixed_dictionaries({"a": inner, "b": inner}), st.fixed_dictionaries({"b": inner, "a": inner})),
            "nullable": st.one_of(st.none(), inner),
        }[shape]
    return draw(st.lists(inner, max_size=25))


thorough = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


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
    "records as lists": [[n, True, (n, "x")] for n in range(20)],
    "int keys": [{1: "a", 2: "b"}, {2: "c", 1: "d"}],
    "keys that are equal": [{1: "a"}, {True: "b"}, {1.0: "c"}, {0.0: 1}, {-0.0: 1}],
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
@given(st.lists(arrays(), min_size=1, max_size=5))
def test_arrays_as_pickle_would_have_them(rows):
    for value, got in zip(rows, Block(rows).read(), strict=True):
        plain = pickle.loads(pickle.dumps(value, protocol=5))
        assert same(got, value)
        assert (got.flags.writeable, got.flags.c_contiguous, got.flags.f_contiguous) == (
            plain.flags.writeable,
            plain.flags.c_contiguous,
            plain.flags.f_contiguous,
        )


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
        ([[(0.1 * m, m, None) for m in range(n)] for n in LENGTHS], (8 + 1) * ITEMS + OFFSETS),
    ],
    ids=[
        *("tokens", "uint8", "int8", "mask", "ones", "zeros", "trues", "float32", "float64", "pairs", "tuples", "nulls", "roles", "uuids"),
        *("structs", "scalars", "arrays", "tensors", "shape", "union", "records"),
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


def nodes_of(node):
    yield node
    for value in node.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                yield from nodes_of(each)


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


def test_rows_that_are_not_there():
    block = Block([[1], [2, 3]])
    for wrong in (Runs.span(0, 3), Runs.span(-1, 1), Runs.span(2, 1), Runs.of(np.array([0, 2]))):
        with pytest.raises(CorruptBlockError, match="rows"):
            block.read(wrong)
