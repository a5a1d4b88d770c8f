"""`Ragged` against lists of rows, whatever the dtype; its conversions; bad input."""

from __future__ import annotations

import copy
import pickle
import struct

import numpy as np
import pytest
import torch
from any_tensor import random_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mooncake_ray import Ragged
from mooncake_ray.errors import SchemaError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.complex128,
]


def bits(tensor):
    """Dtype, shape and bytes of a tensor."""
    raw = bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), raw


def model(column):
    """The rows, as bits, read off the fields one by one."""
    rows = []
    for row in range(len(column)):
        a, b = int(column.offsets[row]), int(column.offsets[row + 1])
        if column.valid is not None and not column.valid[row]:
            rows.append(None)
        elif isinstance(column.values, Ragged):
            rows.append(model(column.values)[a:b])
        else:
            rows.append(bits(column.values[a:b].movedim(0, column.ragged_dim)))
    return rows


@st.composite
def columns(draw, dtypes=DTYPES, tails=((), (2,), (2, 3), (0,)), levels=(1, 2), dims=True, nulls=True, min_rows=0):
    """Random bits, rows of 0 to 4 items, items before and behind what the rows cover, and values that are not contiguous."""
    rows = draw(st.integers(min_rows, min_rows + 5))
    lengths = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    valid = None
    if nulls and draw(st.booleans()):
        valid = torch.tensor(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), dtype=torch.bool)
        lengths = [n if mark else 0 for n, mark in zip(lengths, valid.tolist(), strict=True)]
    before, behind = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    offsets = torch.tensor([before, *lengths]).cumsum(0)
    items = before + sum(lengths) + behind
    if draw(st.sampled_from(levels)) == 2:
        inner = draw(columns(dtypes, tails, (1,), dims, nulls, min_rows=items))
        return Ragged(inner, offsets, valid)
    dtype, tail = draw(st.sampled_from(dtypes)), draw(st.sampled_from(tails))
    if tail and draw(st.booleans()):
        values = random_tensor(draw, (tail[0], items, *tail[1:]), dtype).movedim(1, 0)
    else:
        values = random_tensor(draw, (items, *tail), dtype)
    return Ragged(values, offsets, valid, draw(st.integers(0, len(tail))) if dims else 0)


def tokens(rows=3):
    return Ragged(torch.arange(10), torch.tensor([1, 3, 3, 7])[: rows + 1])


# ---------------------------------------------------------------- rows


@settings(max_examples=150, deadline=None)
@given(columns())
def test_rows_are_what_the_fields_say(column):
    expected = model(column)
    rows = [column[i] for i in range(len(column))]
    for row, other, again in zip(rows, expected, column, strict=True):
        if isinstance(row, Ragged):
            assert model(row) == other == model(again)
        else:
            assert (row if row is None else bits(row)) == other == (again if again is None else bits(again))
    assert len(column) == len(expected)
    assert column.lengths().tolist() == [
        0 if row is None else len(row) if isinstance(row, list) else row[1][column.ragged_dim] for row in expected
    ]
    assert column.null_count == expected.count(None)
    flat = [row for row in expected if row is not None]
    if column.levels == 2:
        flat = [row for inner in flat for row in inner if row is not None]
    assert column.nbytes == sum(len(raw) for _, _, raw in flat)


@settings(max_examples=150, deadline=None)
@given(columns(), st.data())
def test_slices_are_list_slices_and_copy_nothing(column, data):
    cut = data.draw(st.slices(len(column)))
    part = column[cut]
    assert model(part) == model(column)[cut]
    if cut.step in (None, 1):
        assert part.values is column.values
        assert part.offsets.untyped_storage().data_ptr() == column.offsets.untyped_storage().data_ptr()


@settings(max_examples=150, deadline=None)
@given(columns(min_rows=1), st.data())
def test_select_idxs_is_list_indexing(column, data):
    rows = len(column)
    index = data.draw(hnp.arrays(np.int64, st.integers(0, 9), elements=st.integers(-rows, rows - 1)) | hnp.arrays(bool, rows))
    numbers = np.flatnonzero(index) if index.dtype == bool else index
    expected = [model(column)[i] for i in numbers]
    for form in (index, index.tolist(), torch.from_numpy(index)):
        assert model(column.select_idxs(form)) == expected
        assert model(column[form]) == expected


