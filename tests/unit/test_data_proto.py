"""`DataProto` against the real verl.DataProto, against numpy indexing, and on bad input."""

from __future__ import annotations

import copy
import pickle
import struct
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mooncake_ray.data import (
    DataProto,
    DataProtoItem,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from mooncake_ray.errors import SchemaError

ROWS = 6


@pytest.fixture(scope="session")
def verl():
    """verl's protocol module. The import takes seconds, so it is done once."""
    from verl import protocol

    return protocol


class Rollouts(DataProto):
    """Stands for a user's subclass."""


def make_parts(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    log_probs = torch.from_numpy(rng.standard_normal((rows, 3), dtype=np.float32))
    log_probs[::2, 1] = float("nan")
    tensors = {
        "input_ids": torch.from_numpy(rng.integers(0, 1000, (rows, 5))),
        "log_probs": log_probs,
        "values": torch.from_numpy(rng.standard_normal((rows, 2, 2))).to(torch.bfloat16),
        "mask": torch.from_numpy(rng.integers(0, 2, rows).astype(bool)),
    }
    objects = np.empty(rows, dtype=object)
    objects[:] = [{"turns": i, "reward": float("nan")} for i in range(rows)]
    arrays = {
        "extra": objects,
        "score": rng.standard_normal(rows),
        "uid": np.array([f"uid-{i}" for i in range(rows)]),
    }
    return tensors, arrays, {"temperature": 1.0, "shape": [1, 2]}


def make(rows=ROWS, seed=0, cls=DataProto):
    return cls.from_dict(*make_parts(rows, seed))


def make_both(verl, rows=ROWS, seed=0):
    return make(rows, seed), verl.DataProto.from_dict(*make_parts(rows, seed))


def assert_same(ours, theirs):
    """Equal bit by bit, with verl's result read back."""
    expected = DataProto.from_verl(theirs)
    assert ours.equals(expected), f"{ours!r} != {expected!r}"


def assert_shared(part, whole):
    for name, tensor in part.batch.items():
        assert tensor.untyped_storage().data_ptr() == whole.batch[name].untyped_storage().data_ptr()
    for name, array in part.non_tensor_batch.items():
        assert np.shares_memory(array, whole.non_tensor_batch[name])


# ---------------------------------------------------------------- the real verl as oracle


@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
def test_chunk_like_verl(verl, chunks):
    ours, theirs = make_both(verl)
    results, expected = ours.chunk(chunks), theirs.chunk(chunks)
    assert len(results) == len(expected) == chunks
    for result, other in zip(results, expected, strict=True):
        assert_same(result, other)
        assert_shared(result, ours)


@pytest.mark.parametrize("size", [1, 4, 6, 9])
def test_split_like_verl(verl, size):
    ours, theirs = make_both(verl)
    results, expected = ours.split(size), theirs.split(size)
    assert [len(r) for r in results] == [len(e) for e in expected]
    for result, other in zip(results, expected, strict=True):
        assert_same(result, other)
        assert_shared(result, ours)


SLICES = [(None, None, None), (1, 4, None), (None, None, 2), (-2, None, None), (4, 2, None), (0, 99, 3)]


@pytest.mark.parametrize("bounds", SLICES)
def test_slice_like_verl(verl, bounds):
    ours, theirs = make_both(verl)
    assert_same(ours.slice(*bounds), theirs.slice(*bounds))
    assert_same(ours[slice(*bounds)], theirs[slice(*bounds)])
    if len(ours.slice(*bounds)):
        assert_shared(ours.slice(*bounds), ours)


@pytest.mark.parametrize(
    "index",
    [
        [3, 0, 0],
        [-1, 2],
        [],
        [True, False, True, False, False, True],
        np.array([5, 1], dtype=np.int32),
        np.array([True] * 2 + [False] * 4),
        torch.tensor([2, 2, -6]),
        torch.tensor([False] * 6),
    ],
    ids=str,
)
def test_select_idxs_like_verl(verl, index):
    ours, theirs = make_both(verl)
    assert_same(ours.select_idxs(index), theirs.select_idxs(index))
    assert_same(ours[index], theirs[index])


@pytest.mark.parametrize("item", [0, -1, np.int64(3)])
def test_int_gives_one_row_like_verl(verl, item):
    ours, theirs = make_both(verl)
    row, expected = ours[item], theirs[item]
    assert isinstance(row, DataProtoItem)
    for name, tensor in row.batch.items():
        assert tensor.dtype == expected.batch[name].dtype
        assert torch.equal(tensor.nan_to_num(), expected.batch[name].nan_to_num())
    assert str(row.non_tensor_batch) == str(expected.non_tensor_batch)
    assert row.meta_info == expected.meta_info


def test_concat_like_verl(verl):
    ours, theirs = zip(*(make_both(verl, rows, seed) for seed, rows in enumerate([4, 1, 3])), strict=True)
    metrics = [{"loss": 0.5, "kl": 1}, [{"loss": 0.25, "kl": 2}, {"loss": 1.0, "kl": 3}], None]
    for position, value in enumerate(metrics):
        ours[position].meta_info["metrics"] = theirs[position].meta_info["metrics"] = value
    ours[1].meta_info["extra"] = theirs[1].meta_info["extra"] = "only here"
    joined = DataProto.concat(ours)
    assert_same(joined, verl.DataProto.concat(theirs))
    assert joined.meta_info["metrics"] == {"loss": [0.5, 0.25, 1.0], "kl": [1, 2, 3]}


def test_concat_widens_numbers_and_strings_like_verl(verl):
    parts = [
        {"x": np.array([1, 0]), "s": np.array(["a", "b"])},
        {"x": np.array([0.5]), "s": np.array(["long"])},
    ]
    ours = DataProto.concat([DataProto.from_single_dict(part) for part in parts])
    assert_same(ours, verl.DataProto.concat([verl.DataProto.from_single_dict(dict(part)) for part in parts]))
    assert ours.non_tensor_batch["x"].dtype == np.float64


def test_union_like_verl(verl):
    def parts():
        tensors, arrays, meta = make_parts()
        more = {"rewards": torch.arange(6.0), "mask": tensors["mask"].clone()}
        more_arrays = {"extra": copy.deepcopy(arrays["extra"]), "source": np.arange(6)}
        return (tensors, arrays, meta), (more, more_arrays, {"temperature": 1.0, "step": 3})

    ours, other = (DataProto.from_dict(*part) for part in parts())
    theirs, their_other = (verl.DataProto.from_dict(*part) for part in parts())
    before = copy.deepcopy(other)
    result = ours.union(other)
    assert result is ours
    assert_same(result, theirs.union(their_other))
    assert other.equals(before)


@pytest.mark.parametrize(
    "conflict",
    [
        {"tensors": {"mask": torch.zeros(6, dtype=torch.int8) + 3}},
        {"non_tensors": {"score": np.zeros(6)}},
        {"non_tensors": {"uid": np.array(["x"] * 6)}},
        {"meta_info": {"temperature": 2.0}},
        {"tensors": {"new": torch.zeros(5)}},
    ],
    ids=["tensor", "array", "dtype", "meta", "rows"],
)
def test_union_conflict_like_verl(verl, conflict):
    ours, theirs = make_both(verl)
    # verl compares the meta_info only after it has merged the columns, so the batch has columns.
    conflict = {"tensors": {"other": torch.zeros(6)}, **conflict}
    before = copy.deepcopy(ours)
    with pytest.raises(AssertionError):
        theirs.union(verl.DataProto.from_dict(**copy.deepcopy(conflict)))
    with pytest.raises(SchemaError):
        ours.union(DataProto.from_dict(**conflict))
    assert ours.equals(before), "a failed union changed the batch"


def test_select_like_verl(verl):
    ours, theirs = make_both(verl)
    for keys in (
        {},
        {"batch_keys": ["mask", "log_probs"]},
        {"non_tensor_batch_keys": ["uid"]},
        {"meta_info_keys": []},
    ):
        assert_same(ours.select(**keys), theirs.select(**keys))
        assert_shared(ours.select(**keys), ours)
    deep = ours.select(deepcopy=True)
    assert_same(deep, theirs.select(deepcopy=True))
    assert deep.non_tensor_batch["extra"][0] is not ours.non_tensor_batch["extra"][0]
    assert deep.meta_info["shape"] is not ours.meta_info["shape"]


def test_pop_and_rename_like_verl(verl):
    ours, theirs = make_both(verl)
    keys = {"batch_keys": ["mask"], "non_tensor_batch_keys": ["uid", "extra"], "meta_info_keys": ["shape"]}
    assert_same(ours.pop(**keys), theirs.pop(**keys))
    assert_same(ours, theirs)
    assert ours.rename("values", "critic") is ours
    theirs.rename("values", "critic")
    assert_same(ours, theirs)


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("times", [1, 2, 5])
def test_repeat_like_verl(verl, times, interleave):
    ours, theirs = make_both(verl)
    assert_same(ours.repeat(times, interleave), theirs.repeat(times, interleave))


def test_reorder_like_verl(verl):
    ours, theirs = make_both(verl)
    storage = ours.batch["input_ids"]
    before = storage.clone()
    order = torch.tensor([5, 3, 1, 0, 2, 4])
    assert ours.reorder(order) is None
    theirs.reorder(order)
    assert_same(ours, theirs)
    assert torch.equal(storage, before)


@pytest.mark.parametrize("kwargs", [None, {"shuffle": False}, {"shuffle": True}], ids=str)
@pytest.mark.parametrize("seed", [0, 7])
def test_make_iterator_like_verl(verl, seed, kwargs):
    ours, theirs = make_both(verl)
    results = list(ours.make_iterator(2, epochs=3, seed=seed, dataloader_kwargs=kwargs))
    expected = list(theirs.make_iterator(2, epochs=3, seed=seed, dataloader_kwargs=kwargs))
    assert len(results) == len(expected) == 9
    for result, other in zip(results, expected, strict=True):
        # verl turns every array into an object array here; the values are the same.
        arrays = {name: array.astype(ours.non_tensor_batch[name].dtype) for name, array in other.non_tensor_batch.items()}
        assert_same(result, verl.DataProto(other.batch, arrays, other.meta_info))


def test_make_iterator_without_a_seed_like_verl(verl):
    ours, theirs = make_both(verl)
    torch.manual_seed(3)
    results = [b.batch["input_ids"] for b in ours.make_iterator(3, 2, dataloader_kwargs={"shuffle": True})]
    torch.manual_seed(3)
    expected = [b.batch["input_ids"] for b in theirs.make_iterator(3, 2, dataloader_kwargs={"shuffle": True})]
    assert torch.equal(torch.cat(results), torch.cat(expected))


@pytest.mark.parametrize("divisor", [1, 3, 4, 5, 16])
def test_padding_like_verl(verl, divisor):
    ours, theirs = make_both(verl)
    padded, pad_size = pad_dataproto_to_divisor(ours, divisor)
    expected, expected_size = verl.pad_dataproto_to_divisor(theirs, divisor)
    assert pad_size == expected_size
    assert_same(padded, expected)
    assert_same(unpad_dataproto(padded, pad_size), verl.unpad_dataproto(expected, pad_size))
    assert unpad_dataproto(padded, pad_size).equals(ours)


def test_padding_keeps_metrics():
    data = make()
    data.meta_info["metrics"] = {"loss": 1.0}
    padded, _ = pad_dataproto_to_divisor(data, 4)
    assert padded.meta_info["metrics"] == {"loss": 1.0}


def test_verl_conversion_shares_the_columns(verl):
    ours = make()
    theirs = ours.to_verl()
    assert type(theirs) is verl.DataProto
    assert_shared(DataProto.from_verl(theirs), ours)
    assert type(Rollouts.from_verl(theirs)) is Rollouts
    theirs.pop(batch_keys=["mask"], non_tensor_batch_keys=["uid"], meta_info_keys=["shape"])
    assert ours.equals(make())

    only_arrays = DataProto(non_tensor_batch={"x": np.arange(3)}).to_verl()
    assert only_arrays.batch is None
    assert len(only_arrays) == 3
    assert len(DataProto.from_verl(only_arrays)) == 3


def test_from_verl_rejects_what_it_cannot_hold(verl):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, once a process: a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    with pytest.raises(SchemaError, match=r"batch\['ids'\] is a nested tensor"):
        DataProto({"ids": nested})
    with pytest.raises(SchemaError, match=r"got a dict, expected a verl\.DataProto"):
        DataProto.from_verl({})


def test_constructor_takes_a_tensordict(verl):
    tensors, arrays, meta = make_parts()
    batch = verl.TensorDict(tensors, batch_size=[ROWS])
    assert DataProto(batch, arrays, meta).equals(make())


# ---------------------------------------------------------------- properties

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.uint16]


def tensor_bits(tensor):
    return tensor.view(-1).view(torch.uint8)


@st.composite
def batches(draw, min_rows=0):
    """Batches of random bits (NaNs of every payload included), 1-D to 3-D columns."""
    rows = draw(st.integers(min_rows, 8))
    tensors = {}
    for position in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        tail = draw(st.lists(st.integers(0, 3), max_size=2))
        tensor = torch.empty(rows, *tail, dtype=dtype)
        if tensor.numel():
            raw = draw(hnp.arrays(np.uint8, tensor.nbytes))
            tensor_bits(tensor).copy_(torch.from_numpy(raw))
        tensors[f"t{position}"] = tensor
    arrays = {
        "f": draw(hnp.arrays(np.float16, (rows, 2))),
        "o": draw(hnp.arrays(object, rows, elements=st.none() | st.floats() | st.text(max_size=2))),
    }
    return DataProto(tensors, arrays, {"step": 1, "nan": float("nan")})


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 8), st.data())
def test_chunk_and_split_then_concat_is_identity(data, size, draw):
    rows = len(data)
    chunks = draw.draw(st.sampled_from([n for n in range(1, 9) if rows % n == 0]))
    assert DataProto.concat(data.chunk(chunks)).equals(data)
    if rows:
        assert DataProto.concat(data.split(size)).equals(data)


