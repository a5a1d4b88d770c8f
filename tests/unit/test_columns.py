"""Kernels over cells and spans: the same as NumPy says, item by item."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray._native import columns
from mooncake_ray.data import kernels
from mooncake_ray.data.kernels import Cells

ITEMS = [1, 2, 3, 4, 8, 16, 24]
INT_ITEMS = [1, 2, 4, 8]
FENCE = 0xA5


@pytest.fixture(scope="module", params=[1, 3], autouse=True)
def threads(request):
    columns.set_cores(request.param)
    yield
    columns.set_cores(0)


def address(array):
    return array.ctypes.data


def int64(values):
    return np.array(values, np.int64)


class Region:
    """Cells in the middle of an array of bytes, rows farther apart than they are wide, with a fence around each."""

    def __init__(self, rows, width, item, rng, gap=5, shift=3):
        self.rows, self.width, self.item = rows, width, item
        self.stride = width * item + gap
        self.memory = np.full(shift + rows * self.stride + 64, FENCE, np.uint8)
        self.bytes = np.lib.stride_tricks.as_strided(self.memory[shift:], (rows, width, item), (self.stride, item, 1))
        self.bytes[:] = rng.integers(0, 256, self.bytes.shape, np.uint8)
        self.cells = Cells(address(self.memory) + shift, rows, width, self.stride, item)

    def outside_untouched(self, before):
        """Whether nothing but the cells changed."""
        now, then = self.memory.copy(), before.copy()
        for memory in (now, then):
            np.lib.stride_tricks.as_strided(memory[3:], self.bytes.shape, self.bytes.strides)[:] = 0
        return np.array_equal(now, then)


def inside(width, starts, lengths):
    """(rows, width): which columns are in the span."""
    at = np.arange(width)
    return (at >= starts[:, None]) & (at < (starts + lengths)[:, None])


def spans(rng, rows, width):
    starts = rng.integers(0, width + 1, rows)
    return starts, np.array([rng.integers(0, width - s + 1) for s in starts], np.int64).reshape(rows)


shapes = st.tuples(st.integers(0, 6), st.one_of(st.integers(0, 20), st.sampled_from([63, 64, 65, 200, 517, 1030])))
seeds = st.integers(0, 2**32)


def pattern(rng, item):
    patterns = [b"\0" * item, b"\1" + b"\0" * (item - 1), rng.bytes(item), b"\xff" * item]
    return patterns[rng.integers(len(patterns))]


def items(values, item):
    """Integers, modulo the item's size, as bytes (…, item)."""
    values = np.asarray(values, np.int64).astype(np.uint64)
    return np.ascontiguousarray(values.astype(f"u{item}")).view(np.uint8).reshape(*values.shape, item)


def flip(region, rng):
    """Flips a bit of an item. Returns its row and column."""
    r, c, b = (int(rng.integers(0, n)) for n in region.bytes.shape)
    region.bytes[r, c, b] ^= 1 << int(rng.integers(0, 8))
    return r, c


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from(ITEMS), seeds)
def test_find_spans(shape, item, seed):
    rng = np.random.default_rng(seed)
    region = Region(*shape, item, rng)
    starts, lengths = spans(rng, *shape)
    starts = np.where(lengths == 0, 0, starts)
    one = b"\1" + rng.bytes(item - 1)
    mask = inside(shape[1], starts, lengths)
    region.bytes[:] = np.where(mask[..., None], np.frombuffer(one, np.uint8), 0)
    found = kernels.find_spans(region.cells, one)
    assert found is not None
    assert np.array_equal(found[0], starts) and np.array_equal(found[1], lengths)
    assert found[0].dtype == found[1].dtype == np.int64
    if region.bytes.size:
        at = tuple(int(rng.integers(0, n)) for n in region.bytes.shape)
        region.bytes[at] ^= 1 << int(rng.integers(0, 8))
        rows = region.bytes.reshape(*shape, item)
        expected = []
        for row in rows:  # again, by hand
            hot = [bytes(x) for x in row]
            kept = [i for i, x in enumerate(hot) if x != b"\0" * item]
            whole = not kept or (all(hot[i] == one for i in kept) and kept == list(range(kept[0], kept[-1] + 1)))
            expected.append((kept[0] if kept else 0, len(kept)) if whole else None)
        found = kernels.find_spans(region.cells, one)
        if None in expected:
            assert found is None
        else:
            assert [*zip(*(x.tolist() for x in found), strict=True)] == expected