@settings(max_examples=60, deadline=None)
@given(columns(), st.integers(0, 3), st.integers(1, 7))
def test_repeat_split_and_chunk_are_those_of_lists(column, times, size):
    rows = model(column)
    assert model(column.repeat(times)) == [row for row in rows for _ in range(times)]
    assert model(column.repeat(times, interleave=False)) == rows * times
    parts = column.split(size)
    assert [model(part) for part in parts] == [rows[i : i + size] for i in range(0, len(rows), size)]
    if len(rows) % size == 0:
        assert [model(part) for part in column.chunk(size)] == [
            rows[i * len(rows) // size : (i + 1) * len(rows) // size] for i in range(size)
        ]
    if parts:
        joined = Ragged.concat(parts)
        assert model(joined) == rows
        assert joined.equals(column)


@settings(max_examples=100, deadline=None)
@given(columns())
def test_compact_pickle_and_deepcopy_keep_the_rows(column):
    part = column.compact()
    assert model(part) == model(column)
    assert part.compact() is part
    assert part.span == (0, len(part.values))
    for other in (part, pickle.loads(pickle.dumps(column)), copy.deepcopy(column), column.to("cpu")):
        assert other.equals(column) and column.equals(other)
        assert model(other) == model(column)


def test_neighbours_are_views_and_others_are_not():
    column = tokens()
    assert column.select_idxs([1, 2]).values is column.values
    assert column.select_idxs([True, True, False]).values is column.values
    assert column.repeat(1).values is column.values
    copied = column.select_idxs([2, 0])
    copied.values.zero_()
    assert [row.tolist() for row in column] == [[1, 2], [], [3, 4, 5, 6]]
    column[0][0] = 99
    assert column.values[1] == 99, "a row is a view"


def test_pickle_has_the_rows_only():
    column = Ragged(torch.zeros(1 << 16), torch.arange(0, (1 << 16) + 1, 16))
    assert len(pickle.dumps(column[3:5])) < 2000
    nested = Ragged(column, torch.arange(0, len(column) + 1, 2))
    assert len(pickle.dumps(nested[3:5])) < 3000


@settings(max_examples=80, deadline=None)
@given(columns(min_rows=1), st.data())
def test_equals_sees_every_bit(column, data):
    other = copy.deepcopy(column)
    leaf = other.values.values if other.levels == 2 else other.values
    raw = leaf.view(-1).view(torch.uint8)
    if column.nbytes and leaf.dtype != torch.bool:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert other.equals(column) is (model(other) == model(column))


def test_equals_sees_rows_nulls_dtypes_and_shapes():
    column = tokens()
    assert column.equals(Ragged.from_lists([[1, 2], [], [3, 4, 5, 6]]))
    assert not column.equals(Ragged.from_lists([[1, 2], None, [3, 4, 5, 6]]))
    assert not column.equals(Ragged.from_lists([[1, 2], [3, 4, 5, 6], []]))
    assert not column.equals(Ragged.from_lists([[1, 2], [], [3, 4, 5, 6]], torch.int32))
    assert not column.equals(column[:2])
    assert not column.equals([[1, 2], [], [3, 4, 5, 6]])
    square = torch.zeros(4, 2)
    assert not Ragged(square, torch.tensor([0, 2, 4])).equals(Ragged(square, torch.tensor([0, 2, 4]), None, 1))
    all_there = Ragged(column.values, column.offsets, torch.tensor([True] * 3))
    assert all_there.equals(column) and column.equals(all_there), "which rows are null counts, not whether one could be"


def test_gradients_flow_through_rows_and_copies():
    values = torch.arange(6.0, requires_grad=True)
    column = Ragged(values, torch.tensor([0, 2, 6]))
    (column.select_idxs([1, 0, 0]).values.sum() + Ragged.concat([column, column]).values.sum() + column.to_padded().sum()).backward()
    assert values.grad.tolist() == [5, 5, 4, 4, 4, 4]


def test_to_moves_what_the_rows_cover():
    column = tokens()
    assert column.to("cpu") is column
    moved = column[1:].to("meta")
    assert moved.device.type == "meta" and moved.offsets.tolist() == [0, 0, 4]
    assert len(moved.values) == 4


def test_repr():
    column = Ragged(torch.zeros(5, 3, dtype=torch.bfloat16), torch.tensor([0, 2, 2, 4]), torch.tensor([True, False, True]))
    assert repr(column) == "Ragged(rows=3, items=4, bfloat16[*, 3], nulls=1)"
    assert repr(Ragged(column, torch.tensor([0, 2]))) == "Ragged(rows=1, items=2, bfloat16[*, *, 3])"
    assert repr(Ragged(column.values, column.offsets, None, 1)) == "Ragged(rows=3, items=4, bfloat16[3, *])"


# ---------------------------------------------------------------- conversions


@settings(max_examples=100, deadline=None)
@given(columns(levels=(1,)))
def test_tensors_round_trip(column):
    rows = column.to_list()
    again = Ragged.from_tensors(rows, ragged_dim=column.ragged_dim) if any(row is not None for row in rows) else column
    assert again.equals(column) and model(again) == model(column)


def test_lists_of_tensors_make_rows_of_rows():
    rows = [[torch.tensor([1, 2]), None], None, [], [torch.tensor([3])]]
    column = Ragged.from_tensors(rows)
    assert column.levels == 2
    assert column.to_lists() == [[[1, 2], None], None, [], [[3]]]
    assert [r if r is None else [x if x is None else x.tolist() for x in r] for r in column.to_list()] == column.to_lists()


NUMBERS = {
    torch.bool: st.booleans(),
    torch.int64: st.integers(-(2**63), 2**63 - 1),
    torch.float32: st.floats(width=32),
    torch.float64: st.floats(),
}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(NUMBERS)), st.data())
def test_lists_round_trip(dtype, data):
    one = st.none() | st.lists(NUMBERS[dtype], max_size=4)
    for rows in (data.draw(st.lists(one, max_size=5)), data.draw(st.lists(st.none() | st.lists(one, max_size=3), max_size=4))):
        column = Ragged.from_lists(rows)
        assert len(column) == len(rows)
        # Exact types and bits: repr tells -0.0 and 1 from 1.0 and True.
        assert repr(column.to_lists()) == repr(rows)


