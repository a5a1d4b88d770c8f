"""Declared schemas, exact conversions, and what a `DataProto` of ragged columns does beyond verl's."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mooncake_ray.data import DataProto, FieldSchema, Ragged, fold_batch_dim, unfold_batch_dim
from mooncake_ray.data.exact import converted
from mooncake_ray.errors import SchemaError

T = torch.tensor


def batch():
    objects = np.empty(3, object)
    objects[:] = ["a", None, {}]
    return DataProto(
        {
            "ids": Ragged.from_lists([[1, 2], [], [300]]),
            "log_probs": Ragged.from_lists([[0.5, 1.0], None, [0.25]]),
            "tools": Ragged.from_lists([[[1], []], [], [[2, 3]]]),
            "pixels": Ragged(torch.zeros(4, 3, dtype=torch.bfloat16), T([0, 1, 1, 4]), None, 1),
            "score": T([[1.0, 2.0]] * 3),
        },
        {"extra": objects, "turns": np.array([1, 2, 3]), "uid": np.array(["a", "b", "c"])},
        {"step": 1},
    )


SCHEMAS = (
    FieldSchema("ids", "ragged", "int64", (None,), False, 1),
    FieldSchema("log_probs", "ragged", "float32", (None,), True, 1),
    FieldSchema("tools", "ragged", "int64", (None, None), False, 2),
    FieldSchema("pixels", "ragged", "bfloat16", (3, None), False, 1),
    FieldSchema("score", "dense", "float32", (2,), False, 0),
    FieldSchema("extra", "object", None, (), True, 0),
    FieldSchema("turns", "dense", "int64", (), False, 0),
    FieldSchema("uid", "dense", "<U1", (), False, 0),
)


def test_schema_is_inferred():
    assert batch().schema() == SCHEMAS
    assert batch().validate(SCHEMAS).equals(batch())
    assert batch()[:1].schema()[1].nullable is False
    assert pickle.loads(pickle.dumps(SCHEMAS)) == SCHEMAS


def test_validation_shares_what_is_right():
    data = batch()
    again = data.validate(SCHEMAS)
    assert all(again.batch[name] is data.batch[name] for name in data.batch)
    assert all(again.non_tensor_batch[name] is data.non_tensor_batch[name] for name in data.non_tensor_batch)


def test_the_declared_dtype_wins():
    declared = [
        FieldSchema("ids", "ragged", "int32"),
        FieldSchema("log_probs", "ragged", "bfloat16", nullable=True),
        FieldSchema("tools", "ragged", "uint8", levels=2),
        FieldSchema("pixels", "ragged", "float64"),
        FieldSchema("score", "dense", "uint8", (None,)),
        FieldSchema("turns", "dense", "float32"),
    ]
    data = batch()
    result = data.validate(declared)
    assert [column.dtype for column in result.batch.values()] == [torch.int32, torch.bfloat16, torch.uint8, torch.float64, torch.uint8]
    assert result.batch["ids"].to_lists() == [[1, 2], [], [300]]
    assert result.batch["log_probs"].to_lists() == [[0.5, 1.0], None, [0.25]]
    assert result.batch["tools"].to_lists() == [[[1], []], [], [[2, 3]]]
    assert result.batch["pixels"].full_row_shape == (3, None)
    assert result.batch["score"].tolist() == [[1, 2]] * 3
    assert result.non_tensor_batch["turns"].dtype == np.float32
    assert data.equals(batch())


def test_from_dict_takes_a_schema():
    schema = [
        FieldSchema("ids", "ragged", "int32"),
        FieldSchema("tools", "ragged", "int64", (None, None)),
        FieldSchema("mask", "ragged", "bool"),
        FieldSchema("score", "dense", "float64"),
    ]
    data = DataProto.from_dict(
        {"ids": [[1], []], "tools": [[], []], "mask": [T([1, 0]), T([1])], "score": T([1, 2]), "other": T([0, 0])}, schema=iter(schema)
    )
    assert [f.levels for f in data.schema()] == [1, 2, 1, 0, 0]
    assert data.batch["ids"].dtype == torch.int32 and data.batch["mask"].to_lists() == [[True, False], [True]]
    assert data.batch["score"].dtype == torch.float64
    with pytest.raises(SchemaError, match=r"field 'ids', row 1, item 0: 0\.5 is not exact as int32"):
        DataProto.from_dict({"ids": [[1.0], [0.5]]}, schema=schema[:1])
    with pytest.raises(SchemaError, match=r"batch\['ids'\] is a list"):
        DataProto.from_dict({"ids": [[1]]})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (FieldSchema("gone", "dense"), r"field 'gone' is missing, expected dense of any dtype; there are \['ids'"),
        (FieldSchema("ids", "dense"), r"field 'ids' is ragged int64\[\*\], expected dense of any dtype"),
        (FieldSchema("score", "ragged"), r"field 'score' is dense float32\[2\], expected ragged"),
        (FieldSchema("score", "dense", None, (3,)), r"field 'score' is dense float32\[2\], expected dense of any dtype\[3\]"),
        (FieldSchema("score", "dense", None, ()), r"expected dense of any dtype\[\]"),
        (FieldSchema("ids", "ragged", None, (None, 2)), r"is ragged int64\[\*\], expected ragged of any dtype\[\*, 2\]"),
        (FieldSchema("pixels", "ragged", None, (None, 3)), r"bfloat16\[3, \*\], expected ragged of any dtype\[\*, 3\]"),
        (FieldSchema("ids", "ragged", levels=2), r"field 'ids' is ragged int64\[\*\], expected ragged"),
        (FieldSchema("log_probs", "ragged"), r"field 'log_probs', row 1 is null, expected ragged"),
        (FieldSchema("extra", "object"), r"field 'extra', row 1 is null, expected object"),
        (FieldSchema("ids", "ragged", "uint8"), r"field 'ids', row 2: 300 \(int64\) is not exact as uint8"),
        (FieldSchema("tools", "ragged", "bool", levels=2), r"field 'tools', row 2: 2 \(int64\) is not exact as bool"),
        (FieldSchema("score", "dense", "bool"), r"field 'score', row 0: 2.0 \(float32\) is not exact as bool"),
        (FieldSchema("turns", "dense", "bool"), r"field 'turns', row 1: 2 \(int64\) is not exact as bool"),
        (FieldSchema("turns", "dense", "bfloat16"), "field 'turns' is an array of int64, expected dense bfloat16"),
        (FieldSchema("uid", "dense", "<U2"), "field 'uid' is an array of <U1, expected dense <U2"),
        (FieldSchema("score", "dense", "<U2"), r"field 'score' is dense float32\[2\], expected dense <U2"),
    ],
    ids=str,
)
def test_what_differs_from_its_schema(schema, message):
    with pytest.raises(SchemaError, match=message):
        batch().validate([schema])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", "list"), "field 'x' is declared 'list'"),
        (("x", "ragged", "integer64"), "dtype 'integer64', which there is not"),
        (("x", "ragged", "<U3"), "dtype '<U3', which there is not"),
        (("x", "dense", "nope"), "dtype 'nope'"),
        (("x", "dense", None, (), False, 1), "declared dense with 1 levels"),
        (("x", "ragged", None, (None,), False, 2), r"declared ragged with 2 levels and rows \(None,\)"),
        (("x", "ragged", None, (3,)), "declared ragged with 0 levels"),
    ],
)
def test_schemas_that_cannot_be(arguments, message):
    with pytest.raises(SchemaError, match=message):
        FieldSchema(*arguments)


# ---------------------------------------------------------------- exact conversions

INTS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
FLOATS = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.float64]


def python_values(tensor):
    """Exact Python numbers of it, by another route than conversions among tensors."""
    if tensor.dtype in FLOATS:
        return tensor.double().tolist()  # exact for all of them
    return [bool(x) if tensor.dtype == torch.bool else int(x) for x in tensor.numpy()]


@pytest.mark.parametrize(("source", "target"), itertools.product(INTS + FLOATS, repeat=2), ids=lambda d: str(d)[6:])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_conversions_are_exact_or_refused(source, target, data):
    raw = data.draw(hnp.arrays(np.uint8, 4 * source.itemsize))
    values = torch.from_numpy(raw & 1 if source == torch.bool else raw).view(source)
    special = [
        0,
        1,
        -1,
        2**24 + 1,
        2**31,
        2**53 + 1,
        2**63 - 1,
        -(2**63),
        2**63,
        2**64 - 1,
        0.5,
        -0.0,
        300,
        448.0,
        1e39,
        float("inf"),
        float("nan"),
    ]
    if data.draw(st.booleans()):
        number = data.draw(st.sampled_from(special))
        if source in FLOATS:
            values = torch.full((1,), float(number), dtype=torch.float64).to(source)
        elif isinstance(number, int) and (
            0 <= number < 2 if source == torch.bool else torch.iinfo(source).min <= number <= torch.iinfo(source).max
        ):
            values = torch.from_numpy(np.array([number], str(source)[6:]))
    result, bad = converted(values, target)
    assert result.dtype == target
    for place, (before, after) in enumerate(zip(python_values(values), python_values(result), strict=True)):
        both_nan = before != before and after != after
        same = both_nan or (before == after and str(float(before)) == str(float(after)) if isinstance(before, float) else before == after)
        if bad is None or place < bad:
            assert same, (before, after)
        elif place == bad:
            # What was refused really cannot be had: no value of the target is this one.
            assert not same or not representable(before, target)


def representable(value, dtype):
    if dtype in FLOATS:
        return True
    if value != value or value in (float("inf"), -float("inf")) or str(value) == "-0.0":
        return False
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return value == int(value) and low <= value <= high


def test_complex_numbers():
    wide, bad = converted(T([1 + 2j], dtype=torch.complex64), torch.complex128)
    assert wide.dtype == torch.complex128 and bad is None
    assert converted(T([0.1j], dtype=torch.complex128), torch.complex64)[1] == 0
    assert converted(T([0.5]), torch.complex64)[0].tolist() == [0.5 + 0j]
    with pytest.raises(SchemaError, match="no exact conversion of complex64 to float32"):
        converted(wide.to(torch.complex64), torch.float32)


# ---------------------------------------------------------------- ragged columns in a batch


def test_rows_of_a_batch_have_their_own_lengths():
    rows = list(batch())
    assert rows[0].batch["ids"].tolist() == [1, 2]
    assert rows[1].batch["log_probs"] is None
    assert rows[2].batch["tools"].to_lists() == [[2, 3]]
    assert rows[2].batch["pixels"].shape == (3, 3)


def test_slices_share_and_batches_print():
    data = batch()
    assert data[1:].batch["ids"].values is data.batch["ids"].values
    assert data.chunk(3)[2].batch["ids"].to_lists() == [[300]]
    assert "ids: int64[3, *], log_probs: float32[3, *], tools: int64[3, *, *], pixels: bfloat16[3, 3, *], score: float32[3, 2]" in repr(
        data
    )
    assert "  pixels: Ragged(3, 3, *) (torch.bfloat16) cpu" in data.get_data_info()


def test_jagged_tensors_become_ragged():
    nested = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(0)], layout=torch.jagged)
    for data in (DataProto({"x": nested}), DataProto.from_single_dict({"x": nested}), DataProto.from_dict({"x": nested})):
        assert isinstance(data.batch["x"], Ragged)
        assert data.batch["x"].values.data_ptr() == nested.values().data_ptr()


def test_ragged_columns_do_not_match():
    one, other = batch(), batch()
    with pytest.raises(SchemaError, match=r"batch\['ids'\] of batch 1 is a tensor, expected a Ragged as in batch 0"):
        DataProto.concat([one.select(["ids"]), DataProto({"ids": T([1])}, one[:1].non_tensor_batch)])
    with pytest.raises(SchemaError, match=r"batch\['ids'\] of batch 1 is torch.int32, expected torch.int64"):
        DataProto.concat([one, other.validate([FieldSchema("ids", "ragged", "int32")])])
    other.batch["pixels"] = Ragged(other.batch["pixels"].values, other.batch["pixels"].offsets)
    with pytest.raises(SchemaError, match=r"rows of shape \(None, 3\), expected \(3, None\) as in batch 0"):
        DataProto.concat([one, other])
    with pytest.raises(SchemaError, match=r"batch\['ids'\] is in both batches, row 2 is .*300.*, expected .*3"):
        DataProto({"ids": Ragged.from_lists([[1, 2], [], [3]])}).union(one.select(["ids"], []))
    with pytest.raises(SchemaError, match=r"got torch.int64\[3, \*\], expected torch.int64\[3\]"):
        DataProto({"ids": T([1, 2, 3])}).union(one.select(["ids"], []))
    with pytest.raises(SchemaError, match=r"batch\['b'\] has 1 rows, expected 3 as in 'a'"):
        DataProto({"a": one.batch["ids"], "b": one.batch["ids"][:1]})


def test_union_takes_nan_as_equal_in_ragged_columns():
    data = DataProto({"x": Ragged.from_lists([[float("nan")], [1.0]])})
    data.union(DataProto({"x": Ragged.from_lists([[-float("nan")], [1.0]])}))
    assert not data.equals(DataProto({"x": Ragged.from_lists([[-float("nan")], [1.0]])}))


def test_unfold_column_chunks_cuts_ragged_rows():
    column = Ragged.from_lists([[1, 2, 3, 4], None, [], [5, 6]])[1:]
    data = DataProto({"x": column, "y": Ragged.from_lists([[1], [2], [3]])}).unfold_column_chunks(2, ["x"])
    assert data.batch["x"].to_lists() == [None, None, [], [], [5], [6]]
    assert data.batch["x"].values is column.values
    assert data.batch["y"].to_lists() == [[1], [1], [2], [2], [3], [3]]


def test_folding_makes_rows_of_rows():
    data = batch()
    folded = fold_batch_dim(data, 3)
    assert folded.batch["ids"].to_lists() == [[[1, 2]], [[]], [[300]]]
    assert folded.batch["ids"].values is data.batch["ids"]
    assert unfold_batch_dim(folded).equals(data)
    assert unfold_batch_dim(fold_batch_dim(folded, 1), 3).equals(data)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda d: d.unfold_column_chunks(2, ["ids"]), SchemaError, "row 2 of 'ids' has 1 items, which cannot be divided into 2"),
        (lambda d: d.unfold_column_chunks(2, ["pixels"]), SchemaError, "expected the ragged dimension first"),
        (lambda d: d.unfold_column_chunks(3, ["score"]), SchemaError, r"'score' has rows of shape \(2,\)"),
        (lambda d: d.unfold_column_chunks(3, ["turns"]), SchemaError, r"'turns' has rows of shape \(\)"),
        (lambda d: d.unfold_column_chunks(2, ["nope"]), KeyError, "nope"),
        (lambda d: d.unfold_column_chunks(0), ValueError, "at least 1, got 0"),
        (lambda d: fold_batch_dim(d, 2), ValueError, "divide the 3 rows, got 2"),
        (lambda d: unfold_batch_dim(d), SchemaError, r"'ids' has rows int64\[\*\], expected lists of rows"),
        (lambda d: unfold_batch_dim(d.select(["tools"], [])), SchemaError, r"'tools' has rows of \[0, 1, 2\] rows"),
        (lambda d: unfold_batch_dim(d.select(["score"])), SchemaError, "'extra' has 1 dimensions, expected at least 2"),
        (
            lambda d: unfold_batch_dim(DataProto({"a": torch.ones(2, 2), "b": torch.ones(2, 3)})),
            SchemaError,
            r"'b' .* \(2, 3\), expected \(2, 2\)",
        ),
        (lambda d: unfold_batch_dim(d, 0), ValueError, "at least 1, got 0"),
        (lambda d: d.to_verl(), SchemaError, r"batch\['log_probs'\]: row 1 is null"),
        (lambda d: d.select(["tools"]).to_tensordict(), SchemaError, r"batch\['tools'\]: rows are lists of rows"),
        (lambda d: DataProto({"a": T([1])}, None, {"a": 1}).to_tensordict(), SchemaError, r"meta_info\['a'\] has the name of a column"),
        (lambda d: d.padding(1, "middle"), ValueError, "padding_candidate is 'middle'"),
        (lambda d: d.padding(-1), ValueError, "at least 0, got -1"),
        (lambda d: d[:0].padding(1), ValueError, "no row to pad with"),
        (lambda d: d.sample_level_repeat([1, 2]), ValueError, r"shape \(2,\), expected one number for each of 3 rows"),
        (lambda d: d.sample_level_repeat([1, -2, 0]), ValueError, "row 1 is to be repeated -2 times"),
        (lambda d: d.sample_level_repeat([1, 0.5, 0]), ValueError, "repeat_times is torch.float32"),
        (lambda d: d.sample_level_repeat(3), TypeError, "repeat_times is a int"),
        (lambda d: DataProto.from_dict({"a": T([1])}, num_batch_dims=2), ValueError, "num_batch_dims must be 1, got 2"),
    ],
)
def test_bad_calls_change_nothing(call, error, message):
    data = batch()
    with pytest.raises(error, match=message):
        call(data)
    assert data.equals(batch())


DTYPES = [torch.uint16, torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_files_have_every_dtype_and_no_more_than_the_rows(tmp_path, dtype):
    whole = torch.zeros(1 << 14, 4, dtype=torch.uint8).to(dtype)
    objects = np.empty(1 << 14, object)
    for row in range(1 << 14):
        objects[row] = whole[row]
    data = DataProto({"x": whole, "r": Ragged(whole, torch.arange(0, (1 << 14) + 1))}, {"o": objects})
    part = data[5:8]
    part.save_to_disk(tmp_path / "part")
    assert (tmp_path / "part").stat().st_size < 4000
    again = DataProto.load_from_disk(str(tmp_path / "part"))
    assert again.equals(part)
    again.batch["x"].zero_()
    part[:0].save_to_disk(tmp_path / "empty")
    assert DataProto.load_from_disk(tmp_path / "empty").equals(part[:0])


def test_files_of_something_else(tmp_path):
    (tmp_path / "list").write_bytes(pickle.dumps([1]))
    with pytest.raises(SchemaError, match="has a list, expected a DataProto"):
        DataProto.load_from_disk(tmp_path / "list")


def test_from_tensordict_refuses_what_it_cannot_hold():
    from tensordict import TensorDict

    nested = TensorDict({"a": torch.ones(2), "b": TensorDict({"c": torch.ones(2)}, batch_size=[2])}, batch_size=[2])
    with pytest.raises(SchemaError, match="field 'b' is a TensorDict"):
        DataProto.from_tensordict(nested)
    with pytest.raises(ValueError, match="num_batch_dims must be 1, got 2"):
        DataProto.from_tensordict(nested, num_batch_dims=2)
