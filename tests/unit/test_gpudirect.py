"""Device memory for network cards: what is computed, and what is said to the two libraries."""

from __future__ import annotations

import ctypes
import errno
import os
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


class Libraries:
    """Both, as far as they are used."""

    def __init__(self, monkeypatch, *, attribute=1, init=0, export=0, refuse=0):
        self.said = []
        self.mr = gpudirect._Mr(lkey=7, rkey=9)

        def attribute_of(value, which, device):
            self.said.append(("attribute", which))
            value._obj.value = attribute
            return 0

        def get_handle(fd, address, nbytes, kind, flags):
            self.said.append(("export", address.value, nbytes.value, kind.value, flags.value))
            fd._obj.value = self.fd = os.open("/dev/null", os.O_RDONLY)
            return export

        def reg(pd, offset, length, iova, fd, access):
            os.fstat(fd)
            self.said.append(("register", pd, offset, length, iova, access))
            ctypes.set_errno(refuse)
            return None if refuse else ctypes.pointer(self.mr)

        cuda = SimpleNamespace(
            cuInit=lambda flags: init,
            cuDeviceGet=lambda out, device: 0,
            cuDeviceGetAttribute=attribute_of,
            cuMemGetHandleForAddressRange=get_handle,
        )
        verbs = SimpleNamespace(ibv_reg_dmabuf_mr=reg, ibv_dereg_mr=lambda mr: self.said.append(("forget", mr.contents.rkey)))
        monkeypatch.setattr(gpudirect, "_cuda", lambda: cuda)
        monkeypatch.setattr(gpudirect, "_verbs", lambda: verbs)


def test_registered_by_its_own_address(monkeypatch):
    libraries = Libraries(monkeypatch)
    registered = gpudirect.register(0xABC, 0x7F0000001010, 5000)
    assert libraries.said == [("export", 0x7F0000001000, 2 * PAGE, 1, 0), ("register", 0xABC, 0x10, 5000, 0x7F0000001010, 5)]
    assert (registered.lkey, registered.rkey) == (7, 9)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(libraries.fd)
    registered.close()
    registered.close()
    assert libraries.said[2:] == [("forget", 9)]


def test_refused_by_the_card(monkeypatch):
    libraries = Libraries(monkeypatch, refuse=errno.EOPNOTSUPP)
    with pytest.raises(RegistrationError, match="not supported") as e:
        gpudirect.register(0xABC, 0x1000, 10)
    assert (e.value.op, e.value.errno) == ("ibv_reg_dmabuf_mr", errno.EOPNOTSUPP)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(libraries.fd)


def test_refused_by_cuda(monkeypatch):
    libraries = Libraries(monkeypatch, export=801)
    with pytest.raises(RegistrationError, match="CUDA error 801") as e:
        gpudirect.register(0xABC, 0x1000, 10)
    assert e.value.op == "cuMemGetHandleForAddressRange"
    os.close(libraries.fd)


@pytest.mark.parametrize(
    ("state", "why"), [({}, ""), ({"attribute": 0}, "exports no dma-buf"), ({"init": 100}, "cuInit for device 0: CUDA error 100")]
)
def test_unsupported(monkeypatch, state, why):
    libraries = Libraries(monkeypatch, **state)
    assert why in gpudirect.unsupported() and bool(why) == bool(gpudirect.unsupported())
    assert libraries.said[:1] in ([("attribute", 124)], [])


def test_without_a_driver(monkeypatch):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(gpudirect, "_cuda", missing)
    assert gpudirect.unsupported() == "no CUDA driver: libcuda.so.1: cannot open shared object file"
