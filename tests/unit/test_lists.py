"""Numbers out of lists and back: the same types, values and bits."""

from __future__ import annotations

import struct
import sys
from collections import OrderedDict
from enum import IntEnum

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray._native import lists

KINDS = {
    type(None): lists.NONE,
    bool: lists.BOOL,
    int: lists.INT,
    float: lists.FLOAT,
    str: lists.STR,
    bytes: lists.BYTES,
    list: lists.LIST,
    tuple: lists.TUPLE,
    dict: lists.DICT,
}


class Colour(IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


EDGES = [0, 1, -1, 2**7, -(2**7), 2**8, 2**15, -(2**15), 2**16, 2**30, 2**31, -(2**31), 2**32, 2**60, 2**63, -(2**63), 2**64]
ints = st.one_of(st.integers(-300, 300), st.integers(-(2**66), 2**66), st.sampled_from(EDGES).flatmap(lambda n: st.integers(n - 2, n + 2)))
bits64 = st.integers(0, 2**64 - 1).map(lambda n: struct.unpack("<d", struct.pack("<Q", n))[0])
narrow = st.floats(width=32)
floats = st.one_of(narrow, st.floats(), bits64)
others = st.sampled_from([None, True, False, "a", b"b", [], (), {}, 1j, Colour.RED, Text("a"), OrderedDict(), np.int64(1), np.float64(1)])
leaves = st.one_of(ints, floats, others)


@pytest.fixture(scope="module", params=[None, 2], ids=["alone", "in pieces"], autouse=True)
def pieces(request):
    """Everything once by the thread that has the GIL, and once piece by piece, as several threads do it."""
    before = lists.set_many(request.param) if request.param else None
    yield
    if before is not None:
        lists.set_many(before)


def test_several_threads():
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 150_000, n).tolist() for n in rng.integers(0, 3000, 600)]
    check_scan(rows, True)
    values = np.array([x for row in rows for x in row], np.int32)
    out = np.zeros_like(values)
    lists.ints_into(rows, True, out.ctypes.data, 4, True, len(out))
    assert np.array_equal(out, values)
    rows[300] = [*rows[300], 2**62]  # which takes the thread that has the GIL
    check_scan(rows, True)
    rows[301] = [*rows[301], "x"]
    wide = np.zeros(len(out) + 2, np.int64)
    with pytest.raises(TypeError, match="row 301"):
        lists.ints_into(rows, True, wide.ctypes.data, 8, True, len(wide))


def rows_of(items):
    return st.lists(st.one_of(st.lists(items, max_size=8), st.lists(items, max_size=8).map(tuple)), max_size=6)


def flat(rows, nested):
    return [x for row in rows for x in row] if nested else list(rows)


def bits(value):
    return struct.pack("<d", value)


def flags_of(values):
    result = 0
    for value in values:
        result |= KINDS.get(type(value), lists.OTHER)
    return result


def same_as_float32(value):
    with np.errstate(all="ignore"):
        return bits(float(np.float32(value))) == bits(value)


@settings(max_examples=60, deadline=None)
@given(st.lists(leaves), st.booleans())
def test_kinds(values, as_tuple):
    assert lists.kinds(tuple(values) if as_tuple else values) == flags_of(values)


def test_flags_are_what_they_were():
    assert [lists.NONE, lists.BOOL, lists.INT, lists.FLOAT, lists.STR] == [1, 2, 4, 8, 16]
    assert [lists.BYTES, lists.LIST, lists.TUPLE, lists.DICT, lists.OTHER] == [32, 64, 128, 256, 512]


def check_scan(rows, nested):
    found = lists.scan(rows, nested)
    values = flat(rows, nested)
    assert found.flags == flags_of(values)
    assert found.items == len(values)
    if nested:
        assert found.lengths.dtype == np.int64 and found.lengths.tolist() == [len(row) for row in rows]
    else:
        assert found.lengths is None
    whole = [x for x in values if type(x) is int]
    if any(not -(2**63) <= x < 2**64 for x in whole):
        assert found.lo is None and found.hi is None
    else:
        assert (found.lo, found.hi) == ((min(whole), max(whole)) if whole else (0, -1))
    assert found.fits_float32 is all(same_as_float32(x) for x in values if type(x) is float)


