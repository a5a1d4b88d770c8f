"""Packing without a broker: what leaves the pickle, where it is put, and that it comes back the same."""

from __future__ import annotations

import ctypes
import io
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from region_pickler import RegionPickler

from mooncake_ray.store.packing import Packer, Segments, scan

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
SMALL = 1 << 10  # from here on things are taken out of a pickle
PAGE = 4096
_region = threading.local()


class Memory:
    """Stands for a pinned object: shared and read-only, or private and writable."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._private = None

    def shared(self):
        return memoryview(self.raw) if self._private is None else self._private

    def private(self):
        if self._private is None:
            self._private = memoryview(bytearray(self.raw))
        return self._private


def region_here():
    return _region.value


def pack(value, smallest=SMALL):
    """The pickle, the segments as bytes, and the packer."""
    packer = Packer(smallest)
    file = io.BytesIO()
    RegionPickler(file, packer, region_here).dump(value)
    segments = packer.segments
    memory = bytearray(b"\xa5" * segments.nbytes)
    end = 0
    for offset, address, nbytes in segments.parts:
        assert offset % (PAGE if nbytes >= 1 << 20 else 64) == 0
        assert end <= offset  # they do not overlap
        end = offset + nbytes
        memory[offset:end] = ctypes.string_at(address, nbytes)
    assert end == segments.nbytes
    return file.getvalue(), bytes(memory), packer


def unpack(blob, memory):
    _region.value = Memory(memory)
    return pickle.loads(blob)


def round_trip(value, smallest=SMALL):
    blob, memory, _ = pack(value, smallest)
    return unpack(blob, memory)


def bits(tensor: torch.Tensor) -> bytes:
    return (
        bytes(tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
    )


def assert_same_tensor(out, value):
    assert type(out) is type(value)
    assert out.dtype == value.dtype
    assert out.shape == value.shape
    assert out.requires_grad == value.requires_grad
    assert bits(out) == bits(value)


def assert_same_array(out, value, packed):
    """As its own pickling would have it, out-of-band buffers taken as read-only."""
    buffers = []
    blob = pickle.dumps(value, protocol=5, buffer_callback=buffers.append if packed else None)
    expected = pickle.loads(blob, buffers=[bytes(b.raw()) for b in buffers])
    assert type(out) is type(expected)
    assert out.dtype == (value if packed else expected).dtype  # NumPy forgets the byte order of dates
    assert out.shape == value.shape
    assert out.astype(value.dtype).tobytes() == value.tobytes()
    if not packed or value.flags.c_contiguous or value.flags.f_contiguous:  # NumPy's versions disagree on the rest
        assert out.flags.writeable == expected.flags.writeable
        assert out.flags.f_contiguous == expected.flags.f_contiguous
        assert out.flags.c_contiguous == expected.flags.c_contiguous


# ---- tensors

TORCH_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


def pickles(dtype: torch.dtype) -> bool:
    """Whether torch's own pickling can do it. uint16 is one it cannot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return pickle.loads(pickle.dumps(torch.zeros(1, dtype=dtype))).dtype == dtype
        except AttributeError:
            return False


UNPICKLED = [d for d in TORCH_DTYPES if not pickles(d)]


def random_tensor(dtype: torch.dtype, shape, seed: int) -> torch.Tensor:
    count = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, count, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@st.composite