def test_the_dtype_follows_from_the_numbers():
    assert Ragged.from_lists([[1], [2**40]]).dtype == torch.int64
    assert Ragged.from_lists([[0.5], None]).dtype == torch.float32
    assert Ragged.from_lists([[0.1]]).dtype == torch.float64
    assert Ragged.from_lists([[True], []]).dtype == torch.bool
    assert Ragged.from_lists([[], None]).dtype == torch.int64
    assert Ragged.from_lists([[], None], torch.bfloat16).dtype == torch.bfloat16
    assert Ragged.from_lists([[2**64 - 1]], torch.uint64).to_lists() == [[2**64 - 1]]
    assert Ragged.from_lists([[1, 0.5], [True]], torch.bfloat16).to_lists() == [[1.0, 0.5], [1.0]]
    assert Ragged.from_lists([[], []], levels=2).levels == 2


@settings(max_examples=100, deadline=None)
@given(columns(levels=(1,), nulls=False), st.sampled_from(["left", "right"]), st.integers(0, 3), st.booleans())
def test_padded_round_trip(column, side, more, by_mask):
    width = max(column.lengths().tolist(), default=0) + more
    padded, mask = column.to_padded(width, side), column.mask(width, side)
    shape = list(column.row_shape)
    shape.insert(column.ragged_dim, width)
    assert tuple(padded.shape) == (len(column), *shape) and padded.dtype == column.dtype
    for row, (items, n) in enumerate(zip(column, column.lengths().tolist(), strict=True)):
        place = slice(width - n, None) if side == "left" else slice(0, n)
        whole = padded[row].movedim(column.ragged_dim, 0)
        assert bits(whole[place].movedim(0, column.ragged_dim)) == bits(items)
        assert mask[row].tolist() == [int(i in range(width)[place]) for i in range(width)]
        rest = whole[: width - n] if side == "left" else whole[n:]
        assert set(bits(rest)[2]) <= {0}
    known = {"mask": mask} if by_mask else {"lengths": column.lengths()}
    assert Ragged.from_padded(padded, side=side, ragged_dim=column.ragged_dim, **known).equals(column)