@settings(max_examples=100, deadline=None)
@given(shapes, st.sampled_from(ITEMS), seeds)
def test_trim(shape, item, seed):
    rng = np.random.default_rng(seed)
    region = Region(*shape, item, rng)
    pad = pattern(rng, item)
    mask = inside(shape[1], *spans(rng, *shape))
    region.bytes[~mask] = np.frombuffer(pad, np.uint8)
    region.bytes[rng.random(mask.shape) < 0.2] = np.frombuffer(pad, np.uint8)
    starts, lengths = kernels.trim(region.cells, pad)
    for row, start, length in zip(region.bytes.reshape(*shape, item), starts.tolist(), lengths.tolist(), strict=True):
        other = [at for at, x in enumerate(row) if bytes(x) != pad]
        assert (start, length) == ((other[0], other[-1] - other[0] + 1) if other else (0, 0))


def test_a_mask_of_zeros_as_one():
    zeros = np.zeros((2, 3), np.uint8)
    assert kernels.find_spans(Cells(address(zeros), 2, 3, 3, 1), b"\0")[1].tolist() == [0, 0]
    zeros[1, 1] = 1
    assert kernels.find_spans(Cells(address(zeros), 2, 3, 3, 1), b"\0") is None


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from(ITEMS), seeds)
def test_what_is_outside_and_inside(shape, item, seed):
    rng = np.random.default_rng(seed)
    region = Region(*shape, item, rng)
    starts, lengths = spans(rng, *shape)
    mask = inside(shape[1], starts, lengths)
    pad = pattern(rng, item)
    region.bytes[~mask] = np.frombuffer(pad, np.uint8)
    values = rng.integers(0, 256, (shape[0], item), np.uint8)
    region.bytes[:] = np.where(mask[..., None], values[:, None, :], region.bytes)
    assert kernels.outside_is(region.cells, starts, lengths, pad) is True
    constants = kernels.inside_constant(region.cells, starts, lengths)
    assert np.array_equal(constants, np.where(lengths[:, None] > 0, values, 0))
    if region.bytes.size:
        r, c = flip(region, rng)
        assert kernels.outside_is(region.cells, starts, lengths, pad) is bool(mask[r, c])
        constant = bool(not mask[r, c] or lengths[r] == 1)
        assert (kernels.inside_constant(region.cells, starts, lengths) is not None) is constant


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from(ITEMS), seeds)
def test_last_hot(shape, item, seed):
    rng = np.random.default_rng(seed)
    region, other = Region(*shape, item, rng), Region(*shape, item, rng)
    starts, lengths = spans(rng, *shape)
    values = np.where(lengths[:, None] > 0, rng.integers(0, 256, (shape[0], item), np.uint8), 0).astype(np.uint8)
    region.bytes[:] = 0
    for r in np.flatnonzero(lengths):
        region.bytes[r, starts[r] + lengths[r] - 1] = values[r]
    found = kernels.last_hot(region.cells, starts, lengths)
    assert np.array_equal(found, values)
    before = other.memory.copy()
    kernels.fill_last(other.cells, starts, lengths, values)
    assert np.array_equal(other.bytes, region.bytes) and other.outside_untouched(before)
    if region.bytes.size:
        r, c, b = (int(rng.integers(0, n)) for n in region.bytes.shape)
        region.bytes[r, c, b] ^= 64
        last = lengths[r] > 0 and c == starts[r] + lengths[r] - 1
        assert (kernels.last_hot(region.cells, starts, lengths) is not None) is bool(last)


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from(INT_ITEMS), seeds)
def test_positions(shape, item, seed):
    rng = np.random.default_rng(seed)
    region = Region(*shape, item, rng)
    starts, lengths = spans(rng, *shape)
    mask = inside(shape[1], starts, lengths)
    positions = items(np.clip(np.cumsum(mask, axis=1) - 1, 0, None), item)
    before = region.memory.copy()
    kernels.fill_positions(region.cells, starts, lengths)
    assert np.array_equal(region.bytes, positions) and region.outside_untouched(before)
    assert kernels.is_positions(region.cells, starts, lengths) is True
    assert kernels.is_arange(region.cells, starts, lengths) is True
    if region.bytes.size:
        r, c = flip(region, rng)
        assert kernels.is_positions(region.cells, starts, lengths) is False
        assert kernels.is_arange(region.cells, starts, lengths) is not bool(mask[r, c])


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from(ITEMS), seeds)
def test_equality(shape, item, seed):
    rng = np.random.default_rng(seed)
    a, b = Region(*shape, item, rng), Region(*shape, item, rng, gap=0)
    b.bytes[:] = a.bytes
    assert kernels.rows_equal(a.cells, b.cells) is True
    assert kernels.rows_equal(b.cells, b.cells) is True
    if a.bytes.size:
        at = tuple(int(rng.integers(0, n)) for n in a.bytes.shape)
        b.bytes[at] ^= 1
        assert kernels.rows_equal(a.cells, b.cells) is False
    value = pattern(rng, item)
    for region in (a, b):
        region.bytes[:] = np.frombuffer(value, np.uint8)
        assert kernels.all_equal(region.cells, value) is True
        if region.bytes.size:
            at = tuple(int(rng.integers(0, n)) for n in region.bytes.shape)
            region.bytes[at] ^= 128
            assert kernels.all_equal(region.cells, value) is False