def tensors(draw):
    """Tensors of every dtype, cut and turned in every way."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=12))
    t = random_tensor(draw(st.sampled_from(TORCH_DTYPES)), shape, draw(st.integers(0, 1 << 30)))
    for how in draw(st.lists(st.sampled_from(["turn", "cut", "step", "widen", "flip axes", "one"]), max_size=3)):
        dim = draw(st.integers(0, t.dim() - 1)) if t.dim() else None
        if dim is None:
            t = t.expand(draw(st.integers(1, 700)))
        elif how == "turn":
            t = t.movedim(dim, 0)
        elif how == "cut":
            t = t.narrow(dim, start := t.shape[dim] // 3, max(0, t.shape[dim] - 2 * start))
        elif how == "step":
            t = t[(slice(None),) * dim + (slice(None, None, 2),)]
        elif how == "widen":
            t = t.unsqueeze(dim)
            t = t.expand(*t.shape[:dim], draw(st.integers(0, 40)), *t.shape[dim + 1 :])
        elif how == "flip axes":
            t = t.mT if t.dim() > 1 else t
        else:
            t = t.unsqueeze(dim)
    if t.is_floating_point() and t.dtype.itemsize > 1 and draw(st.booleans()):
        t = t.detach().requires_grad_()
    return t


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(tensors(), st.sampled_from([1, SMALL]))
def test_any_tensor_comes_back(tensor, smallest):
    packed = tensor.nbytes >= smallest
    assume(packed or tensor.dtype not in UNPICKLED)
    blob, memory, packer = pack({"t": tensor}, smallest)
    assert bool(packer.segments.parts) == packed
    assert_same_tensor(unpack(blob, memory)["t"], tensor)
    if packed:
        assert len(blob) < 1000
        assert packer.segments.nbytes <= tensor.nbytes


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_dtype(dtype):
    tensor = random_tensor(dtype, (50, 41), 3)
    blob, memory, packer = pack([tensor, tensor.T, tensor[:, ::2]])
    assert len(packer.segments.parts) == 3
    for out, value in zip(unpack(blob, memory), [tensor, tensor.T, tensor[:, ::2]], strict=True):
        assert_same_tensor(out, value)


def test_strides_of_a_dense_tensor_are_kept():
    value = torch.arange(6 * 7 * 8, dtype=torch.float64).reshape(6, 7, 8).permute(2, 0, 1)
    assert round_trip(value).stride() == value.stride()
    image = torch.randn(2, 3, 20, 20).to(memory_format=torch.channels_last)
    assert round_trip(image).is_contiguous(memory_format=torch.channels_last)


def test_the_copies_in_an_expanded_tensor_are_not_stored():
    value = torch.arange(1000.0).reshape(10, 1, 100).expand(10, 5000, 100)
    _, memory, _ = pack(value)
    assert len(memory) == 4000
    out = round_trip(value)
    assert out.stride() == value.stride()
    assert torch.equal(out, value)
    scalar = torch.tensor(3.0).expand(40, 40)
    assert len(pack(scalar)[1]) == 4
    assert torch.equal(round_trip(scalar), scalar)


def test_a_slice_does_not_take_its_whole_storage_along():
    whole = torch.arange(1 << 18, dtype=torch.float32)
    blob, memory, _ = pack(whole[100:1100])
    assert len(memory) == 4000
    assert len(blob) < 1000
    assert torch.equal(unpack(blob, memory), whole[100:1100])


def test_a_tensor_that_was_unpickled_before_is_packed():
    """Torch leaves it with a dict of no hooks where others have None; so does a checkpoint that is loaded."""
    value = pickle.loads(pickle.dumps(torch.arange(1000)))
    blob, memory, _ = pack(value)
    assert len(memory) == value.nbytes
    assert_same_tensor(unpack(blob, memory), value)


def test_tensors_that_are_written_do_not_meet():
    a, b = torch.zeros(1000), torch.zeros(1000)
    out_a, out_b = round_trip([a, b])
    out_a += 1
    assert out_b.sum() == 0
    assert a.sum() == 0


class Tagged(torch.Tensor):
    """A subclass with an attribute."""


class Layer(torch.nn.Parameter):
    """A subclass of a class with its own pickling."""


def test_parameters_subclasses_and_attributes():
    weights = torch.nn.Parameter(torch.randn(40, 40))
    frozen = torch.nn.Parameter(torch.randn(40, 40), requires_grad=False)
    tagged = torch.randn(600).as_subclass(Tagged)
    tagged.tag = "kept"
    plain = torch.randn(600)
    plain.note = {"kept": True}
    blob, memory, packer = pack([weights, frozen, tagged, plain])
    assert len(packer.segments.parts) == 4
    out = unpack(blob, memory)
    for o, v in zip(out, [weights, frozen, tagged, plain], strict=True):
        assert_same_tensor(o, v)
    assert out[2].tag == "kept"
    assert out[3].note == {"kept": True}
    layer = Layer(torch.ones(600))
    assert type(round_trip(layer)) is type(pickle.loads(pickle.dumps(layer)))


def test_a_module_comes_back():
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    blob, memory, packer = pack(module)
    assert len(packer.segments.parts) == 1  # the rest is small
    out = unpack(blob, memory)
    x = torch.randn(5, 64)
    assert torch.equal(out.eval()(x), module.eval()(x))


def with_hook() -> torch.Tensor:
    t = torch.ones(600, requires_grad=True)
    t.register_hook(print)
    return t


NOT_PLAIN = {
    "sparse": lambda: torch.eye(600).to_sparse(),
    "sparse csr": lambda: torch.eye(60).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.randn(600), 0.1, 0, torch.qint8),
    "conjugate": lambda: torch.randn(600, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.randn(600, dtype=torch.complex64).conj().imag,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_what_is_no_plain_memory_is_pickled_as_usual(make):
    value = make()
    blob, memory, packer = pack(value)
    out = unpack(blob, memory)
    assert out.layout == value.layout
    assert out.dtype == value.dtype
    dense = (
        (lambda t: t.dequantize())
        if value.is_quantized
        else (lambda t: t.to_dense() if t.layout != torch.strided else t.resolve_conj().resolve_neg())
    )
    assert torch.equal(dense(out), dense(value))
    if value.layout == torch.strided:
        assert not packer.segments.parts


def test_meta_tensors_and_hooks_are_left_to_torch():
    out = round_trip(torch.empty(1000, device="meta"))
    assert out.device.type == "meta"
    value = with_hook()
    with pytest.warns(UserWarning, match="backward hook"):
        _, _, packer = pack(value)
    assert not packer.segments.parts


# ---- arrays


def numpy_dtypes():
    scalar = st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(),
        hnp.unsigned_integer_dtypes(),
        hnp.floating_dtypes(),
        hnp.complex_number_dtypes(),
        hnp.datetime64_dtypes(),
        hnp.timedelta64_dtypes(),
        hnp.byte_string_dtypes(min_len=1, max_len=9),
        hnp.unicode_string_dtypes(min_len=1, max_len=9),
    )
    return st.one_of(scalar, hnp.array_dtypes(scalar, min_size=1, max_size=4), hnp.nested_dtypes(scalar, max_leaves=4))


@st.composite
def arrays(draw):
    """Arrays of every dtype without objects, cut and turned in every way."""
    dtype = draw(numpy_dtypes())
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=12))
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.random.default_rng(draw(st.integers(0, 1 << 30))).integers(0, 2, count, dtype=np.uint8)  # 0 and 1 are valid everywhere
    a = np.ndarray(shape, dtype, raw.tobytes()).copy() if count else np.zeros(shape, dtype)
    for how in draw(st.lists(st.sampled_from(["turn", "cut", "step", "back", "widen", "fortran"]), max_size=3)):
        if how == "fortran":
            a = np.asfortranarray(a)
        elif how == "widen":
            a = np.broadcast_to(a, (draw(st.integers(0, 40)), *a.shape)) if a.ndim < 5 else a
        elif a.ndim:
            dim = draw(st.integers(0, a.ndim - 1))
            cut = {"turn": None, "cut": slice(1, -1), "step": slice(None, None, 2), "back": slice(None, None, -1)}[how]
            a = np.moveaxis(a, dim, 0) if cut is None else a[(slice(None),) * dim + (cut,)]
    return a


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(arrays(), st.sampled_from([1, SMALL]))
def test_any_array_comes_back(array, smallest):
    blob, memory, packer = pack([array], smallest)
    packed = array.nbytes >= smallest
    assert bool(packer.segments.parts) == packed
    assert_same_array(unpack(blob, memory)[0], array, packed)


class Named(np.ndarray):
    """A plain subclass."""


def test_subclasses():
    matrix = np.arange(900.0).reshape(30, 30).view(np.matrix)
    records = np.zeros(100, dtype=[("a", "i4"), ("b", "f8", (3,))]).view(np.recarray)
    records.b[:] = 7
    named = np.arange(1000).view(Named)
    blob, memory, packer = pack([matrix, records, named])
    assert len(packer.segments.parts) == 3
    out = unpack(blob, memory)
    for o, v in zip(out, [matrix, records, named], strict=True):
        assert type(o) is type(v)
        assert o.dtype == v.dtype
        assert np.array_equal(np.asarray(o), np.asarray(v))
        assert o.flags.writeable
    assert out[1].b[5, 2] == 7


def test_a_subclass_with_its_own_pickling_keeps_it():
    masked = np.ma.masked_greater(np.arange(2000), 1000)
    out = round_trip(masked)
    assert type(out) is np.ma.MaskedArray
    assert np.array_equal(out.mask, masked.mask)
    assert out.sum() == masked.sum()


def test_arrays_of_objects_are_pickled_but_what_is_in_them_is_packed():
    inner = np.arange(5000)
    value = np.array([inner, "text", None, {"more": inner}], dtype=object)
    blob, memory, packer = pack(value)
    assert len(packer.segments.parts) == 1
    out = unpack(blob, memory)
    assert out.dtype == object
    assert np.array_equal(out[0], inner)
    assert out[3]["more"] is out[0]
    nested = np.zeros(50, dtype=[("n", "i8"), ("o", object)])
    assert not pack(nested)[2].segments.parts


def test_strings_of_variable_length_are_not_memory():
    value = np.array(["short", "long " * 100] * 40, dtype=np.dtypes.StringDType())
    _, _, packer = pack(value)
    assert not packer.segments.parts
    assert (round_trip(value) == value).all()


def test_a_packed_array_is_read_only():
    alone = round_trip(np.arange(1000))
    beside_a_tensor = round_trip([torch.zeros(1000), np.arange(1000)])[1]  # in memory that is writable
    for out in (alone, beside_a_tensor):
        with pytest.raises(ValueError, match="read-only"):
            out[0] = 1


# ---- whole pickles


@pytest.mark.parametrize("make", [lambda n: np.zeros(n, np.uint8), lambda n: torch.zeros(n, dtype=torch.uint8)], ids=["array", "tensor"])
def test_the_threshold(make):
    assert not pack(make(SMALL - 1))[2].segments.parts
    assert pack(make(SMALL))[2].segments.parts


def test_one_object_named_twice_is_stored_once():
    tensor, array = torch.randn(1000), np.arange(1000)
    blob, memory, packer = pack({"a": tensor, "b": [tensor, array], "c": array})
    assert len(packer.segments.parts) == 2
    out = unpack(blob, memory)
    assert out["a"] is out["b"][0]
    assert out["c"] is out["b"][1]


def test_many_segments_are_laid_out_without_overlap():
    rng = np.random.default_rng(5)
    sizes = [*rng.integers(1, 5000, 200), 1 << 20, (1 << 20) + 1, 3, (1 << 20) - 1]
    value = [rng.integers(0, 256, n, dtype=np.uint8) for n in sizes]
    blob, memory, packer = pack(value)
    assert len(packer.segments.parts) == sum(n >= SMALL for n in sizes)
    for out, v in zip(unpack(blob, memory), value, strict=True):
        assert np.array_equal(out, v)


def test_segments_beyond_32_bits():
    segments = Segments()
    assert segments.add(0, 5 << 30, None) == 0
    assert segments.add(0, 100, None) == 5 << 30
    assert segments.add(0, 1 << 40, None) == (5 << 30) + PAGE
    assert segments.nbytes == (5 << 30) + PAGE + (1 << 40)


def test_sources_are_kept_until_the_copy():
    packer = Packer()
    RegionPickler(io.BytesIO(), packer, region_here).dump(
        [np.arange(4000)[::2], torch.arange(4000)[::2]]
    )  # the copies made for it have no other owner
    for offset, address, nbytes in packer.segments.parts:
        assert np.array_equal(np.frombuffer(ctypes.string_at(address, nbytes), np.int64), np.arange(0, 4000, 2)), offset


# ---- scan


class Opaque:
    def __init__(self, inside):
        self.inside = inside


BIG = np.zeros(100_000, np.uint8)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (BIG, SMALL),
        (torch.zeros(100_000, dtype=torch.uint8), SMALL),
        ([BIG[:50_000], {"x": (BIG[:50_000],)}], SMALL),
        (BIG[:-1], None),
        ({"a": BIG[:50_000], "b": 1, "c": "text"}, None),
        ("text" * 100_000, None),
        (7, None),
        (None, None),
        ([], None),
        ({"a": Opaque(BIG)}, 100_000),
        (Opaque(BIG), 100_000),
        ([Opaque(None), BIG], SMALL),
        (list(range(100_000)), None),
    ],
    ids=str,
)
def test_scan(value, expected):
    assert scan(value, 100_000) == expected


def test_scan_of_a_layout_without_a_size():
    assert scan(torch.eye(60).to_sparse(), 100_000) in (None, 100_000)


def test_scan_looks_at_a_bounded_number_of_things():
    class Counted(dict):
        pass

    many = [{"n": i} for i in range(100_000)]
    assert scan(many, 1000) == 1000  # not seen through
    assert scan([many, BIG], 1000) == SMALL
    endless = []
    endless.append(endless)
    assert scan(endless, 1000) == 1000
