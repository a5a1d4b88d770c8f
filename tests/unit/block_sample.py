"""Values of every kind, a block of them in memory, and a comparison that forgives nothing."""

from __future__ import annotations

import collections
import ctypes
import decimal
import enum
import json
import math
import struct
import uuid
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mooncake_ray.data.block import values
from mooncake_ray.data.block.chunk import Builder
from mooncake_ray.data.block.read import Runs, run


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
        self.private = False  # whether what is fetched is the reader's own, and can be written
        named = [node[name] for node in nodes_of(self.node) for name in ("buffer", "offsets", "tags", "valid", "shapes") if name in node]
        assert sorted(named) == list(range(len(self.buffers)))

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
            one = len(parts) == 1 and not self.private
            answers.append(parts[0] if one else np.concatenate([*parts, np.empty(0, np.uint8)]))
        return answers

    def read(self, runs: Runs | None = None) -> list:
        self.fetched = self.rounds = 0
        return run(values.decode(self.node, Runs.span(0, self.rows) if runs is None else runs), self.fetch)

    def at(self, *positions: int) -> list:
        return self.read(Runs.of(np.array(positions, np.int64)))


def nodes_of(node):
    yield node
    for value in node.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                yield from nodes_of(each)


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