@settings(max_examples=60, deadline=None)
@given(batches(min_rows=1), st.data())
def test_select_idxs_is_numpy_indexing(data, draw):
    rows = len(data)
    index = draw.draw(hnp.arrays(np.int64, st.integers(0, 12), elements=st.integers(-rows, rows - 1)) | hnp.arrays(bool, rows))
    result = data.select_idxs(index)
    assert result.equals(data.select_idxs(torch.from_numpy(index)))
    assert result.equals(data[index.tolist()])
    for name, tensor in data.batch.items():
        row_bits = tensor_bits(tensor).numpy().reshape(rows, tensor[0].nbytes)
        assert np.array_equal(tensor_bits(result.batch[name]).numpy(), row_bits[index].reshape(-1))
    for name, array in data.non_tensor_batch.items():
        assert array[index].tobytes() == result.non_tensor_batch[name].tobytes()


@settings(max_examples=40, deadline=None)
@given(batches(), st.integers(0, 3))
def test_repeat_is_numpy_repeat_and_tile(data, times):
    rows = np.arange(len(data))
    assert data.repeat(times).equals(data.select_idxs(np.repeat(rows, times)))
    assert data.repeat(times, interleave=False).equals(data.select_idxs(np.tile(rows, times)))


@settings(max_examples=40, deadline=None)
@given(batches(), st.integers(1, 9))
def test_padding_round_trip(data, divisor):
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert pad_size < divisor
    assert unpad_dataproto(padded, pad_size).equals(data)