def test_padding_has_the_bits_asked_for():
    column = Ragged.from_lists([[1], None, [2, 3]])
    assert column.to_padded(pad=-1).tolist() == [[1, -1], [-1, -1], [2, 3]]
    assert column.to_padded(3, "left", 7).tolist() == [[7, 7, 1], [7, 7, 7], [7, 2, 3]]
    assert column.mask().tolist() == [[1, 0], [0, 0], [1, 1]]
    assert column.mask(dtype=torch.bool).dtype == torch.bool
    floats = Ragged.from_lists([[0.5], []])
    assert floats.to_padded(pad=float("-inf")).tolist() == [[0.5], [float("-inf")]]
    assert struct.pack("f", floats.to_padded(pad=-0.0)[1, 0]) == struct.pack("f", -0.0)
    assert Ragged.from_lists([[], [1]], torch.uint64).to_padded(pad=2**64 - 1)[0, 0].item() == 2**64 - 1
    assert Ragged.from_lists([]).to_padded().shape == (0, 0)


@settings(max_examples=100, deadline=None)
@given(
    columns(dtypes=[torch.int64, torch.float32, torch.bfloat16, torch.bool], tails=((), (2,), (2, 3)), levels=(1,), nulls=False, min_rows=1)
)
def test_jagged_round_trip(column):
    nested = column.to_jagged()
    assert nested._ragged_idx == column.ragged_dim + 1
    assert [bits(row) for row in nested.unbind()] == model(column)
    lengths = column.lengths().tolist()
    assert (nested._min_seqlen, nested._max_seqlen) == (min(lengths), max(lengths))
    again = Ragged.from_jagged(nested)
    assert again.equals(column)
    assert again.ragged_dim == column.ragged_dim


def test_jagged_with_another_ragged_dimension_keeps_its_memory():
    values = torch.arange(15.0).view(3, 5)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5]), jagged_dim=2)
    column = Ragged.from_jagged(nested)
    assert column.ragged_dim == 1 and column.row_shape == (3,) and column.full_row_shape == (3, None)
    assert column[1].tolist() == values[:, 2:].tolist()
    assert column.values.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    assert column.to_jagged().values().data_ptr() == values.data_ptr()
    assert column[[1, 0]].to_jagged().unbind()[0].tolist() == values[:, 2:].tolist()


def test_jagged_pads_to_its_longest_row():
    lengths = [3, 1, 4]
    nested = Ragged.from_tensors([torch.ones(n) for n in lengths]).to_jagged()
    assert nested.to_padded_tensor(0.0).shape == (3, 4)


def test_jagged_with_holes():
    values = torch.arange(10)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 10]), lengths=torch.tensor([2, 3]))
    assert Ragged.from_jagged(nested).to_lists() == [[0, 1], [4, 5, 6]]


# ---------------------------------------------------------------- Arrow

ARROW = [d for d in DTYPES if d not in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.complex64, torch.complex128)]


@settings(max_examples=100, deadline=None)
@given(columns(dtypes=ARROW, tails=((), (2,), (2, 3)), dims=False), st.data())
def test_arrow_round_trip(column, data):
    pa = pytest.importorskip("pyarrow")
    array = column.to_arrow()
    array.validate(full=True)
    assert array.null_count == column.null_count and len(array) == len(column)
    assert Ragged.from_arrow(array).equals(column)
    cut = data.draw(st.slices(len(column)))
    cut = slice(*cut.indices(len(column))[:2])
    assert Ragged.from_arrow(array[cut]).equals(column[cut])
    assert Ragged.from_arrow(pa.chunked_array([array, array[:1]])).equals(Ragged.concat([column, column[:1]]))
    if column.dtype not in (torch.float16, torch.float32, torch.float64):
        assert array.to_pylist() == column.to_lists()
        if column.levels == 1 and column.row_shape == ():
            made = pa.array(column.to_lists(), type=pa.list_(array.type.value_type))
            assert Ragged.from_arrow(made).equals(column)


def test_arrow_shares_memory():
    pa = pytest.importorskip("pyarrow")
    column = Ragged.from_lists([[1, 2], [3]])
    array = column.to_arrow()
    assert array.values.buffers()[1].address == column.values.data_ptr()
    assert Ragged.from_arrow(array).values.data_ptr() == column.values.data_ptr()
    del column, array
    back = Ragged.from_arrow(pa.array([[1, 2], None, [3]]))
    assert back.to_lists() == [[1, 2], None, [3]]


