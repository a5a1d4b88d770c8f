"""CuPy's arrays, by a module that has its names."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
from fake_device import FakeDevices


@pytest.fixture
def cupy(monkeypatch):
    fake = FakeDevices(1).install(monkeypatch)
    module = types.ModuleType("cupy")

    class ndarray(np.ndarray):
        __module__ = "cupy"
        __qualname__ = "ndarray"
        device = types.SimpleNamespace(id=0)

    synchronized = []
    module.ndarray = ndarray
    module.from_dlpack = lambda tensor: np.from_dlpack(tensor).view(ndarray)
    module.cuda = types.SimpleNamespace(
        Device=lambda: types.SimpleNamespace(id=0),
        get_current_stream=lambda: types.SimpleNamespace(synchronize=lambda: synchronized.append(1)),
    )
    module.fake, module.synchronized = fake, synchronized
    monkeypatch.setitem(sys.modules, "cupy", module)
    plain = torch.as_tensor
    monkeypatch.setattr(torch, "as_tensor", lambda array, device: fake.on(plain(np.asarray(array)), device))
    yield module
    from mooncake_ray.store import frameworks

    frameworks._known.pop(ndarray, None)


@pytest.fixture
def reduced(cupy, monkeypatch):
    """NumPy's own arrays are found before frameworks are asked, and the stand-in is one."""
    from mooncake_ray.store.packing import Packer, frameworks

    whole = Packer.reduce
    monkeypatch.setattr(Packer, "reduce", lambda self, obj: frameworks.reduce(self, obj) if type(obj) is cupy.ndarray else whole(self, obj))


@pytest.mark.usefixtures("reduced")
@pytest.mark.parametrize("order", ["C", "F", "neither"])
@pytest.mark.parametrize("dtype", ["f4", "c16", "?", "M8[s]", "f2"])
def test_round_trip(store, cupy, dtype, order):
    raw = np.random.default_rng(3).integers(0, 2, 60 * 80 * np.dtype(dtype).itemsize, dtype=np.uint8)
    array = raw.view(dtype).reshape(60, 80)
    array = {"C": array, "F": array.T, "neither": array[::2, ::2]}[order].view(cupy.ndarray)
    out = store.get(store.put([array]))[0]
    assert type(out) is cupy.ndarray and out.dtype == array.dtype and out.shape == array.shape
    assert np.ascontiguousarray(out).tobytes() == np.ascontiguousarray(array).tobytes()
    assert out.flags.f_contiguous == (order == "F")
    assert [entry[2] for entry in cupy.fake.log if entry[0] == "copy"] == [False, True]
    assert cupy.synchronized == [1]


@pytest.mark.usefixtures("reduced")
def test_small_ones_go_their_own_way(store, cupy):
    store.put([np.arange(10).view(cupy.ndarray)])
    assert cupy.fake.log == []