def test_rows_that_share_their_memory():
    row = np.array([7, 7, 7], np.int16)
    assert kernels.all_equal(Cells(address(row), 1000, 3, 0, 2), row[:1].tobytes())
    assert kernels.rows_equal(Cells(address(row), 1000, 3, 0, 2), Cells(address(row), 1000, 3, 0, 2))
    with pytest.raises(ValueError, match="different rows"):
        kernels.rows_equal(Cells(address(row), 1, 3, 6, 2), Cells(address(row), 1, 2, 6, 2))


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from(INT_ITEMS), st.booleans(), seeds)
def test_int_range(shape, item, signed, seed):
    rng = np.random.default_rng(seed)
    region = Region(*shape, item, rng)
    starts, lengths = spans(rng, *shape)
    numbers = np.ascontiguousarray(region.bytes).view(f"{'i' if signed else 'u'}{item}").reshape(shape)
    chosen = numbers[inside(shape[1], starts, lengths)].tolist()
    assert kernels.int_range(region.cells, signed, starts, lengths) == ((min(chosen), max(chosen)) if chosen else None)


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from(ITEMS), seeds, st.booleans())
def test_pack_and_unpack(shape, item, seed, ragged):
    rng = np.random.default_rng(seed)
    region = Region(*shape, item, rng)
    starts, lengths = spans(rng, *shape)
    mask = inside(shape[1], starts, lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    cells, firsts = region.cells, starts
    if ragged:  # the same, by where each row's span begins
        if region.stride % item:
            return
        cells, firsts = cells._replace(stride=0), np.arange(shape[0]) * (region.stride // item) + starts
    packed = np.full(int(offsets[-1]) * item + 1, FENCE, np.uint8)
    kernels.pack(cells, firsts, lengths, address(packed))
    assert np.array_equal(packed[:-1], region.bytes[mask].reshape(-1)) and packed[-1] == FENCE
    other = Region(*shape, item, rng, shift=3)
    before, was = other.memory.copy(), other.bytes.copy()
    pad = pattern(rng, item)
    to = other.cells._replace(stride=0) if ragged else other.cells
    # Offsets may begin anywhere in the values.
    skip = int(rng.integers(0, 4))
    kernels.unpack(address(packed) - skip * item, offsets + skip, firsts, to, pad)
    expected = np.where(mask[..., None], region.bytes, was if ragged else np.frombuffer(pad, np.uint8))
    assert np.array_equal(other.bytes, expected) and other.outside_untouched(before)


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from(INT_ITEMS), st.sampled_from(INT_ITEMS), st.booleans(), seeds)
def test_pack_and_unpack_ints(shape, item, small, signed, seed):
    small = min(small, item)
    rng = np.random.default_rng(seed)
    region = Region(*shape, item, rng)
    starts, lengths = spans(rng, *shape)
    mask = inside(shape[1], starts, lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    packed = np.full(int(offsets[-1]) * small + 1, FENCE, np.uint8)
    kernels.pack_ints(region.cells, starts, lengths, address(packed), small)
    numbers = np.ascontiguousarray(region.bytes).view(f"u{item}").reshape(shape)[mask].astype(f"u{small}")
    assert np.array_equal(packed[:-1], numbers.view(np.uint8)) and packed[-1] == FENCE
    before, pad = region.memory.copy(), pattern(rng, item)
    kernels.unpack_ints(address(packed), small, signed, offsets, starts, region.cells, pad)
    kind = "i" if signed else "u"
    wide = np.frombuffer(pad, f"{kind}{item}").repeat(mask.size).reshape(shape)
    wide[mask] = numbers.view(f"{kind}{small}").astype(f"{kind}{item}")
    assert np.array_equal(region.bytes.reshape(*shape, item), wide.view(np.uint8).reshape(*shape, item)) and region.outside_untouched(
        before
    )


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from(INT_ITEMS), seeds, st.integers(0, 200))
def test_pack_and_unpack_bits(shape, item, seed, skip):
    rng = np.random.default_rng(seed)
    region = Region(*shape, item, rng)
    starts, lengths = spans(rng, *shape)
    mask = inside(shape[1], starts, lengths)
    region.bytes[rng.random(shape) < 0.5] = 0
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    hot = region.bytes[mask].any(axis=-1)
    expected = np.packbits(hot, bitorder="little")
    packed = np.full(expected.size + 1, FENCE, np.uint8)
    kernels.pack_bits(region.cells, starts, lengths, address(packed))
    assert np.array_equal(packed[:-1], expected) and packed[-1] == FENCE
    shifted = np.packbits(np.concatenate([rng.integers(0, 2, skip).astype(bool), hot]), bitorder="little")
    one, zero, pad = (pattern(rng, item) for _ in range(3))
    before = region.memory.copy()
    first = skip // 2
    kernels.unpack_bits(address(shifted), first, offsets + (skip - first), starts, region.cells, one, zero, pad)
    wanted = np.empty_like(region.bytes)
    wanted[:] = np.frombuffer(pad, np.uint8)
    wanted[mask] = np.where(hot[:, None], np.frombuffer(one, np.uint8), np.frombuffer(zero, np.uint8))
    assert np.array_equal(region.bytes, wanted) and region.outside_untouched(before)


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from(ITEMS), seeds)
def test_fill_spans(shape, item, seed):
    rng = np.random.default_rng(seed)
    region = Region(*shape, item, rng)
    starts, lengths = spans(rng, *shape)
    mask = inside(shape[1], starts, lengths)
    values, outside = rng.integers(0, 256, (shape[0], item), np.uint8), pattern(rng, item)
    before = region.memory.copy()
    kernels.fill_spans(region.cells, starts, lengths, values, outside)
    assert np.array_equal(region.bytes, np.where(mask[..., None], values[:, None, :], np.frombuffer(outside, np.uint8)))
    assert region.outside_untouched(before)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 90)), max_size=20), seeds)
