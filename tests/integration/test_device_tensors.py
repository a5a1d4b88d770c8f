"""Tensors on devices through Ray, on devices that pretend: counted and freed as those of the host are, and back where they were."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mooncake_ray
from mooncake_ray.store import devices

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from fake_device import FakeDevices

N = 300_000


@pytest.fixture
def fake(monkeypatch, pool_ray):
    yield FakeDevices().install(monkeypatch)
    from mooncake_ray.objects import session

    devices.forget(session.current().client)


def values(fake):
    return {
        "weights": fake.on(torch.arange(N, dtype=torch.float32), "cuda:1"),
        "bias": fake.on(torch.arange(N, dtype=torch.bfloat16).view(2, -1).t(), "cuda:0"),
        "here": torch.arange(N),
        "array": np.arange(N),
        "text": "…",
    }


def check(out, value):
    assert torch.equal(out["weights"], value["weights"]) and torch.equal(out["bias"], value["bias"])
    assert out["bias"].stride() == value["bias"].stride()
    assert torch.equal(out["here"], value["here"]) and np.array_equal(out["array"], value["array"]) and out["text"] == value["text"]


def test_they_go_through_the_pool_and_back(pool_ray, pool, fake):
    value, before = values(fake), mooncake_ray.stats()
    ref = pool_ray.put(value)
    pool.settles_at(1)
    out = pool_ray.get(ref)
    assert fake.pending == []
    check(out, value)
    assert [fake.location(out[name]) for name in ("weights", "bias", "here")] == ["cuda:1", "cuda:0", ""]
    after = mooncake_ray.stats()
    assert after["bytes_from_devices"] - before["bytes_from_devices"] == N * 6 == after["bytes_to_devices"] - before["bytes_to_devices"]
    assert after["fallbacks"] == before["fallbacks"]


def test_where_they_go_can_be_said(pool_ray, pool, fake):
    value = values(fake)
    refs = [pool_ray.put(value), pool_ray.put(value["here"])]
    for device, expected in (("cpu", ""), ("cuda:1", "cuda:1")):
        out, alone = mooncake_ray.get(refs, device=device)
        assert fake.pending == []
        check(out, value)
        assert {fake.location(t) for t in (out["weights"], out["bias"], out["here"], alone)} == {expected}
    with pytest.raises(ValueError, match="gpu"):
        mooncake_ray.get(refs, device="gpu")


def test_out_of_band_buffers_stay_out_of_band(pool_ray, pool, fake):
    """What the pool does not take, Ray does, beside it."""
    small = np.arange(10, dtype=np.int16)
    value = [fake.on(torch.arange(N), "cuda:0"), bytearray(b"x" * 500_000), small]
    out = pool_ray.get(pool_ray.put(value))
    assert torch.equal(out[0], value[0]) and out[1] == value[1] and np.array_equal(out[2], small)


def test_a_process_without_the_device_gets_the_error_of_plain_ray(pool_ray, pool, fake):
    if torch.cuda.is_available():
        pytest.skip("there is a device")

    @pool_ray.remote
    def there(refs, device=None):
        try:
            return mooncake_ray.get(refs[0], device=device).sum().item()
        except pool_ray.exceptions.RayError as e:
            return f"{type(e).__name__}: {e}"
        finally:
            gc.collect()

    value = fake.on(torch.ones(N), "cuda:0")
    ref = pool_ray.put(value)
    error = pool_ray.get(there.remote([ref]))
    assert error.startswith("RaySystemError: ") and "torch.cuda.is_available() is False" in error
    assert pool_ray.get(there.remote([ref], "cpu")) == N