@settings(max_examples=60, deadline=None)
@given(st.one_of(rows_of(ints), rows_of(floats), rows_of(narrow), rows_of(leaves)), st.booleans())
def test_scan_of_rows(rows, as_tuple):
    check_scan(tuple(rows) if as_tuple else rows, True)


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.lists(ints), st.lists(floats), st.lists(narrow), st.lists(leaves)), st.booleans())
def test_scan_of_values(values, as_tuple):
    check_scan(tuple(values) if as_tuple else values, False)


def test_scan_of_many():
    rng = np.random.default_rng(1)
    rows = [rng.integers(-(2**40), 2**40, n).tolist() for n in rng.integers(0, 300, 200)]
    check_scan(rows, True)
    check_scan([[float(x) / 4 for x in row] for row in rows], True)
    check_scan([x for row in rows for x in row], False)


def test_nan_payloads_and_signed_zero():
    quiet, signalling, wide = (struct.unpack("<d", struct.pack("<Q", n))[0] for n in (0x7FF8 << 48, 0x7FF4 << 48, 0x7FF8 << 48 | 1))
    for value, fits in [
        (quiet, True),
        (signalling, False),
        (wide, False),
        (-0.0, True),
        (float("inf"), True),
        (1e-46, False),
        (0.1, False),
    ]:
        assert lists.scan([value], False).fits_float32 is fits
    out = np.empty(2)
    lists.floats_into([signalling, -0.0], False, out.ctypes.data, 8, 2)
    assert out.tobytes() == bits(signalling) + bits(-0.0)
    assert [bits(x) for x in lists.floats_from(out.ctypes.data, 8, None, False, count=2)] == [bits(signalling), bits(-0.0)]


@pytest.mark.parametrize("item", [1, 2, 4, 8])
@pytest.mark.parametrize("signed", [False, True])
@settings(max_examples=60, deadline=None)
@given(rows=rows_of(ints), nested=st.booleans())
def test_ints(item, signed, rows, nested):
    info = np.iinfo(f"{'i' if signed else 'u'}{item}")
    fit = [type(row)(x for x in row if info.min <= x <= info.max) for row in rows]
    values = flat(fit, True)
    source = fit if nested else values
    out = np.zeros(len(values) + 1, info.dtype)
    lists.ints_into(source, nested, out.ctypes.data, item, signed, len(values))
    assert out.tolist() == [*values, 0]
    offsets = np.cumsum([0] + [len(row) for row in fit])
    back = lists.ints_from(out.ctypes.data, item, signed, offsets, False)
    assert back == [list(row) for row in fit] and all(type(x) is int for row in back for x in row)
    assert lists.ints_from(out.ctypes.data, item, signed, offsets, True) == [tuple(row) for row in fit]
    assert lists.ints_from(out.ctypes.data, item, signed, None, False, count=len(values)) == values
    for row, misfits in enumerate([x for x in row if not info.min <= x <= info.max] for row in rows):
        for value in misfits:
            with pytest.raises(OverflowError, match=f"row {row}, item 1 does not fit an"):
                lists.ints_into([[]] * row + [[0, value]], True, out.ctypes.data, item, signed, 2)


@settings(max_examples=60, deadline=None)
@given(rows_of(floats), st.booleans())
def test_floats(rows, nested):
    values = flat(rows, True)
    source = rows if nested else values
    offsets = np.cumsum([0] + [len(row) for row in rows])
    for item in (4, 8):
        out = np.zeros(len(values) + 1, f"f{item}")
        lists.floats_into(source, nested, out.ctypes.data, item, len(values))
        with np.errstate(all="ignore"):
            assert out.tobytes() == np.array([*values, 0], f"f{item}").tobytes()
            wide = out.astype(np.float64)
        back = lists.floats_from(out.ctypes.data, item, offsets, True)
        assert [type(row) for row in back] == [tuple] * len(rows) and [len(row) for row in back] == [len(row) for row in rows]
        assert [bits(x) for row in back for x in row] == [bits(x) for x in wide[:-1]]
        assert all(type(x) is float for row in back for x in row)


