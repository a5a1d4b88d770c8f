"""TensorDicts through a packing pickle: in a block, and the same afterwards."""

from __future__ import annotations

import ctypes
import io
import math
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from region_pickler import RegionPickler
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from mooncake_ray.counters import snapshot
from mooncake_ray.data import DataProto
from mooncake_ray.errors import SchemaError
from mooncake_ray.objects import batches
from mooncake_ray.store.frameworks import as_stored
from mooncake_ray.store.packing import Packer, Region

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
_here = threading.local()


class Memory(Region):
    """This thread's, in place of an object of a pool."""

    def private(self):
        return _here.memory

    shared = private


def region():
    return Memory(None, b"")


def dumped(value) -> bytes:
    """The pickle. What it refers to is this thread's `_here.memory`."""
    packer, file = Packer(smallest=1), io.BytesIO()
    RegionPickler(file, packer, region).dump(value)
    _here.memory = memoryview(bytearray(packer.segments.nbytes))
    for offset, address, nbytes in packer.segments.parts:
        _here.memory[offset : offset + nbytes] = ctypes.string_at(address, nbytes)
    for offset, nbytes, write in packer.segments.written:
        write(np.frombuffer(_here.memory, np.uint8, nbytes, offset))
    return file.getvalue()


def blocks() -> int:
    return snapshot().get("batch_bytes_written", 0)


def through(td):
    before = blocks()
    out = pickle.loads(dumped(td))
    assert blocks() > before, "it did not go through a block"
    return out