def test_arrow_items_behind_nulls_are_dropped():
    pa = pytest.importorskip("pyarrow")
    array = pa.ListArray.from_arrays(pa.array([0, 2, 3, 5], pa.int32()), pa.array([1, 2, 3, 4, 5]), mask=pa.array([False, True, False]))
    assert Ragged.from_arrow(array).to_lists() == [[1, 2], None, [4, 5]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda pa: pa.array([["a"]]), "Arrow's string"),
        (lambda pa: pa.array([[1, None]]), "item 1 of the rows' items is null"),
        (lambda pa: pa.array([1, 2]), "expected an Arrow list"),
        (lambda pa: [[1]], "got list"),
        (lambda pa: pa.array([[[1, 2], None]], pa.list_(pa.list_(pa.int64(), 2))), "item 1 of the rows' items is null"),
    ],
)
def test_arrow_that_is_no_column(make, message):
    pa = pytest.importorskip("pyarrow")
    with pytest.raises(SchemaError, match=message):
        Ragged.from_arrow(make(pa))


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - set(ARROW), key=str))
def test_arrow_has_no_such_type(dtype):
    pytest.importorskip("pyarrow")
    with pytest.raises(SchemaError, match=f"Arrow has no type for {str(dtype)[6:]}"):
        Ragged(torch.zeros(2, dtype=dtype), torch.tensor([0, 2])).to_arrow()


# ---------------------------------------------------------------- bad input

