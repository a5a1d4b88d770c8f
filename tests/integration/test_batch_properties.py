"""Any batch that can be expressed survives put, append, partial reads and joins bit for bit, in another process."""

from __future__ import annotations

import datetime
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mooncake_ray
from mooncake_ray.data import DataProto
from mooncake_ray.data.ragged import Ragged

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
]


def noise(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, small: bool) -> torch.Tensor:
    """Any bits: NaNs of every kind, -0.0, the largest integers; or small ones."""
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    if small or dtype is torch.bool:
        raw[..., 1:] = 0
        raw[..., 0] &= 1 if dtype is torch.bool else 7
    return torch.from_numpy(raw.reshape(-1)).view(dtype).reshape(shape) if raw.size else torch.empty(shape, dtype=dtype)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**66), 2**66),
    st.sampled_from([0, 2**53 + 1, 2**63, 2**64 - 1, -(2**63)]),
    st.floats(),
    st.sampled_from([-0.0, math.nan, math.inf]),
    st.text(max_size=6),
    st.binary(max_size=6),
    st.just(datetime.date(2026, 1, 2)),
    st.complex_numbers(),
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 3)), inner, max_size=3),
    ),
    max_leaves=8,
)


@st.composite
def columns(draw, rows: int, prefix: str):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = rng.integers(0, 7, rows)
    out = {}
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["dense", "padded", "ragged", "nested", "array", "objects", "numbers"]))
        dtype, small, tail = draw(st.sampled_from(DTYPES)), draw(st.booleans()), draw(st.sampled_from([(), (2,)]))
        offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))))
        total = int(lengths.sum())
        if kind == "dense":
            value = noise(rng, (rows, *draw(st.sampled_from([(), (3,), (2, 2)]))), dtype, small)
        elif kind == "padded":
            value = Ragged(noise(rng, (total, *tail), dtype, small), offsets).to_padded(7, side=draw(st.sampled_from(["left", "right"])))
        elif kind == "ragged":
            value = Ragged(
                noise(rng, (total, *tail), dtype, small), offsets, torch.from_numpy(lengths > 0) if draw(st.booleans()) else None
            )
        elif kind == "nested":
            inner = rng.integers(0, 4, total)
            inner_offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(inner))))
            value = Ragged(Ragged(noise(rng, (int(inner.sum()), *tail), dtype, small), inner_offsets), offsets)
        elif kind == "array":
            value = rng.integers(-5, 5, (rows, 2)).astype(draw(st.sampled_from(["i8", "f4", "U3", "M8[s]", "u2"])))
        elif kind == "numbers":
            value = [rng.integers(0, 200_000, n).tolist() for n in lengths]
        else:
            value = draw(st.lists(trees, min_size=rows, max_size=rows))
        out[f"{prefix}{number}"] = value
    return out


@pytest.fixture(scope="module")
def reader(pool_ray):
    @pool_ray.remote
    class Reader:
        def read(self, ref, fields, rows, path):
            mooncake_ray.get(ref, fields=fields, rows=rows, form="as-put", lazy=True).save_to_disk(path)

        def put(self, path):
            return mooncake_ray.put_batch(DataProto.load_from_disk(path).to_columns())

    actor = Reader.remote()
    yield actor
    pool_ray.kill(actor)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_any_batch(pool_ray, reader, tmp_path_factory, data):
    files = tmp_path_factory.mktemp("batches")  # plain torch cannot unpickle all of its dtypes
    rows = data.draw(st.integers(1, 6))
    first, more = data.draw(columns(rows, "a")), data.draw(columns(rows, "b"))
    DataProto.from_columns(first).save_to_disk(files / "first")
    ref = pool_ray.get(reader.put.remote(files / "first")).append(mooncake_ray.put_batch(more))
    whole = DataProto.from_columns({**first, **more})
    chosen = data.draw(st.lists(st.integers(-rows, rows - 1), min_size=1, max_size=8))
    asks = [(None, None), (None, slice(rows // 2, None)), (data.draw(st.lists(st.sampled_from(ref.fields), min_size=1)), chosen)]
    joined = mooncake_ray.concat_batches([ref[chosen], ref, ref[:1]])
    order = [*(np.array(chosen) % rows), *range(rows), 0]
    wanted = [*((ref, *ask) for ask in asks), (joined, None, None)]
    pool_ray.get([reader.read.remote(*ask, files / str(number)) for number, ask in enumerate(wanted)])
    got = [DataProto.load_from_disk(files / str(number)) for number in range(len(wanted))]
    for batch, (fields, index) in zip(got, asks, strict=False):
        expected = whole if index is None else whole[index]
        if fields is not None:
            expected = expected.select([f for f in fields if f in whole.batch], [f for f in fields if f not in whole.batch])
        assert batch.equals(expected)
    assert got[-1].equals(whole.select_idxs(np.array(order)))
    for name in first:
        assert type(mooncake_ray.get(ref, fields=[name])[name]) is type(first[name]) or not isinstance(first[name], list)
