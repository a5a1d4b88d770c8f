"""Tensors on devices: into the pool and back, on devices that pretend. What needs a real one is marked."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_device import FakeDevices
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench import gpu_check
from mooncake_ray.config import Config
from mooncake_ray.errors import ConfigError, GetTimeoutError
from mooncake_ray.store import devices

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float64]


@pytest.fixture
def fake(monkeypatch):
    return FakeDevices().install(monkeypatch)


@pytest.fixture
def small_units(monkeypatch):
    """Registrations of a page each, so that every copy is cut."""
    monkeypatch.setattr(devices.Registrations.__init__, "__defaults__", (4096,))


def random_bits(shape, dtype, seed=0):
    n = torch.Size(shape).numel()
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, n * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a, b):
    return (
        a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and a.requires_grad == b.requires_grad and bits(a) == bits(b)
    )


# ---- planning


@settings(deadline=None)
@given(st.integers(0, 1 << 40), st.integers(0, 5000), st.integers(50, 1000))
def test_cut(offset, nbytes, unit):
    parts = list(devices.cut(offset, nbytes, unit))
    assert sum(n for _, n in parts) == nbytes
    assert all(n > 0 and at // unit == (at + n - 1) // unit for at, n in parts)
    assert [at for at, _ in parts] == [offset + sum(n for _, n in parts[:i]) for i in range(len(parts))]
    assert len(parts) == len({at // unit for at, _ in parts})  # none is cut where it need not be


class Arenas:
    """A client with arenas of ordinary memory."""

    def __init__(self, *sizes):
        self.memory = [np.zeros(n, np.uint8) for n in sizes]
        self.asked = 0

    def arenas(self):
        self.asked += 1
        return [(i, m.ctypes.data, 0, m.nbytes, -1) for i, m in enumerate(self.memory)]


def test_memory_is_registered_when_it_is_used_and_once(fake):
    client = Arenas(1000, 2500)
    known = devices.Registrations(client, fake, 1000)
    assert known.nbytes == 0
    assert [len(p) for p in known.pieces(1, 500, 600)] == [500, 100]
    base = client.memory[1].ctypes.data
    assert fake.registered == {base: 1000, base + 1000: 1000}
    (piece,) = known.pieces(1, 2400, 100)
    assert piece.ctypes.data == base + 2400 and fake.registered[base + 2000] == 500  # to the arena's end, not beyond
    known.pieces(0, 0, 1000)
    assert client.asked == 1 and known.nbytes == 3500
    client.memory.append(np.zeros(10, np.uint8))  # the pool has grown
    known.pieces(2, 0, 10)
    assert client.asked == 2 and known.nbytes == 3510
    known.release()
    assert known.nbytes == 3510  # copies may be under way
    for _ in range(3):
        known.done()
    assert fake.registered != {}
    known.done()
    assert fake.registered == {} and known.nbytes == 0


def test_refused_once_and_never_asked_again(monkeypatch, caplog):
    fake = FakeDevices(refuse=True).install(monkeypatch)
    known = devices.Registrations(Arenas(5000), fake, 1000)
    with caplog.at_level(logging.WARNING, "mooncake_ray"):
        assert sum(len(p) for p in known.pieces(0, 0, 3000)) == 3000
        fake.refuse = False
        known.pieces(0, 0, 3000)
    assert fake.registered == {}
    assert len(caplog.records) == 1 and "no more locked memory" in caplog.text


# ---- through the pool


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_to_its_device(store, fake, dtype):
    value = {"a": fake.on(random_bits((300, 40), dtype), "cuda:1"), "b": random_bits((2000,), dtype), "c": np.arange(5000)}
    key = store.put(value)
    assert fake.pending == []
    out = store.get(key)
    assert fake.pending == []
    assert same(out["a"], value["a"]) and same(out["b"], value["b"]) and np.array_equal(out["c"], value["c"])
    assert fake.location(out["a"]) == "cuda:1" and fake.location(out["b"]) == ""
    copied = [entry for entry in fake.log if entry[0] == "copy"]
    for to_device in (False, True):
        mine = [entry for entry in copied if entry[2] is to_device]
        assert sum(entry[3] for entry in mine) == value["a"].nbytes
        assert all(entry[4] for entry in mine), "copied from or to memory that is not registered"
        assert value["a"].nbytes <= 4096 or len(mine) > 1


@pytest.mark.usefixtures("small_units")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_layout(store, fake, data):
    dtype = data.draw(st.sampled_from([d for d in DTYPES if d != torch.float8_e4m3fn]))  # PyTorch cannot pickle a small one
    shape = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    whole = random_bits((2 * shape[0], 40, *shape[1:]), dtype, data.draw(st.integers(0, 9)))
    tensor = whole[:: data.draw(st.sampled_from([1, 2]))]
    if data.draw(st.booleans()):
        tensor = tensor.transpose(0, data.draw(st.integers(0, tensor.dim() - 1)))
    if data.draw(st.booleans()):
        tensor = tensor[0:1].expand(3, *tensor.shape[1:])
    if data.draw(st.booleans()) and dtype.is_floating_point and dtype.itemsize > 1:
        tensor = tensor.requires_grad_() if tensor.is_leaf else tensor
    key = store.put(tensor)
    expected = store.get(key)
    store.free([key])
    fake.places.clear()
    fake.on(whole, "cuda:0")
    key = store.put(tensor)
    out = store.get(key)
    store.free([key])
    assert same(out, expected)  # as a tensor of the host
    assert tensor.nbytes < 1024 or fake.location(out) == "cuda:0"


def test_where_tensors_go(store, fake):
    there, here = fake.on(random_bits((2000,), torch.float32), "cuda:1"), random_bits((3000,), torch.int16, 1)
    key = store.put([there, here])

    def places(device=None):
        out = store.get(key, device=device)
        assert bits(out[0]) == bits(there) and bits(out[1]) == bits(here)
        return [fake.location(t) for t in out]

    assert places() == places("as-put") == ["cuda:1", ""]
    assert places("cpu") == ["", ""]
    assert places("cuda:0") == ["cuda:0", "cuda:0"]
    assert places("cuda") == ["cuda", "cuda"]
    with devices.loading("cpu"):
        assert places() == ["", ""]
        later = store.get(key, device="cuda:1")
        assert fake.pending and places() == ["", ""]
    assert [fake.location(t) for t in later] == ["cuda:1", "cuda:1"] and bits(later[0]) == bits(there)
    assert places() == ["cuda:1", ""]
    with pytest.raises(RuntimeError, match="no cuda:7"):
        places("cuda:7")
    assert devices._state.transfers is None


@pytest.mark.parametrize("setting", ["cpu", "cuda:0"])
def test_cuda_get(scope, fake, setting):
    store = scope.store(cuda_get=setting)
    there, here = fake.on(random_bits((2000,), torch.float32), "cuda:1"), random_bits((3000,), torch.int16, 1)
    out = store.get(store.put([there, here]))
    assert [fake.location(t) for t in out] == ["" if setting == "cpu" else setting, ""]
    assert bits(out[0]) == bits(there)


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "CPU", "cuda:1 "])
def test_cuda_get_is_checked(text):
    with pytest.raises(ConfigError, match="cuda_get"):
        Config(cuda_get=text)


def test_one_wait_for_all_devices(store, fake):
    value = [fake.on(random_bits((5000 + i,), torch.uint8, i), f"cuda:{i % 2}") for i in range(6)]
    waits = []
    original = fake.mark
    fake.mark = lambda queue: waits.append((queue, len(fake.pending))) or original(queue)
    key = store.put(value)
    assert waits == [(("cuda:0", False), 6), (("cuda:1", False), 6)]  # all are queued before the first wait
    waits.clear()
    out = store.get(key)
    assert waits == [(("cuda:0", True), 6), (("cuda:1", True), 6)]
    assert all(same(a, b) for a, b in zip(out, value, strict=True))
    assert [fake.location(t) for t in out] == [fake.location(t) for t in value]


def test_what_is_computed_next_comes_after_the_copy(store, fake):
    key = store.put(fake.on(random_bits((5000,), torch.uint8), "cuda:1"))
    fake.log.clear()
    store.get(key)
    assert [entry[:2] for entry in fake.log] == [("begin", "cuda:1"), ("copy", "cuda:1"), ("follow", "cuda:1")]


def test_registrations_go_with_the_store(scope, fake):
    store = scope.store()
    store.put(fake.on(random_bits((5000,), torch.uint8), "cuda:0"))
    assert sum(fake.registered.values()) == scope.config.capacity_bytes
    store.close()
    assert fake.registered == {}


def test_without_registration_it_is_only_slower(store, monkeypatch, caplog):
    fake = FakeDevices(refuse=True).install(monkeypatch)
    value = fake.on(random_bits((9000,), torch.int64), "cuda:0")
    with caplog.at_level(logging.WARNING, "mooncake_ray"):
        out = [store.get(store.put(value)) for _ in range(3)]
    assert all(same(o, value) for o in out)
    assert len(caplog.records) == 1


def test_a_device_that_hangs_keeps_the_memory(scope, monkeypatch):
    fake = FakeDevices(hang=True).install(monkeypatch)
    monkeypatch.setattr(devices.Transfers.finish, "__defaults__", (0.0,))
    stuck = []
    monkeypatch.setattr(devices, "_stuck", stuck)
    store = scope.store()
    before = store.stats()["leases"]
    with pytest.raises(GetTimeoutError, match="from cuda:1 are not over after 0"):
        store.put(fake.on(random_bits((5000,), torch.uint8), "cuda:1"))
    assert store.stats()["leases"] == before + 1  # the device may still write there
    stuck.clear()
    scope.eventually(lambda: store.stats()["leases"] == before)
    fake.pending.clear()


def test_a_value_that_cannot_be_loaded_waits_for_what_was_queued(store, fake):
    key = store.put([fake.on(random_bits((5000,), torch.uint8), "cuda:0"), fake.on(random_bits((5000,), torch.uint8, 1), "cuda:5")])
    with pytest.raises(RuntimeError, match="no cuda:5"):
        store.get(key)
    assert fake.pending == [] and devices._state.transfers is None
    assert bits(store.get(key, device="cpu")[1]) == bits(random_bits((5000,), torch.uint8, 1))


def test_pickled_out_of_a_loading_block(store, fake):
    """A descriptor that somebody unpickles by itself waits for its own copy."""
    value = fake.on(random_bits((5000,), torch.uint8), "cuda:1")
    key = store.put(value)
    region = type("Pinned", (), {"client": store.client, "shared": lambda self: store.client.get(key.id, 0, False)})()
    start = 4096
    out = devices.upload(region, start, 5000, "cuda:1")
    assert fake.pending == []
    assert bits(out) == bits(value)


# ---- PyTorch without a device


def test_the_same_error_as_plain_unpickling(store, fake, monkeypatch):
    from mooncake_ray.store.cuda import Cuda

    value = fake.on(random_bits((5000,), torch.uint8), "cuda:0")
    key = store.put(value)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    plain = pickle.dumps(value.clone())
    monkeypatch.undo()
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(RuntimeError) as expected:
        pickle.loads(plain)
    with pytest.raises(RuntimeError) as got:
        store.get(key)
    assert str(got.value) == str(expected.value)
    assert "cuda.is_available() is False" in str(got.value)
    assert isinstance(devices.backend(), Cuda)
    assert same(store.get(key, device="cpu"), value)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_are_none_of_ours(device):
    assert devices.location(torch.empty(3, device=device)) == ""


def test_nothing_is_loaded_without_need():
    code = "import sys, mooncake_ray.store; print([m for m in ('torch', 'mooncake_ray.store.cuda') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


# ---- with a device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is False: no CUDA device, or a PyTorch without CUDA")
@pytest.mark.parametrize("name", gpu_check.CHECKS)
def test_on_a_real_device(name):
    """Each check in a process of its own: what CUDA has started in a process stays in it."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check", name], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_the_checks_say_that_there_is_no_device(capsys):
    assert gpu_check.main([]) == 2
    assert '"ok": false' in capsys.readouterr().out


def test_the_checks_can_fail(monkeypatch, capsys):
    """With a device that loses a bit, on what is not PyTorch's own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(gpu_check, "POOL_BYTES", 8 * MIB)
    fake = FakeDevices().install(monkeypatch)

    def one(store):
        value = fake.on(torch.arange(5000), "cuda:0")
        gpu_check.require(torch.equal(store.get(store.put(value)), value), "other bits")
        return {"bytes": value.nbytes}

    monkeypatch.setattr(gpu_check, "CHECKS", {"one": one})
    assert gpu_check.main([]) == 0
    good, fake.raw = fake.raw, lambda tensor: good(tensor).flip(0)
    assert gpu_check.main(["one"]) == 1
    assert "other bits" in capsys.readouterr().out
