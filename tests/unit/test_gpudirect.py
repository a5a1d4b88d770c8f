"""Device memory for network cards: what is computed, and what is said to the two libraries."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_ray.errors import RegistrationError
from mooncake_ray.store import gpudirect

PAGE = 4096


@given(st.integers(0, 1 << 48), st.integers(1, 1 << 40))
def test_span(address, nbytes):
    start, length = gpudirect.span(address, nbytes, PAGE)
    assert start % PAGE == 0 and length % PAGE == 0
    assert start <= address and address + nbytes <= start + length
    assert length - nbytes < 2 * PAGE and address - start < PAGE


class Cuda:
    """As far as it is used, and rails that say what they are told."""

    def __init__(self, monkeypatch, *, attribute=1, init=0, export=0, refuse=0, peer_memory=False):
        self.said = []
        self.refuse = refuse

        def attribute_of(value, which, device):
            self.said.append(("attribute", which))
            value._obj.value = attribute
            return 0

        def get_handle(fd, address, nbytes, kind, flags):
            self.said.append(("export", address.value, nbytes.value, kind.value, flags.value))
            fd._obj.value = self.fd = os.open("/dev/null", os.O_RDONLY)
            return export

        cuda = SimpleNamespace(
            cuInit=lambda flags: init,
            cuDeviceGet=lambda out, device: 0,
            cuDeviceGetAttribute=attribute_of,
            cuMemGetHandleForAddressRange=get_handle,
        )
        monkeypatch.setattr(gpudirect, "_cuda", lambda: cuda)
        monkeypatch.setattr(gpudirect, "_PEER_MEMORY", Path("/" if peer_memory else "/nothing/nvidia_peermem"))

    def register(self, *args):
        self.said.append(("register", *args))
        return [9]

    def register_dmabuf(self, fd, *args):
        os.fstat(fd)
        self.said.append(("register_dmabuf", *args))
        if self.refuse:
            raise RegistrationError("not supported", "ibv_reg_dmabuf_mr", self.refuse)
        return [9]


def is_closed(fd):
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    return True


def test_as_a_dma_buf_by_its_own_address(monkeypatch):
    cuda = Cuda(monkeypatch, peer_memory=True)
    assert gpudirect.register(cuda, 0, 0x7F0000001010, 5000, [0]) == [9]
    assert cuda.said[1:] == [
        ("export", 0x7F0000001000, 2 * PAGE, 1, 0),
        ("register_dmabuf", 0x10, 0x7F0000001010, 5000, [0]),
    ]
    assert is_closed(cuda.fd)


def test_refused_by_the_card(monkeypatch):
    cuda = Cuda(monkeypatch, refuse=errno.EOPNOTSUPP)
    with pytest.raises(RegistrationError, match="not supported"):
        gpudirect.register(cuda, 0, 0x1000, 10)
    assert is_closed(cuda.fd)


def test_refused_by_cuda(monkeypatch):
    cuda = Cuda(monkeypatch, export=801)
    with pytest.raises(RegistrationError, match="CUDA error 801") as e:
        gpudirect.register(cuda, 0, 0x1000, 10)
    assert e.value.op == "cuMemGetHandleForAddressRange"
    os.close(cuda.fd)


def test_by_the_drivers_module(monkeypatch):
    cuda = Cuda(monkeypatch, attribute=0, peer_memory=True)
    assert gpudirect.register(cuda, 3, 0x7F0000001010, 5000, [1]) == [9]
    assert cuda.said[1:] == [("register", 0x7F0000001010, 5000, [1])]


def test_by_no_way(monkeypatch):
    cuda = Cuda(monkeypatch, attribute=0)
    with pytest.raises(RegistrationError, match=r"5000 bytes of CUDA device 3 .*no dma-buf.*nvidia_peermem is not loaded") as e:
        gpudirect.register(cuda, 3, 0x7F0000001010, 5000)
    assert e.value.errno == errno.EOPNOTSUPP


@pytest.mark.parametrize(
    ("state", "why"), [({}, ""), ({"attribute": 0}, "exports no dma-buf"), ({"init": 100}, "cuInit for device 0: CUDA error 100")]
)
def test_unsupported(monkeypatch, state, why):
    cuda = Cuda(monkeypatch, **state)
    assert why in gpudirect.unsupported() and bool(why) == bool(gpudirect.unsupported())
    assert cuda.said[:1] in ([("attribute", 124)], [])


def test_without_a_driver(monkeypatch):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(gpudirect, "_cuda", missing)
    assert gpudirect.unsupported() == "no CUDA driver: libcuda.so.1: cannot open shared object file"
