"""Every operation of `DataProto` and of the real verl.DataProto on the same random batch: the same result.

verl has no operations on rows of different lengths but a few in its tensordict helpers. So each ragged column stands in verl's batch as a
padded tensor and its lengths (-1 for a null row), and has to be the same as those after every operation.
"""

from __future__ import annotations

import contextlib
import copy
import io

import numpy as np
import pytest
import torch
from any_tensor import random_tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mooncake_ray.data import (
    DataProto,
    DataProtoConfig,
    Ragged,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from mooncake_ray.data.reshaping import AUTO_PADDING

WIDTH = 4
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
SETTINGS = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def verl():
    """verl's protocol module. The import takes seconds, so it is done once."""
    from verl import protocol

    return protocol


@st.composite
def batches(draw, min_rows=1, names=("d", "r")):
    """`(dense tensors, ragged columns, arrays, meta_info)`."""
    rows = draw(st.integers(min_rows, 8))
    dense, ragged = {}, {}
    for position in range(draw(st.integers(1, 3))):
        tail = draw(st.sampled_from([(), (4,), (6,), (2, 3)]))
        dense[f"{names[0]}{position}"] = random_tensor(draw, (rows, *tail), draw(st.sampled_from(DTYPES)))
    for position in range(draw(st.integers(0, 2))):
        tail = draw(st.sampled_from([(), (2,)]))
        lengths = torch.tensor(draw(st.lists(st.integers(0, WIDTH), min_size=rows, max_size=rows)))
        valid = torch.tensor(draw(st.lists(st.booleans(), min_size=rows, max_size=rows))) if draw(st.booleans()) else None
        lengths = lengths if valid is None else lengths * valid
        values = random_tensor(draw, (int(lengths.sum()), *tail), draw(st.sampled_from(DTYPES)))
        ragged[f"{names[1]}{position}"] = Ragged(values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), valid)
    objects = np.empty(rows, object)
    objects[:] = draw(st.lists(st.none() | st.integers() | st.text(max_size=3), min_size=rows, max_size=rows))
    arrays = {"objects": objects, "numbers": draw(hnp.arrays(np.float32, (rows, 4))), "names": np.array([f"row {i}" for i in range(rows)])}
    return dense, ragged, arrays, {"step": 3, "names": ["a", {"b": 1}]}


def stand_ins(ragged):
    """What verl's batch has for ragged columns."""
    fields = {}
    for name, column in ragged.items():
        lengths = column.lengths()
        fields[f"{name} padded"] = column.to_padded(WIDTH)
        fields[f"{name} lengths"] = lengths if column.valid is None else torch.where(column.valid, lengths, -1)
    return fields


def both(verl, parts):
    dense, ragged, arrays, meta = copy.deepcopy(parts)
    theirs = verl.DataProto.from_dict({**copy.deepcopy(dense), **stand_ins(ragged)}, copy.deepcopy(arrays), copy.deepcopy(meta))
    return DataProto({**dense, **ragged}, arrays, meta), theirs


def assert_same(ours, theirs):
    """Equal bit by bit, ragged columns to what stands for them."""
    assert type(ours) is DataProto
    ragged = {name: column for name, column in ours.batch.items() if isinstance(column, Ragged)}
    dense = {name: column for name, column in ours.batch.items() if name not in ragged}
    expected = DataProto.from_verl(theirs)
    again = DataProto({**dense, **stand_ins(ragged)}, ours.non_tensor_batch, ours.meta_info)
    assert again.equals(expected), f"{again!r} != {expected!r}"
    assert len(ours) == len(theirs)


def index_of(data, rows):
    return data.draw(st.lists(st.integers(-rows, rows - 1), min_size=1, max_size=9))


def tensors_of(batch):
    """Names of the tensor columns; a TensorDict iterates over its rows."""
    return list(batch.batch.keys())


def divisors(n):
    return [i for i in range(1, n + 1) if n % i == 0]