T = torch.tensor


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Ragged([1], T([0, 1])), "values is a list, expected a torch.Tensor or a Ragged"),
        (lambda: Ragged(T(1), T([0, 1])), "values is a scalar"),
        (lambda: Ragged(torch.ones(2).to_sparse(), T([0, 1])), "not a dense tensor"),
        (lambda: Ragged(T([1]), T([0.0, 1])), r"offsets is torch.float32\[2\], expected torch.int64"),
        (lambda: Ragged(T([1]), [0, 1]), "offsets is a list"),
        (lambda: Ragged(T([1]), T([], dtype=torch.int64)), r"offsets is torch.int64\[0\]"),
        (lambda: Ragged(T([1]), T([-1, 1])), "row 0 begins at -1, expected at least 0"),
        (lambda: Ragged(T([1, 2, 3]), T([0, 2, 1])), "row 1 ends at 1, before it begins at 2"),
        (lambda: Ragged(T([1, 2, 3]), T([0, 2, 4])), "row 1 reaches 4, beyond the 3 items"),
        (lambda: Ragged(tokens(), T([0, 2, 4])), "row 1 reaches 4, beyond the 3 items"),
        (lambda: Ragged(T([1]), T([0, 1]), T([1])), r"valid is torch.int64\[1\], expected torch.bool\[1\]"),
        (lambda: Ragged(T([1]), T([0, 1]), T([True, True])), r"valid is torch.bool\[2\]"),
        (lambda: Ragged(T([1]), T([0, 1]), T([False])), "row 0 is null and has 1 items, expected 0"),
        (lambda: Ragged(T([1]), T([0, 1]), None, 1), r"ragged_dim is 1, expected 0 to 0 for items of shape \(\)"),
        (lambda: Ragged(tokens(), T([0, 1]), None, 1), "ragged_dim is 1, expected 0 as rows are lists"),
        (lambda: Ragged.from_tensors([T([1]), T([0.5])]), "row 1 is torch.float32, expected torch.int64"),
        (lambda: Ragged.from_tensors([T([1]), T([[1]])]), r"row 1 has items of shape \(1,\), expected \(\)"),
        (lambda: Ragged.from_tensors([T([1]), T(1)]), r"row 1 has the shape \(\)"),
        (lambda: Ragged.from_tensors([T([1]), 1]), "row 1 is a int, expected a torch.Tensor or None"),
        (lambda: Ragged.from_tensors([None]), "no row to tell the dtype"),
        (lambda: Ragged.from_tensors([T([1]), T([300])], torch.uint8), "row 1: 300 .int64. is not exact as uint8"),
        (lambda: Ragged.from_tensors([[T([1])], T([2])]), "row 1 is a Tensor, expected a list of rows"),
        (lambda: Ragged.from_lists([[1], [2, 0.5]]), "row 1, item 1: 0.5 is a float next to ints"),
        (lambda: Ragged.from_lists([[1, True]]), "row 0, item 1: True is a bool next to ints"),
        (lambda: Ragged.from_lists([[1], [2, 2**63]]), "row 1, item 1: 9223372036854775808 does not fit int64"),
        (lambda: Ragged.from_lists([[], [1], [300]], torch.uint8), "row 2, item 0: 300 is not exact as uint8"),
        (lambda: Ragged.from_lists([[0.1]], torch.bfloat16), "row 0, item 0: 0.1 is not exact as bfloat16"),
        (lambda: Ragged.from_lists([[-0.0]], torch.int64), "row 0, item 0: -0.0 is not exact as int64"),
        (lambda: Ragged.from_lists([[2**53 + 1, 0.5]], torch.float64), "row 0, item 0: 9007199254740993 is not exact next to floats"),
        (lambda: Ragged.from_lists([["a"]]), "row 0, item 0: 'a' is a str"),
        (lambda: Ragged.from_lists([[np.int64(1)]]), "is a int64"),
        (lambda: Ragged.from_lists([[1], 2]), "row 1 is a int, expected a list or None"),
        (lambda: Ragged.from_lists([[1], [[2]]]), "row 0 is a int, expected a list"),
        (lambda: Ragged.from_padded(torch.zeros(2, 3)), "expected either lengths= or mask="),
        (lambda: Ragged.from_padded(torch.zeros(2), lengths=[1, 1]), r"got float32\[2\]"),
        (lambda: Ragged.from_padded(torch.zeros(2, 3), lengths=[1, 4]), "row 1 has the length 4, expected 0 to the width 3"),
        (lambda: Ragged.from_padded(torch.zeros(2, 3), lengths=[1]), r"lengths is int64\[1\]"),
        (lambda: Ragged.from_padded(torch.zeros(2, 3), mask=T([[1, 1, 0], [1, 0, 1]])), "row 1 of the mask is not 2 ones"),
        (lambda: Ragged.from_padded(torch.zeros(2, 3), mask=T([[2, 0, 0], [1, 1, 1]])), "row 0 of the mask is not 1 ones"),
        (lambda: Ragged.from_padded(torch.zeros(1, 3), mask=T([[1, 0, 0]]), side="left"), "row 0 of the mask .* all zeros to the left"),
        (lambda: tokens().to_padded(3), "row 2 has the length 4, expected at most the width 3"),
        (lambda: tokens().to_padded(pad=0.5), "pad 0.5 is not exact as int64"),
        (lambda: Ragged(tokens(), T([0, 3])).to_padded(), "rows are lists of rows"),
        (lambda: Ragged(tokens(), T([0, 3])).to_jagged(), "rows are lists of rows"),
        (lambda: Ragged.from_lists([[1], None]).to_jagged(), "row 1 is null"),
        (lambda: Ragged.from_jagged(T([1])), r"got int64\[1\], expected a nested tensor"),
        (lambda: Ragged(torch.zeros(1, 2), T([0, 1]), None, 1).to_arrow(), "expected the ragged dimension first"),
        (lambda: Ragged.concat([tokens(), Ragged.from_lists([[1]], torch.int32)]), "part 1 is torch.int32, expected torch.int64"),
        (lambda: Ragged.concat([tokens(), Ragged(torch.zeros(1, 2, dtype=torch.int64), T([0, 1]))]), r"part 1 has rows int64\[\*, 2\]"),
        (lambda: Ragged.concat([tokens(), Ragged(tokens(), T([0, 1]))]), r"part 1 has rows int64\[\*, \*\], expected int64\[\*\]"),
        (lambda: Ragged.concat([tokens(), T([1])]), "part 1 is a Tensor"),
    ],
)
def test_schema_errors(build, message):
    with pytest.raises(SchemaError, match=message):
        build()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c[3], IndexError, "row 3 is out of range for 3 rows"),
        (lambda c: c[-4], IndexError, "row -4"),
        (lambda c: c[[0, 5]], IndexError, "row 5"),
        (lambda c: c[[0.5]], IndexError, "integers or booleans"),
        (lambda c: c.chunk(2), ValueError, "3 rows cannot be divided into 2"),
        (lambda c: c.chunk(0), ValueError, "at least 1, got 0"),
        (lambda c: c.split(0), ValueError, "at least 1, got 0"),
        (lambda c: c.repeat(-1), ValueError, "at least 0, got -1"),
        (lambda c: c.to_padded(side="up"), ValueError, "side is 'up'"),
        (lambda c: c.mask(side="up"), ValueError, "side is 'up'"),
        (lambda c: Ragged.from_padded(torch.zeros(1, 1), lengths=[1], side="up"), ValueError, "side is 'up'"),
        (lambda c: Ragged.concat([]), ValueError, "empty list"),
        (lambda c: setattr(c, "values", None), AttributeError, "cannot assign"),
    ],
)
def test_bad_calls(call, error, message):
    with pytest.raises(error, match=message):
        call(tokens())