@settings(max_examples=40, deadline=None)
@given(batches(min_rows=1), st.data())
def test_equals_sees_every_bit(data, draw):
    other = copy.deepcopy(data)
    assert other.equals(data)
    name = draw.draw(st.sampled_from(sorted(data.batch)))
    bits = tensor_bits(other.batch[name])
    if len(bits):
        bits[draw.draw(st.integers(0, len(bits) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
        assert not other.equals(data)


# ---------------------------------------------------------------- equality, ownership, types

OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0001))[0]
NAN = float("nan")


@pytest.mark.parametrize(
    ("mine", "theirs", "equal"),
    [
        (NAN, NAN, True),
        (struct.unpack("<d", struct.pack("<d", NAN))[0], NAN, True),
        (OTHER_NAN, NAN, False),
        (0.0, -0.0, False),
        (1, 1.0, False),
        (1, True, False),
        (np.float32(1), np.float32(1), True),
        (np.float32(1), np.float64(1), False),
        ([1, (2, {"a": NAN})], [1, (2, {"a": NAN})], True),
        ([1, 2], (1, 2), False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        (complex(0, 0.0), complex(0, -0.0), False),
        (torch.tensor(1.0), torch.tensor(1.0), True),
        (torch.tensor(1.0), np.float32(1.0), False),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True),
        (np.array("x"), np.array("x"), True),
        (np.zeros(2, "<f4"), np.zeros(2, ">f4"), False),
        (np.zeros((2, 0)), np.zeros((2, 0)), True),
        (torch.zeros(2, 0), torch.zeros(2, 0), True),
        (torch.zeros(2, 0), torch.zeros(0, 2), False),
        (None, 0, False),
    ],
    ids=str,
)
def test_equals_on_values(mine, theirs, equal):
    def wrap(value):
        column = np.empty(2, dtype=object)
        column[0] = value
        return DataProto(non_tensor_batch={"x": column}), DataProto(meta_info={"x": value})

    for a, b in zip(wrap(mine), wrap(theirs), strict=True):
        assert a.equals(b) is equal
        assert b.equals(a) is equal


def test_equals_on_fields():
    data = make()
    assert data.equals(make())
    assert data.equals(data[:])
    assert not data.equals(make(seed=1))
    assert not data.equals(data.select(batch_keys=["mask"]))
    assert not data.equals("data")
    other = make()
    other.batch["mask"] = other.batch["mask"].to(torch.uint8)
    assert not data.equals(other)
    strided = DataProto({"x": torch.arange(12).reshape(3, 4).t()})
    assert strided.equals(DataProto({"x": strided.batch["x"].contiguous()}))
    assert data != make(), "== stays identity"


def test_union_takes_nan_as_equal_but_not_another_dtype():
    nan = {"x": torch.tensor([NAN, 1.0])}
    data = DataProto(nan).union(DataProto({"x": nan["x"].clone()}))
    assert list(data.batch) == ["x"]
    with pytest.raises(SchemaError, match=r"got torch.float64\[2\], expected torch.float32\[2\]"):
        data.union(DataProto({"x": nan["x"].double()}))
    with pytest.raises(SchemaError, match=r"batch\['x'\] is in both batches, row 1 is .*2.*, expected .*1"):
        data.union(DataProto({"x": torch.tensor([NAN, 2.0])}))
    objects = DataProto(non_tensor_batch={"x": np.array([1, NAN], dtype=object)})
    objects.union(copy.deepcopy(objects))
    with pytest.raises(SchemaError, match=r"row 0 is 1.0, expected 1"):
        objects.union(DataProto(non_tensor_batch={"x": np.array([1.0, NAN], dtype=object)}))
    strings = DataProto(non_tensor_batch={"x": np.array(["a", "b"])}, meta_info={"w": np.arange(2)})
    strings.union(copy.deepcopy(strings))


def test_inputs_are_not_changed():
    tensors, arrays, meta = make_parts()
    keys = list(tensors), list(arrays), list(meta)
    lists = {"raw": [[1], [2, 3], [], [4], [5], [6]]}
    data = DataProto.from_dict(tensors, {**arrays, **lists}, meta)
    part = data[:3]
    data.pop(["mask"], ["uid"], ["shape"])
    data.rename("values", "critic")
    data.union(DataProto({"new": torch.zeros(6)}, meta_info={"step": 1}))
    data.batch["direct"] = torch.zeros(6)
    data.meta_info["direct"] = 1
    assert (list(tensors), list(arrays), list(meta)) == keys
    assert type(lists["raw"]) is list
    assert list(part.batch) == keys[0]
    assert list(part.meta_info) == keys[2]


def test_from_dict_makes_one_object_per_row():
    for rows in ([[1, 2], [3, 4]], [[1], [2, 3]], [np.zeros(2), np.zeros(2)]):
        column = DataProto.from_dict(non_tensors={"x": rows}).non_tensor_batch["x"]
        assert column.shape == (2,)
        assert column.dtype == object
        assert column[0] is rows[0]


def test_subclasses_keep_their_type():
    data = make(cls=Rollouts)
    results = [data[1:], data[[0]], data.select(), data.repeat(), *data.chunk(2), *data.split(4)]
    results += [DataProto.concat([data, data]), pad_dataproto_to_divisor(data, 4)[0], data.to("cpu")]
    results += [*data.make_iterator(3, 1), data.union(make()), data.pop(["mask"])]
    results += [Rollouts.from_single_dict({"x": torch.zeros(1)}), pickle.loads(pickle.dumps(data))]
    assert {type(result) for result in results} == {Rollouts}


@pytest.mark.parametrize("data", [make(), make()[1:5:2], make()[:0], DataProto()], ids=len)
def test_pickle_and_deepcopy(data):
    assert pickle.loads(pickle.dumps(data)).equals(data)
    assert copy.deepcopy(data).equals(data)


def test_to_moves_in_place():
    data = make()
    assert data.to("meta") is data
    assert {tensor.device.type for tensor in data.batch.values()} == {"meta"}


def test_batches_without_columns_or_rows():
    empty = DataProto(meta_info={"a": 1})
    assert len(empty) == 0
    assert [len(c) for c in empty.chunk(3)] == [0, 0, 0]
    assert empty.split(2) == []
    assert empty.union(make()).equals(DataProto(*make_parts()[:2], {"a": 1, **make_parts()[2]}))
    none = make()[:0]
    assert [len(c) for c in none.chunk(2)] == [0, 0]
    assert DataProto.concat([none, make()]).equals(make())
    assert len(none.repeat(3)) == len(none.repeat(3, interleave=False)) == len(none[[]]) == 0
    assert list(none.make_iterator(2, 1)) == []
    assert pad_dataproto_to_divisor(none, 4) == (none, 0)
    assert sum(1 for _ in make()) == ROWS, "iteration ends at the last row"


def test_repr_is_compact():
    data = DataProto({"ids": torch.zeros(2, 3, dtype=torch.int64)}, {"uid": np.array([None, None])}, {"step": 5})
    assert repr(data) == ("DataProto(rows=2, bytes=64, batch={ids: int64[2, 3]}, non_tensor_batch={uid: object[2]}, meta_info=['step'])")


# ---------------------------------------------------------------- bad input

ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: DataProto({"a": ONES, "b": torch.ones(3)}),
            r"batch\['b'\] has 3 rows, expected 2 as in 'a'",
        ),
        (
            lambda: DataProto({"a": ONES}, {"n": np.ones(4)}),
            r"non_tensor_batch\['n'\] has 4 rows, expected 2",
        ),
        (lambda: DataProto({"a": ONES}, {"a": np.ones(2)}), r"'a' is in both"),
        (lambda: DataProto({"a": torch.tensor(1)}), r"batch\['a'\] is a scalar"),
        (lambda: DataProto({"a": np.ones(2)}), r"batch\['a'\] is a ndarray, expected a torch.Tensor"),
        (lambda: DataProto({"a": ONES.to_sparse()}), r"batch\['a'\] is a sparse tensor"),
        (lambda: DataProto({1: ONES}), r"field name 1, expected a str"),
        (lambda: DataProto([ONES]), r"batch is a list, expected a dict"),
        (lambda: DataProto(non_tensor_batch={"n": [1]}), r"is a list, expected a numpy.ndarray"),
        (lambda: DataProto.from_dict(non_tensors={"n": "ab"}), r"non_tensor_batch\['n'\] is a str"),
        (lambda: DataProto.from_dict(non_tensors={"n": ONES}), r"non_tensor_batch\['n'\] is a Tensor"),
        (lambda: DataProto.from_single_dict({"a": [1]}), r"field 'a' is a list"),
        (lambda: make().union({}), r"union with a dict"),
    ],
)
def test_schema_errors(build, message):
    with pytest.raises(SchemaError, match=message):
        build()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [{"a": ONES}, {"b": ONES}],
            r"batch 1 differs from batch 0: missing fields \['a'\], unexpected fields \['b'\]",
        ),
        (
            [{"a": ONES}, {"a": ONES.double()}],
            r"batch\['a'\] of batch 1 is torch.float64, expected torch.float32",
        ),
        (
            [{"a": ONES}, {"a": ONES[:, None]}],
            r"batch\['a'\] of batch 1 has rows of shape \(1,\), expected \(\)",
        ),
        ([{"n": np.ones((2, 3))}, {"n": np.ones((2, 4))}], r"rows of shape \(4,\), expected \(3,\)"),
        ([{"n": np.ones(2)}, {"n": np.array(["a"])}], r"has the dtypes \['float64', '<U1'\]"),
    ],
)
def test_concat_schema_errors(parts, message):
    with pytest.raises(SchemaError, match=message):
        DataProto.concat([DataProto.from_single_dict(part) for part in parts])