def op_slice(data, rows, verl):
    start, stop, step = data.draw(st.none() | st.integers(0, rows - 1)), None, data.draw(st.none() | st.integers(1, 3))
    return (lambda d: d.slice(start, stop, step)), None


def op_getitem(data, rows, verl):
    cut = slice(0, data.draw(st.integers(1, rows)))
    return (lambda d: d[cut]), None


def op_select_idxs(data, rows, verl):
    index = index_of(data, rows)
    form = data.draw(st.sampled_from([list, np.array, torch.tensor]))
    return (lambda d: d.select_idxs(form(index))), None


def op_mask(data, rows, verl):
    mask = [True, *data.draw(st.lists(st.booleans(), min_size=rows - 1, max_size=rows - 1))]
    form = data.draw(st.sampled_from([list, np.array, torch.tensor]))
    return (lambda d: d[form(mask)]), None


def op_reorder(data, rows, verl):
    order = torch.tensor(data.draw(st.permutations(range(rows))))

    def act(d):
        assert d.reorder(order) is None
        return d

    return act, None


def op_repeat(data, rows, verl):
    times, interleave = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    return (lambda d: d.repeat(times, interleave)), None


def op_sample_level_repeat(data, rows, verl):
    times = [1, *data.draw(st.lists(st.integers(0, 3), min_size=rows - 1, max_size=rows - 1))]
    form = data.draw(st.sampled_from([list, tuple, np.array, torch.tensor]))
    return (lambda d: d.sample_level_repeat(form(times))), None


def op_padding(data, rows, verl):
    size, candidate = data.draw(st.integers(0, 3)), data.draw(st.sampled_from(["first", "last", ""]))

    def act(d):
        assert d.padding(size, candidate) is None
        return d

    return act, None


def op_pad_to_divisor(data, rows, verl):
    divisor = data.draw(st.integers(1, 11))
    return (lambda d: pad_dataproto_to_divisor(d, divisor)[0]), (lambda d: verl.pad_dataproto_to_divisor(d, divisor)[0])


def op_unpad(data, rows, verl):
    size = data.draw(st.integers(0, rows - 1))
    return (lambda d: unpad_dataproto(d, size)), (lambda d: verl.unpad_dataproto(d, size))


def op_fold_and_unfold(data, rows, verl):
    groups = data.draw(st.sampled_from(divisors(rows)))
    return (
        lambda d: unfold_batch_dim(fold_batch_dim(d, groups)),
        lambda d: verl.unfold_batch_dim(verl.fold_batch_dim(d, groups)),
    )


def op_unfold_column_chunks(data, rows, verl):
    n = data.draw(st.sampled_from([1, 2]))

    def act(d):
        # Not what stands for ragged columns: those repeat their rows.
        columns = {**{name: d.batch[name] for name in tensors_of(d) if name.startswith("d")}, **d.non_tensor_batch}
        return d.unfold_column_chunks(n, [name for name, column in columns.items() if column.ndim > 1 and column.shape[1] % n == 0])

    return act, None


def op_chunk(data, rows, verl):
    chunks = data.draw(st.sampled_from(divisors(rows)))
    which = data.draw(st.integers(0, chunks - 1))
    return (lambda d: d.chunk(chunks)[which]), None


