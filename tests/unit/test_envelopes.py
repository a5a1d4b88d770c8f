"""Envelopes are read without what is in them: no payload, no code of the user's."""

from __future__ import annotations

import datetime
import io
import pickle
import types

import numpy as np
import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import cloudpickle

from mooncake_ray.data import DataProto
from mooncake_ray.objects import envelopes, session
from mooncake_ray.store.packing import Call, Here, Packer

POOL, OWN = b"p" * 16, b"o" * 16
touched = []


class Pickler(cloudpickle.CloudPickler):
    def __init__(self, file, packer, buffers=None):
        super().__init__(file, protocol=5, buffer_callback=buffers)
        self.packer = packer

    def reducer_override(self, obj):
        if type(obj) is Here:
            return session.open_region, (POOL, OWN)
        reduced = self.packer.reduce(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


def read(value, smallest=1 << 10):
    """What the envelope of a value names, and the size that the packer gave its object."""
    packer, file = Packer(smallest), io.BytesIO()
    Pickler(file, packer).dump(value)
    found = {}
    envelopes._Reader(file.getvalue(), found, None).load()
    return found, packer.segments.nbytes


class Loud:
    """Says when any of it runs."""

    def __init__(self, *args):
        self.args = args

    def __new__(cls, *args):
        touched.append("new")
        return super().__new__(cls)

    def __setstate__(self, state):
        touched.append("setstate")

    def __hash__(self):
        touched.append("hash")
        return 1


class LoudDict(dict):
    def __setitem__(self, key, value):
        touched.append("setitem")
        super().__setitem__(key, value)


class LoudList(list):
    def append(self, value):
        touched.append("append")


tensors = st.builds(
    lambda n, dtype: torch.zeros(n, dtype=dtype),
    st.integers(1, 5000),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool]),
)
arrays = st.builds(
    lambda n, dtype: np.zeros(n, dtype), st.integers(1, 5000), st.sampled_from(["f8", "i2", "?", "M8[s]", "S5", [("a", "i4"), ("b", "f8")]])
)
others = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=5),
    st.sampled_from([datetime.date(2026, 1, 1), {1, 2}, frozenset({3}), np.int32(4), torch.float32, types.SimpleNamespace(a=1), Loud, len]),
)
values = st.recursive(
    st.one_of(tensors, arrays, others),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
        st.builds(lambda x: types.SimpleNamespace(x=x), inner),
        st.builds(lambda x: LoudDict(x=x), inner),
        st.builds(lambda x: LoudList([x]), inner),
        st.builds(Loud, inner),
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(values)
def test_every_value_names_its_object_and_runs_nothing(value):
    touched.clear()
    found, nbytes = read(value)
    assert not [t for t in touched if t != "hash"]  # pickling hashes
    if not nbytes:
        assert not found
        return
    (obj,) = found.values()
    assert (obj.pool_id, obj.id, obj.nbytes) == (POOL, OWN, nbytes)


def test_batches_name_their_block():
    batch = DataProto.from_dict(tensors={"x": torch.arange(4096).reshape(64, 64), "y": torch.randn(64, 7)})
    found, nbytes = read(batch)
    assert found[OWN].nbytes == nbytes > 0


def test_a_class_that_is_pickled_by_value_is_not_made():
    made = []

    class Local:
        def __reduce__(self):
            return made.append, ("ran",)

    assert read([Local(), torch.zeros(1 << 12)])[0][OWN].nbytes == 1 << 14
    assert not made


def test_a_pickle_that_is_loaded_by_the_session_is_looked_into():
    packer, file, buffers = Packer(), io.BytesIO(), []
    Pickler(file, packer, buffers.append).dump({"t": torch.zeros(1 << 12), "b": pickle.PickleBuffer(b"xyz")})
    outer = pickle.dumps(Call(session.load, (file.getvalue(), buffers)), protocol=5)
    found = {}
    envelopes._Reader(outer, found, None).load()
    assert found[OWN].nbytes == 1 << 14


def test_objects_of_several_pools_are_told_apart():
    data = pickle.dumps([Call(session.open_region, (pool, id)) for pool, id in ((b"p", b"1"), (b"q", b"2"), (b"p", b"1"))])
    found = {}
    envelopes._Reader(data, found, None).load()
    assert [(n.pool_id, n.id, n.nbytes) for n in found.values()] == [(b"p", b"1", 0), (b"q", b"2", 0)]


def test_elsewhere_pickles_are_loaded_as_ever():
    data = pickle.dumps({"a": [1, datetime.date(2026, 1, 1)]})
    assert envelopes.loads(pickle.loads)(data) == pickle.loads(data)
    with envelopes._reading() as found:
        assert envelopes.loads(pickle.loads)(data, buffers=[]) != pickle.loads(data)
    assert not found
    assert envelopes.loads(pickle.loads)(data) == pickle.loads(data)


def test_refs_are_found_in_lists():
    refs = [ray.ObjectRef(bytes([i]) * 28) for i in range(4)]
    assert envelopes.flat(refs[0]) == refs[:1]
    assert envelopes.flat([refs[2], (refs[0], [refs[1], refs[2]]), []]) == [refs[2], refs[0], refs[1]]
    stored = types.SimpleNamespace(as_put="dict", refs=refs[1:3])
    assert envelopes.flat([refs[1], stored, refs[3]]) == refs[1:]
    for wrong in (1, [refs[0], "x"], {"a": refs[0]}, None):
        with pytest.raises(TypeError, match="expected an ObjectRef"):
            envelopes.flat(wrong)