@pytest.mark.parametrize(
    ("metas", "message"),
    [
        ([{"t": 1}, {"t": 2}], r"meta_info\['t'\] of batch 1 is 2, expected 1"),
        ([{"t": np.zeros(2)}, {"t": np.ones(2)}], r"meta_info\['t'\] of batch 1"),
        ([{"metrics": {"a": 1}}, {"metrics": {"b": 1}}], r"has 'b' in a later batch only"),
        ([{"metrics": 3}], r"holds a int, expected dicts"),
    ],
)
def test_concat_meta_errors(metas, message):
    with pytest.raises(SchemaError, match=message):
        DataProto.concat([DataProto({"a": ONES}, meta_info=meta) for meta in metas])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda d: d.select(batch_keys=["maks"]), KeyError, r"batch has no \['maks'\]; it has \['input_ids'"),
        (lambda d: d.select(non_tensor_batch_keys="nope"), KeyError, r"non_tensor_batch has no \['nope'\]"),
        (lambda d: d.select(meta_info_keys=["nope"]), KeyError, r"meta_info has no"),
        (lambda d: d.pop(["mask"], ["nope"]), KeyError, r"non_tensor_batch has no \['nope'\]"),
        (lambda d: d.rename("nope", "x"), KeyError, r"batch has no \['nope'\]"),
        (lambda d: d.rename("mask", "values"), ValueError, r"\['values'\] used twice"),
        (lambda d: d.rename("mask", "uid"), ValueError, r"\['uid'\] used twice"),
        (lambda d: d.rename(["mask", "values"], ["x", "x"]), ValueError, r"\['x'\] used twice"),
        (lambda d: d.rename(["mask", "mask"], ["x", "y"]), ValueError, r"used twice"),
        (lambda d: d.rename(["mask"], ["x", "y"]), ValueError, r"2 new names for 1 old"),
        (lambda d: d[6], IndexError, r"row 6 is out of range for 6 rows"),
        (lambda d: d[-7], IndexError, r"row -7"),
        (lambda d: d[True], TypeError, r"indexed with bool"),
        (lambda d: d["mask"], TypeError, r"indexed with str"),
        (lambda d: d[1, 2], TypeError, r"indexed with tuple"),
        (lambda d: d[[0, 6]], IndexError, r"row 6 is out of range for 6 rows"),
        (lambda d: d[np.array([2**64 - 1], dtype=np.uint64)], IndexError, r"row 18446744073709551615"),
        (lambda d: d[[0.5]], IndexError, r"integers or booleans, got float64"),
        (lambda d: d[torch.tensor([0.5], dtype=torch.bfloat16)], IndexError, r"got torch.bfloat16"),
        (lambda d: d[[[0, 1]]], IndexError, r"one dimension, got shape \(1, 2\)"),
        (lambda d: d[np.array(1)], IndexError, r"one dimension"),
        (lambda d: d[[True, False]], IndexError, r"mask has 2 entries, expected 6"),
        (lambda d: d[::-1], ValueError, r"step must be at least 1, got -1"),
        (lambda d: d[::0], ValueError, r"got 0"),
        (lambda d: d.chunk(4), ValueError, r"6 rows cannot be divided into 4"),
        (lambda d: d.chunk(0), ValueError, r"at least 1, got 0"),
        (lambda d: d.split(0), ValueError, r"at least 1, got 0"),
        (lambda d: d.repeat(-1), ValueError, r"at least 0, got -1"),
        (lambda d: d.make_iterator(4, 1), ValueError, r"divide the 6 rows, got 4"),
        (lambda d: d.make_iterator(0, 1), ValueError, r"got 0"),
        (lambda d: d.reorder([6]), IndexError, r"row 6"),
        (lambda d: DataProto.concat([]), ValueError, r"empty list"),
        (lambda d: DataProto.concat([d, {}]), SchemaError, r"concat of a dict"),
        (lambda d: pad_dataproto_to_divisor(d, 0), ValueError, r"at least 1, got 0"),
        (lambda d: unpad_dataproto(d, 7), ValueError, r"between 0 and the 6 rows, got 7"),
        (lambda d: unpad_dataproto(d, -1), ValueError, r"got -1"),
    ],
)
def test_bad_calls_change_nothing(call, error, message):
    data = make()
    with pytest.raises(error, match=message):
        call(data)
    assert data.equals(make())


def test_check_consistency_after_a_direct_edit():
    data = make()
    data.batch["short"] = torch.zeros(2)
    with pytest.raises(SchemaError, match=r"batch\['short'\] has 2 rows, expected 6"):
        data.check_consistency()


def test_renaming_can_swap_and_keeps_the_order():
    data = DataProto({"a": torch.zeros(1), "b": torch.ones(1)}).rename(["a", "b"], ["b", "a"])
    assert [(name, tensor.item()) for name, tensor in data.batch.items()] == [("b", 0), ("a", 1)]