def op_split(data, rows, verl):
    size = data.draw(st.integers(1, rows + 1))
    which = data.draw(st.integers(0, (rows - 1) // size))
    return (lambda d: d.split(size)[which]), None


def op_concat(data, rows, verl):
    a, b = index_of(data, rows), index_of(data, rows)

    def act(d):
        return type(d).concat([d.select_idxs(a), d, d.select_idxs(b)])

    return act, None


def op_union(data, rows, verl):
    more = torch.arange(rows)

    def act(d):
        name = next(f"new{i}" for i in range(9) if f"new{i}" not in tensors_of(d))
        other = type(d).from_dict({name: more.clone()}, {f"{name} too": np.arange(rows)}, {"step": 3, "more": 1})
        return d.union(other)

    return act, None


def op_rename(data, rows, verl):
    def act(d):
        name = next((name for name in sorted(tensors_of(d)) if name.startswith("d")), None)
        return d.rename([name], [f"{name}'"]) if name else d

    return act, None


def op_select(data, rows, verl):
    deep = data.draw(st.booleans())

    def act(d):
        part = d.select(
            non_tensor_batch_keys=["objects"] if "objects" in d.non_tensor_batch else None, meta_info_keys=["step"], deepcopy=deep
        )
        part.meta_info["step"] = 3
        return part

    return act, None


def op_pop(data, rows, verl):
    def act(d):
        names = ["objects"] if "objects" in d.non_tensor_batch else []
        popped = d.pop(batch_keys=[], non_tensor_batch_keys=names, meta_info_keys=[])
        assert list(popped.non_tensor_batch) == names
        return d

    return act, None


def op_to(data, rows, verl):
    return (lambda d: d.to("cpu")), None


def op_save_and_load(data, rows, verl):
    def act(d, tmp):
        d.save_to_disk(tmp)
        return type(d).load_from_disk(tmp)

    return act, "file"


OPERATIONS = {name.removeprefix("op_"): value for name, value in list(globals().items()) if name.startswith("op_")}


def apply(operation, data, ours, theirs, verl, tmp_path):
    act, their_act = operation(data, len(ours), verl)
    if theirs.batch is not None:
        theirs.batch.unlock_()  # what verl read from a file cannot be changed otherwise
    if their_act == "file":
        return act(ours, tmp_path / "ours"), act(theirs, tmp_path / "theirs")
    return act(ours), (their_act or act)(theirs)


@pytest.mark.parametrize("name", OPERATIONS)
@SETTINGS
@given(parts=batches(), data=st.data())
def test_one_operation(verl, tmp_path, name, parts, data):
    ours, theirs = both(verl, parts)
    assert_same(*apply(OPERATIONS[name], data, ours, theirs, verl, tmp_path))


@settings(SETTINGS, max_examples=80)
@given(parts=batches(), names=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=2, max_size=5), data=st.data())
def test_several_operations(verl, tmp_path, parts, names, data):
    ours, theirs = both(verl, parts)
    for name in names:
        if len(ours) > 64:
            break
        ours, theirs = apply(OPERATIONS[name], data, ours, theirs, verl, tmp_path)
        assert_same(ours, theirs)


@SETTINGS
@given(parts=batches(), data=st.data())
def test_one_row(verl, parts, data):
    ours, theirs = both(verl, parts)
    row = data.draw(st.integers(-len(ours), len(ours) - 1))
    mine, other = ours[row], theirs[row]
    for name, value in mine.batch.items():
        if isinstance(ours.batch[name], Ragged):
            n = int(other.batch[f"{name} lengths"])
            padded = other.batch[f"{name} padded"]
            assert (value is None) == (n == -1)
            value, expected = (padded[:0] if value is None else value), padded[: max(n, 0)]
        else:
            expected = other.batch[name]
        assert value.dtype == expected.dtype and value.shape == expected.shape
        assert torch.equal(value.reshape(-1).view(torch.uint8), expected.contiguous().reshape(-1).view(torch.uint8))
    assert repr(mine.non_tensor_batch) == repr(other.non_tensor_batch)
    assert mine.meta_info == other.meta_info


@SETTINGS
@given(parts=batches(), data=st.data(), shuffle=st.booleans())
def test_make_iterator(verl, parts, data, shuffle):
    ours, theirs = both(verl, parts)
    size, seed = data.draw(st.sampled_from(divisors(len(ours)))), data.draw(st.integers(0, 99))
    arguments = {"mini_batch_size": size, "epochs": 2, "seed": seed, "dataloader_kwargs": {"shuffle": shuffle}}
    mine, others = list(ours.make_iterator(**arguments)), list(theirs.make_iterator(**arguments))
    assert len(mine) == len(others) == 2 * len(ours) // size
    for one, other in zip(mine, others, strict=True):
        # verl turns every array into an object array here; the values are the same.
        arrays = {name: array.astype(ours.non_tensor_batch[name].dtype) for name, array in other.non_tensor_batch.items()}
        assert_same(one, verl.DataProto(other.batch, arrays, other.meta_info))


@SETTINGS
@given(parts=batches(), data=st.data())
def test_fold_batch_dim(verl, parts, data):
    ours, theirs = both(verl, parts)
    before = copy.deepcopy(ours)
    groups = data.draw(st.sampled_from(divisors(len(ours))))
    mine, other = fold_batch_dim(ours, groups), verl.fold_batch_dim(theirs, groups)
    assert ours.equals(before)
    assert len(mine) == len(other) == groups
    flat = {name: column for name, column in mine.batch.items() if not isinstance(column, Ragged)}
    for name, column in mine.batch.items():
        if isinstance(column, Ragged):
            flat[f"{name} padded"] = torch.stack([rows.to_padded(WIDTH) for rows in column])
            flat[f"{name} lengths"] = torch.stack([stand_ins({name: rows})[f"{name} lengths"] for rows in column])
    assert DataProto(flat, mine.non_tensor_batch, mine.meta_info).equals(DataProto.from_verl(other))


@SETTINGS
@given(parts=batches(), chunks=st.integers(1, 10), only_arrays=st.booleans())
def test_chunk_of_a_batch_that_may_be_padded(verl, parts, chunks, only_arrays):
    dense, _, arrays, meta = parts
    ours = DataProto.from_dict({} if only_arrays else dense, dict(arrays), dict(meta), auto_padding=True)
    theirs = verl.DataProto.from_dict({} if only_arrays else dense, dict(arrays), dict(meta), auto_padding=True)
    assert ours.is_padding_enabled() and theirs.is_padding_enabled()
    try:
        expected = theirs.chunk(chunks)
    except (AssertionError, IndexError):  # fewer chunks than asked for
        with pytest.raises(ValueError, match=f"{len(ours)} rows cannot be divided into {chunks} chunks"):
            ours.chunk(chunks)
        return
    for one, other in zip(ours.chunk(chunks), expected, strict=True):
        assert_same(one, other)


def test_padding_can_be_switched_on_for_all(verl, monkeypatch):
    ours, theirs = DataProto({"a": torch.ones(3)}), verl.DataProto.from_dict({"a": torch.ones(3)})
    assert verl.DataProtoConfig.auto_padding_key == AUTO_PADDING
    for value, expected in (("", False), ("1", True), ("true", True), ("0", False)):
        monkeypatch.setenv("VERL_AUTO_PADDING", value)
        assert ours.is_padding_enabled() is theirs.is_padding_enabled() is expected
    monkeypatch.delenv("VERL_AUTO_PADDING")
    DataProtoConfig.auto_padding = True
    try:
        assert ours.is_padding_enabled()
        assert [len(c) for c in ours.chunk(2)] == [2, 1]
    finally:
        DataProtoConfig.auto_padding = False
    assert not ours.is_padding_enabled()
    with pytest.raises(TypeError, match="auto_padding is a int"):
        DataProtoConfig.auto_padding = 1


@SETTINGS
@given(parts=batches())
def test_reports(verl, parts):
    dense, _, arrays, _ = parts
    meta = {"a": [1, 2.0], "b": (1, "x"), "c": {"k": [None]}, "d": {}, "e": [], "f": np.zeros(2)}
    meta["a"] = [1, 2]  # of several types in a list, verl's order differs from run to run
    ours, theirs = DataProto(dense, arrays, meta), verl.DataProto.from_dict(dense, arrays, meta)
    assert ours.get_data_info() == theirs.get_data_info()
    for prefix in ("", "here"):
        texts = []
        for one in (ours, theirs):
            with contextlib.redirect_stdout(io.StringIO()) as text:
                one.print_size(prefix)
            texts.append(text.getvalue())
        assert texts[0] == texts[1]


# ---------------------------------------------------------------- TensorDicts, jagged columns


def without_nulls(ragged):
    return {name: Ragged(column.values, column.offsets) for name, column in ragged.items()}


def from_td(td):
    """A TensorDict as a batch, read by this test."""
    from tensordict import NonTensorStack

    tensors = {name: value for name, value in td.items() if isinstance(value, torch.Tensor)}
    arrays = {name: np.array([None] * len(value), object) for name, value in td.items() if isinstance(value, NonTensorStack)}
    for name, array in arrays.items():
        for row, element in enumerate(td.get(name)):
            array[row] = element.data
    meta = {name: td[name] for name in sorted(td.keys()) if name not in tensors and name not in arrays}
    return tensors, arrays, meta


@SETTINGS
@given(parts=batches())
def test_tensordicts(verl, parts):
    dense, ragged, arrays, _ = parts
    arrays = {"objects": arrays["objects"]}
    ragged = without_nulls(ragged)
    ours = DataProto({**dense, **ragged}, arrays, {"step": 1})
    jagged = {name: column.to_jagged() for name, column in ragged.items()}
    theirs = verl.DataProto.from_dict({**dense, **jagged}, arrays, {"step": 1})
    for td in (ours.to_tensordict(), theirs.to_tensordict()):
        tensors, objects, rest = from_td(td)
        assert DataProto(tensors, objects, rest).equals(ours)
        assert td.batch_size == (len(ours),)
        assert DataProto.from_tensordict(td).equals(ours)
        back = verl.DataProto.from_tensordict(td)
        assert DataProto.from_verl(back).equals(ours)


@SETTINGS
@given(parts=batches(), data=st.data())
def test_jagged_columns_as_in_verls_tensordict_helpers(verl, parts, data):
    from verl.utils import tensordict_utils as tu

    dense, ragged, _, _ = parts
    ours = DataProto({**dense, **without_nulls(ragged)})
    td = ours.to_tensordict()
    index = index_of(data, len(ours))
    index = [i % len(ours) for i in index]
    assert DataProto(tu.index_select_tensor_dict(td, index)).equals(ours.select_idxs(index))
    chunks = data.draw(st.sampled_from(divisors(len(ours))))
    for one, other in zip(ours.chunk(chunks), tu.chunk_tensordict(td, chunks), strict=True):
        assert DataProto(other).equals(one)
    joined = DataProto.concat([ours, ours.select_idxs(index)])
    assert DataProto(tu.concat_tensordict([td, ours.select_idxs(index).to_tensordict()])).equals(joined)


@SETTINGS
@given(parts=batches(), data=st.data())
def test_verls_chunk_of_jagged_columns(verl, parts, data):
    dense, ragged, arrays, meta = parts
    ours = DataProto({**dense, **without_nulls(ragged)}, arrays, meta)
    theirs = ours.to_verl()
    assert DataProto.from_verl(theirs).equals(ours)
    chunks = data.draw(st.sampled_from(divisors(len(ours))))
    for one, other in zip(ours.chunk(chunks), theirs.chunk(chunks), strict=True):
        assert DataProto.from_verl(other).equals(one)


def test_jagged_position_ids_of_three_dimensions(verl):
    from verl.utils import tensordict_utils as tu

    rows = [torch.arange(3 * n).view(3, n) + 100 * n for n in (2, 1, 4)]
    nested = tu.nested_tensor_from_tensor_list(rows, ragged_idx=2)
    ours = DataProto({"position_ids": nested, "x": torch.arange(3)})
    assert ours.batch["position_ids"].full_row_shape == (3, None)
    assert [row.batch["position_ids"].tolist() for row in ours] == [row.tolist() for row in rows]
    picked = ours.select_idxs([2, 0])
    td = picked.to_tensordict()
    assert td["position_ids"]._ragged_idx == 2
    assert [row.tolist() for row in td["position_ids"].unbind()] == [rows[2].tolist(), rows[0].tolist()]
    assert DataProto.from_tensordict(td).equals(picked)
