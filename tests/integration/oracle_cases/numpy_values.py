"""Put and get: NumPy."""

from __future__ import annotations

import numpy as np
import ray
import torch

from oracle_cases.helpers import error_of, round_trip, strides
from oracle_cases.payloads import LabelledArray, array, floats
from oracle_cases.registry import case


def numpy_facts(got):
    return [got, got.flags.c_contiguous, got.flags.f_contiguous, got.flags.aligned, strides(got)]


@case
def numpy_layouts():
    base = array(shape=(300, 300))
    sources = [base, np.asfortranarray(base), base[::2, 1:], base[::-1], base.T, np.broadcast_to(base[0], (300, 300))]
    return [numpy_facts(round_trip(source)) for source in sources]


@case
def numpy_dtypes():
    names = "?,i1,u1,i2,u2,i4,u4,i8,u8,f2,f4,f8,c8,c16"
    return [*(round_trip(array(dtype=name)) for name in names.split(",")), round_trip(long_doubles())]


def long_doubles():
    """Long doubles whose padding bytes are zero, so that all bytes can be compared."""
    size = np.dtype(np.longdouble).itemsize
    raw = array(dtype=np.longdouble).reshape(-1, 1).view(np.uint8).copy()
    raw[:, 10:] = 0
    return raw.reshape(-1).view(np.longdouble).reshape(-1, size)


@case
def numpy_byte_order():
    return round_trip([array(dtype=">f4"), array(dtype=">i8"), array(dtype="<u2")])


@case
def numpy_structured():
    kind = np.dtype([("id", "i8"), ("xy", "f4", (2,)), ("name", "S5")], align=True)
    structured = np.zeros(20_000, kind)
    structured["id"], structured["name"] = np.arange(20_000), b"abc"
    record = structured.view(np.recarray)
    got = round_trip([structured, record, structured["xy"], structured[3]])
    return [got, got[1].id[:4]]


@case
def numpy_datetime():
    days = np.datetime64("2020-01-01", "D") + np.arange(50_000)
    return round_trip([days, days.astype("M8[ns]"), np.diff(days), days[0]])


@case
def numpy_object_dtype():
    mixed = np.empty((2, 3), object)
    mixed[0] = [floats(), array(1), "text"]
    mixed[1] = [None, {"k": floats(2)}, 5]
    texts = np.array(["x" * (i % 7) for i in range(40_000)], object)
    return round_trip([mixed, texts])


@case
def numpy_scalar_and_empty():
    sources = [np.empty(0), np.empty((0, 4), np.int8), np.empty((3, 0, 2))]
    sources += [np.array(3.5), np.float32(2), np.bool_(True)]
    return [round_trip(sources), [round_trip(source) for source in sources]]


@case
def numpy_strings():
    texts = [f"text {i % 99} ü" for i in range(30_000)]
    return round_trip([np.array(texts), np.array([t.encode() for t in texts]), np.array(texts).reshape(100, -1).T])


@case
def numpy_variable_strings():
    got = round_trip(np.array(["x" * (i % 50) for i in range(20_000)], np.dtypes.StringDType()))
    return [repr(got.dtype), "|".join(got.tolist())]


@case
def numpy_subclasses():
    labelled = array().view(LabelledArray)
    labelled.label = "mine"
    masked = np.ma.masked_array(array(), mask=array() % 2 == 0, fill_value=-1)
    return round_trip([labelled, masked, np.matrix(array(1))])


@case
def numpy_result_is_read_only():
    ref = ray.put({"big": array(), "small": np.arange(3), "fortran": np.asfortranarray(array(2))})
    got, alone = ray.get(ref), round_trip(array(3))
    writes = [error_of(np.ndarray.fill, target, 1) for target in (*got.values(), alone)]
    flags = [error_of(target.setflags, write=True) for target in (got["big"], alone)]
    return [writes, flags, ray.get(ref)]


@case
def numpy_read_only_source():
    source = array()
    source.setflags(write=False)
    return [round_trip(source), source.flags.writeable]


@case
def numpy_result_usable():
    got = round_trip(array())
    copied = got.copy()
    copied += 1
    derived = [got.max(), (got @ got.T).shape, got[5], memoryview(got).nbytes, memoryview(got).readonly]
    return [copied, derived, torch.tensor(got)]