def test_gather(ranges, seed):
    source = np.random.default_rng(seed).integers(0, 256, 600, np.uint8)
    starts, nbytes = int64([a for a, _ in ranges]), int64([n for _, n in ranges])
    to = np.full(int(nbytes.sum()) + 1, FENCE, np.uint8)
    kernels.gather(address(source), starts, nbytes, address(to))
    assert to.tobytes() == b"".join(source[a : a + n].tobytes() for a, n in ranges) + bytes([FENCE])


# Large enough for several threads: many rows, and few rows that are cut.
@pytest.mark.parametrize(("rows", "width"), [(3000, 700), (3, 1_000_001), (1, 2_500_000)])
@pytest.mark.parametrize("item", [1, 8, 24])
def test_large(rows, width, item):
    rng = np.random.default_rng(rows + item)
    region = Region(rows, width, item, rng, gap=0)
    starts = rng.integers(0, width // 3, rows)
    lengths = width - starts - rng.integers(0, width // 3, rows)
    mask = inside(width, starts, lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    one = bytes([1, *range(2, item + 1)])
    packed = np.empty(int(offsets[-1]) * item, np.uint8)
    kernels.pack(region.cells, starts, lengths, address(packed))
    assert np.array_equal(packed, region.bytes[mask].reshape(-1))
    other = Region(rows, width, item, rng)
    kernels.unpack(address(packed), offsets, starts, other.cells, one)
    assert kernels.outside_is(other.cells, starts, lengths, one)
    region.bytes[~mask] = np.frombuffer(one, np.uint8)
    assert np.array_equal(other.bytes, region.bytes)
    assert kernels.rows_equal(region.cells, other.cells)
    other.bytes[-1, -1, -1] ^= 1
    assert not kernels.rows_equal(region.cells, other.cells)
    assert not kernels.outside_is(other.cells, starts, lengths, one)
    kernels.fill_spans(region.cells, starts, lengths, np.tile(np.frombuffer(one, np.uint8), (rows, 1)), bytes(item))
    found = kernels.find_spans(region.cells, one)
    assert np.array_equal(found[0], starts) and np.array_equal(found[1], lengths)
    assert kernels.inside_constant(region.cells, starts, lengths) is not None
    assert kernels.last_hot(region.cells, starts, lengths) is None
    assert not kernels.all_equal(region.cells, one)
    if item != 24:
        kernels.fill_positions(region.cells, starts, lengths)
        assert kernels.is_positions(region.cells, starts, lengths)
        assert np.array_equal(region.bytes, items(np.clip(np.cumsum(mask, axis=1) - 1, 0, None), item))
        numbers = np.ascontiguousarray(region.bytes).view(f"u{item}")[..., 0][mask]
        assert kernels.int_range(region.cells, False, starts, lengths) == (int(numbers.min()), int(numbers.max()))
        bits = np.empty(-(-int(offsets[-1]) // 8), np.uint8)
        kernels.pack_bits(region.cells, starts, lengths, address(bits))
        assert np.array_equal(bits, np.packbits(numbers != 0, bitorder="little"))
    kernels.fill_last(region.cells, starts, lengths, np.full((rows, item), 9, np.uint8))
    assert (kernels.last_hot(region.cells, starts, lengths) == 9).all()


def test_sizes_and_spans_are_checked():
    memory = np.zeros((2, 4), np.int32)
    cells = Cells(address(memory), 2, 4, 16, 4)
    good = int64([0, 1]), int64([4, 3])
    for starts, lengths, said in [
        ([-1, 0], [1, 1], "row 0: start -1"),
        ([0, 2], [4, 3], "row 1: start 2 and length 3 exceed the width of 4"),
        ([0, 2**62], [4, 2**62], "row 1"),
        ([0, 0], [4, -1], "row 1: start 0, length -1"),
        ([0], [1, 1], "starts has 1 numbers, not 2"),
        ([0, 0], [1, 1, 1], "lengths has 3 numbers, not 2"),
    ]:
        for call in (
            lambda s, n: kernels.outside_is(cells, s, n, bytes(4)),
            lambda s, n: kernels.inside_constant(cells, s, n),
            lambda s, n: kernels.last_hot(cells, s, n),
            lambda s, n: kernels.is_positions(cells, s, n),
            lambda s, n: kernels.is_arange(cells, s, n),
            lambda s, n: kernels.int_range(cells, True, s, n),
            lambda s, n: kernels.pack(cells, s, n, 0),
            lambda s, n: kernels.pack_ints(cells, s, n, 0, 1),
            lambda s, n: kernels.pack_bits(cells, s, n, 0),
            lambda s, n: kernels.fill_spans(cells, s, n, np.zeros((2, 4), np.uint8), bytes(4)),
            lambda s, n: kernels.fill_last(cells, s, n, np.zeros((2, 4), np.uint8)),
            lambda s, n: kernels.fill_positions(cells, s, n),
        ):
            with pytest.raises(ValueError, match=said):
                call(int64(starts), int64(lengths))
    for offsets, starts, said in [
        ([0, 5, 5], [0, 0], "row 0: start 0 and length 5 exceed"),
        ([0, 2, 1], [0, 0], "offset 2 is less"),
        ([-1, 2, 3], [0, 0], "offset 0 is -1"),
        ([0, 2], [0, 0], "offsets has 2 numbers, not 3"),
        ([0, 2, 3], [0, 3, 0], "starts has 3 numbers, not 2"),
        ([0, 2, 6], [0, 3], "row 1: start 3 and length 4 exceed"),
    ]:
        for call in (
            lambda o, s: kernels.unpack(0, o, s, cells, bytes(4)),
            lambda o, s: kernels.unpack_ints(0, 1, True, o, s, cells, bytes(4)),
            lambda o, s: kernels.unpack_bits(0, 0, o, s, cells, bytes(4), bytes(4), bytes(4)),
        ):
            with pytest.raises(ValueError, match=said):
                call(int64(offsets), int64(starts))
    with pytest.raises(ValueError, match="pad has 3 bytes, an item 4"):
        kernels.outside_is(cells, *good, bytes(3))
    with pytest.raises(ValueError, match="inside is 2 x 3 bytes"):
        kernels.fill_spans(cells, *good, np.zeros((2, 3), np.uint8), bytes(4))
    with pytest.raises(ValueError, match="an integer of 3 bytes"):
        kernels.is_arange(Cells(0, 0, 0, 0, 3), int64([]), int64([]))
    with pytest.raises(ValueError, match="an integer of 5 bytes"):
        kernels.pack_ints(cells, *good, 0, 5)
    with pytest.raises(ValueError, match="4 bytes packed to 8"):
        kernels.pack_ints(cells, *good, 0, 8)
    with pytest.raises(ValueError, match="8 bytes unpacked to 4"):
        kernels.unpack_ints(0, 8, True, int64([0, 0, 0]), good[0], cells, bytes(4))
    with pytest.raises(ValueError, match="bit -1"):
        kernels.unpack_bits(0, -1, int64([0, 0, 0]), good[0], cells, bytes(4), bytes(4), bytes(4))
    with pytest.raises(ValueError, match="an item of 0 bytes"):
        kernels.all_equal(Cells(0, 1, 1, 1, 0), b"")
    with pytest.raises(ValueError, match="-1 rows"):
        kernels.all_equal(Cells(0, -1, 1, 1, 1), b"\0")
    with pytest.raises(ValueError, match="Buffer dtype mismatch"):
        kernels.pack(cells, np.zeros(2, np.int32), good[1], 0)


def test_read_only_arrays_will_do():
    memory, starts, lengths = np.arange(6), int64([0, 1]), int64([3, 2])
    for array in (starts, lengths):
        array.flags.writeable = False
    assert kernels.int_range(Cells(address(memory), 2, 3, 24, 8), True, starts, lengths) == (0, 5)


def mapped(address):
    with open("/proc/self/maps") as maps:
        return any(int(low, 16) <= address < int(high, 16) for low, high in (line.split()[0].split("-") for line in maps))


def test_empty_memory_lives_as_long_as_its_views():
    columns.kept(release=True)
    for nbytes in (0, 1, 4095, (1 << 20) - 1, 1 << 20, 4 << 20, (6 << 20) + 1):
        array = kernels.empty(nbytes)
        assert array.dtype == np.uint8 and array.shape == (nbytes,) and array.flags.writeable
        array[:] = 1
        if nbytes < 1 << 20:
            continue
        where = address(array)
        assert where % (2 << 20) == 0
        view = array[1:].view()
        del array
        gc.collect()
        assert columns.kept() == 0 and view.sum() == nbytes - 1
        del view
        gc.collect()
        assert columns.kept() == -(-nbytes // (2 << 20)) * (2 << 20) and mapped(where)
        again, other = kernels.empty(nbytes), kernels.empty(nbytes)
        assert address(again) == where != address(other)
        del again, other
        columns.kept(release=True)
        assert columns.kept() == 0 and not mapped(where)
    with pytest.raises(MemoryError):
        kernels.empty(2**63 - 1)


def test_several_callers():
    rng = np.random.default_rng(1)
    wrong = []

    def work(number):
        width = 1 << 20
        array = np.full((4, width), number, np.int64)
        starts, lengths = int64([0] * 4), int64([width] * 4)
        to = np.empty((4, width), np.int32)
        kernels.pack_ints(Cells(address(array), 4, width, width * 8, 8), starts, lengths, address(to), 4)
        if not (to == number).all():
            wrong.append(number)

    callers = [threading.Thread(target=work, args=(int(n),)) for n in rng.integers(0, 1000, 4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