def bits(tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def same(a, b) -> bool:
    """Strictly: classes, dtypes, shapes, bits, order of keys."""
    if isinstance(a, torch.Tensor) and a.is_nested:
        rows = zip(a.unbind(), b.unbind(), strict=True)
        return type(b) is type(a) and b.layout is a.layout and b._ragged_idx == a._ragged_idx and all(same(x, y) for x, y in rows)
    if isinstance(a, torch.Tensor):
        return type(b) is type(a) and (b.dtype, b.shape, b.requires_grad) == (a.dtype, a.shape, a.requires_grad) and bits(a) == bits(b)
    if isinstance(a, TensorDict):
        facts = [(td.batch_size, td.device, td.is_locked, list(td.keys())) for td in (a, b)]
        return type(b) is TensorDict and facts[0] == facts[1] and all(same(a.get(k), b.get(k)) for k in a.keys())  # noqa: SIM118
    if isinstance(a, NonTensorStack):
        return type(b) is NonTensorStack and b.batch_size == a.batch_size and same(a.tolist(), b.tolist())
    if isinstance(a, NonTensorData):
        return type(b) is NonTensorData and b.batch_size == a.batch_size and same(a.data, b.data)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


DTYPES = st.sampled_from([torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2) | st.tuples(inner),
    max_leaves=4,
)


@st.composite
def columns(draw, rows: int):
    kind = draw(st.sampled_from(["dense", "jagged", "rows", "constant"]))
    if kind == "dense":
        shape = (rows, *draw(st.lists(st.integers(0, 3), max_size=2)))
        return (
            torch.tensor(draw(st.lists(st.integers(0, 1), min_size=math.prod(shape), max_size=math.prod(shape))))
            .to(draw(DTYPES))
            .view(shape)
        )
    if kind == "jagged":
        tail, dtype = draw(st.sampled_from([(), (2,)])), draw(DTYPES)
        return jagged([torch.ones(draw(st.integers(0, 4)), *tail).to(dtype) * n for n in range(rows)])
    if kind == "constant":
        return NonTensorData(draw(VALUES), batch_size=[rows])
    return NonTensorStack.from_list([NonTensorData(draw(VALUES)) for _ in range(rows)])


@st.composite
def tables(draw, rows=None, depth=0):
    rows = draw(st.integers(1, 4)) if rows is None else rows
    names = draw(st.lists(st.sampled_from(["a", "b", "c", "a.b", "x"]), unique=True, max_size=4))
    inner = tables(rows, depth + 1)
    fields = {name: draw(inner if depth < 2 and draw(st.integers(0, 3)) == 0 else columns(rows)) for name in names}
    td = TensorDict(fields, batch_size=[rows])
    return td


@settings(deadline=None)
@given(tables())
def test_any_tensordict_comes_back_as_it_was(td):
    td["always"] = torch.arange(td.batch_size[0])
    assert same(td, through(td))


def test_a_jagged_column_knows_its_lengths_afterwards():
    values, offsets = torch.arange(6), torch.tensor([0, 2, 6])
    unknowing = torch.nested.nested_tensor_from_jagged(values, offsets)  # its greatest length is not told
    out = through(TensorDict({"j": unknowing}, batch_size=[2]))["j"]
    assert out.to_padded_tensor(0).shape == (2, 4)


def test_a_ragged_dimension_that_is_not_the_first():
    td = TensorDict({"p": jagged([torch.ones(3, 2), torch.zeros(3, 4)])}, batch_size=[2])
    out = through(td)
    assert out["p"]._ragged_idx == td["p"]._ragged_idx == 2
    assert same(td, out)


def test_batch_sizes_devices_and_locks():
    inner = TensorDict({"y": torch.zeros(2, 3, 4)}, batch_size=[2, 3, 4])
    td = TensorDict({"x": torch.zeros(2, 3), "in": inner}, batch_size=[2, 3], device="cpu")
    assert same(td, through(td))
    assert same(td.lock_(), through(td))


def test_an_empty_batch():
    td = TensorDict({"x": torch.zeros(0, 3), "s": torch.zeros(0)}, batch_size=[0])
    assert same(td, pickle.loads(dumped(td)))


def test_what_is_written_to_a_copy_stays_there():
    td = TensorDict({"x": torch.zeros(4)}, batch_size=[4])
    out = through(td)
    out["x"].fill_(1)
    assert not td["x"].any()


def test_values_that_are_no_columns_stay_what_they_are():
    stack = lazy_stack([TensorDict({"z": torch.zeros(n)}) for n in (1, 2)])
    nested = torch.nested.as_nested_tensor([torch.ones(1, 2), torch.ones(2, 1)], layout=torch.strided)
    grad = torch.ones(2, requires_grad=True)
    td = TensorDict({"x": torch.zeros(2), "stack": stack, "nested": nested, "grad": grad, "rows": NonTensorStack([1], "b")}, batch_size=[2])
    out = through(td)
    assert type(out.get("stack")) is type(stack) and [t["z"].shape[0] for t in out.get("stack").tensordicts] == [1, 2]
    assert out["nested"].layout is torch.strided and [r.shape for r in out["nested"].unbind()] == [(1, 2), (2, 1)]
    assert same(td["grad"], out["grad"]) and same(td.get("rows"), out.get("rows"))


def test_dimension_names_keep_their_own_pickling():
    td = TensorDict({"x": torch.zeros(2)}, batch_size=[2], names=["rows"])
    before = blocks()
    out = pickle.loads(dumped(td))
    assert out.names == ["rows"] and blocks() == before


def test_a_subclass_keeps_its_own_pickling():
    class Mine(TensorDict):
        def __reduce_ex__(self, protocol):
            return str, ("mine",)

    assert pickle.loads(dumped(Mine({"x": torch.zeros(2)}, batch_size=[2]))) == "mine"


def test_stored_columns_are_found_by_their_paths():
    td = TensorDict(
        {"x": torch.arange(2), "in": {"y": jagged([torch.ones(1), torch.ones(2)])}, "s": NonTensorStack("a", "b"), "c": NonTensorData(7)},
        batch_size=[2],
    )
    blob = dumped(td)
    with as_stored():
        out = pickle.loads(blob)
    assert type(out) is DataProto
    assert (list(out.batch), list(out.non_tensor_batch), out.meta_info) == (["x", "in.y"], ["s"], {"c": 7})
    assert out.batch["in.y"].lengths().tolist() == [1, 2]


def test_inner_tensordicts_are_columns_of_a_batch_by_their_paths():
    inner = {"j": jagged([torch.ones(1), torch.ones(2)]), "deep": {"s": NonTensorStack("a", "b")}}
    td = TensorDict({"x": torch.arange(2), "in": inner}, batch_size=[2])
    batch, kind = batches.as_batch(td)
    assert (list(batch.batch), list(batch.non_tensor_batch)) == (["x", "in.j"], ["in.deep.s"])
    assert same(td, batches._as_put(batch, kind))
    selected = batch.select(["in.j"], [], [])
    assert list(batches._as_put(selected, kind).keys(True, True)) == [("in", "j")]


def test_a_dot_in_a_name_is_no_path():
    flat = TensorDict({"a.b": torch.arange(2)}, batch_size=[2])
    batch, kind = batches.as_batch(flat)
    assert same(flat, batches._as_put(batch, kind))
    with pytest.raises(SchemaError, match=r"'a\.b' has a dot in its name"):
        batches.as_batch(TensorDict({"a.b": torch.arange(2), "in": {"x": torch.arange(2)}}, batch_size=[2]))