@settings(max_examples=60, deadline=None)
@given(rows_of(st.booleans()), st.booleans())
def test_bools(rows, nested):
    values = flat(rows, True)
    out = np.full(len(values) + 1, 7, np.uint8)
    lists.bools_into(rows if nested else values, nested, out.ctypes.data, len(values))
    assert out.tolist() == [*values, 7]
    out[:-1] *= 3  # any byte but 0 is true
    back = lists.bools_from(out.ctypes.data, np.cumsum([0] + [len(row) for row in rows]), False)
    assert back == [list(row) for row in rows] and all(type(x) is bool for row in back for x in row)
    assert lists.bools_from(out.ctypes.data, None, True, count=len(values)) == tuple(values)


def test_rows_need_not_begin_at_value_0():
    values = np.arange(10, dtype=np.int16)
    assert lists.ints_from(values.ctypes.data, 2, True, np.array([3, 5, 5, 9]), False) == [[3, 4], [], [5, 6, 7, 8]]


def test_what_is_refused():
    out = np.zeros(8, np.int64)
    at = out.ctypes.data
    with pytest.raises(TypeError, match="neither a list nor a tuple"):
        lists.kinds({1})
    with pytest.raises(TypeError, match="range is neither"):
        lists.scan(range(3), False)
    with pytest.raises(TypeError, match="row 1 is neither a list nor a tuple"):
        lists.scan([[1], 2], True)
    with pytest.raises(TypeError, match="row 1, item 0 is not an int of 8 bytes"):
        lists.ints_into([[1], [True]], True, at, 8, True, 2)
    with pytest.raises(TypeError, match="item 1 is not an unsigned int"):
        lists.ints_into([1, Colour.RED], False, at, 8, False, 2)
    with pytest.raises(TypeError, match="item 0 is not a float"):
        lists.floats_into([1], False, at, 8, 1)
    with pytest.raises(TypeError, match="item 0 is not a bool"):
        lists.bools_into([1], False, at, 1)
    for n in (1, 3):
        with pytest.raises(ValueError, match="changed meanwhile"):
            lists.ints_into([[1], [2]], True, at, 8, True, n)
        with pytest.raises(ValueError, match="changed meanwhile"):
            lists.floats_into([1.0, 2.0], False, at, 8, n)
    with pytest.raises(ValueError, match="3 bytes"):
        lists.ints_into([], False, at, 3, True, 0)
    with pytest.raises(ValueError, match="2 bytes"):
        lists.floats_from(at, 2, None, False, count=1)
    with pytest.raises(ValueError, match="neither offsets nor a count"):
        lists.ints_from(at, 8, True, None, False)
    with pytest.raises(ValueError, match="offset 2 is less"):
        lists.ints_from(at, 8, True, np.array([0, 2, 1]), False)
    with pytest.raises(ValueError, match="not negative"):
        lists.ints_from(at, 8, True, np.array([-1, 2]), False)


def test_references_are_given_back():
    value = 10**15
    before = sys.getrefcount(value)
    rows = [[value] * 100]
    out = np.empty(100, np.int64)
    for _ in range(3):
        lists.scan(rows, True)
        lists.ints_into(rows, True, out.ctypes.data, 8, True, 100)
    assert sys.getrefcount(value) == before + 100
    del rows
    assert sys.getrefcount(value) == before


@pytest.mark.parametrize("item", [2, 4, 8])
@pytest.mark.parametrize("signed", [False, True])
def test_many_ints_share_those_that_repeat(item, signed):
    rng = np.random.default_rng(item)
    info = np.iinfo(f"{'i' if signed else 'u'}{item}")
    values = rng.integers(info.min, info.max, 200_000, info.dtype, endpoint=True)
    values[::2] = rng.integers(max(info.min, -400), 400, values[::2].size)
    offsets = np.sort(np.concatenate([[0, values.size], rng.integers(0, values.size, 100)]))
    before = sys.getallocatedblocks()
    back = lists.ints_from(values.ctypes.data, item, signed, offsets, False)
    assert [x for row in back for x in row] == values.tolist()
    assert [len(row) for row in back] == np.diff(offsets).tolist()
    shared: dict[int, int] = {}
    for row in back:
        for value in row:
            shared[id(value)] = shared.get(id(value), 0) + 1
    assert len(shared) < 150_000
    row = max(back, key=len)
    counted = [sys.getrefcount(row[i]) - 1 for i in range(len(row))]  # less the argument
    assert all(n == shared[id(x)] for n, x in zip(counted, row, strict=True) if not -5 <= x <= 256)  # those are Python's own
    del back, row, value, shared, counted
    assert sys.getallocatedblocks() - before < 1000
