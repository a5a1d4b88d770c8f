"""GPU memory that a network card reads and writes by itself: exported by CUDA as a dma-buf, registered with a verbs device.

Both libraries are loaded when they are first needed; `unsupported` says what is missing.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from dataclasses import dataclass
from typing import Any

from mooncake_ray.errors import RegistrationError

__all__ = ["Registered", "export", "register", "span", "unsupported"]

_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_…
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_…
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = 1, 2, 4  # IBV_ACCESS_…


@functools.cache
def _cuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _verbs() -> Any:
    lib = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    lib.ibv_reg_dmabuf_mr.restype = ctypes.POINTER(_Mr)
    lib.ibv_reg_dmabuf_mr.argtypes = [
        ctypes.c_void_p,  # struct ibv_pd *
        *(ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64),  # offset, length, iova
        *(ctypes.c_int, ctypes.c_int),  # fd, access
    ]
    lib.ibv_dereg_mr.argtypes = [ctypes.POINTER(_Mr)]
    return lib


class _Mr(ctypes.Structure):
    """struct ibv_mr"""

    _fields_ = [
        ("context", ctypes.c_void_p),
        ("pd", ctypes.c_void_p),
        ("addr", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("handle", ctypes.c_uint32),
        ("lkey", ctypes.c_uint32),
        ("rkey", ctypes.c_uint32),
    ]


def unsupported(device: int = 0) -> str:
    """Why memory of that CUDA device cannot be registered; "" if it can be, as far as the libraries say. Creates no CUDA context."""
    try:
        cuda = _cuda()
    except OSError as e:
        return f"no CUDA driver: {e}"
    number, value = ctypes.c_int(), ctypes.c_int()
    for name, code in (
        ("cuInit", cuda.cuInit(0)),
        ("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(number), device)),
        ("cuDeviceGetAttribute", cuda.cuDeviceGetAttribute(ctypes.byref(value), _DMA_BUF_SUPPORTED, number)),
    ):
        if code:
            return f"{name} for device {device}: CUDA error {code}"
    if not value.value:
        return f"device {device} exports no dma-buf (it needs the open kernel modules, and Linux 5.12)"
    try:
        _verbs()
    except OSError as e:
        return f"no libibverbs: {e}"
    except AttributeError:
        return "libibverbs has no ibv_reg_dmabuf_mr (it came with rdma-core 34)"
    return ""


def span(address: int, nbytes: int, page: int = mmap.PAGESIZE) -> tuple[int, int]:
    """`(address, nbytes)` of the whole pages around some bytes: what can be exported."""
    start = address // page * page
    return start, -(-(address + nbytes) // page) * page - start


def export(address: int, nbytes: int) -> int:
    """A new descriptor of a dma-buf of device memory, whole pages (see `span`). The caller closes it; the memory must live as long as it does.

    The thread must have the device's context (as after any use of PyTorch on it).

    Raises:
        RegistrationError: CUDA refuses.
    """
    fd = ctypes.c_int(-1)
    code = _cuda().cuMemGetHandleForAddressRange(
        ctypes.byref(fd), ctypes.c_uint64(address), ctypes.c_size_t(nbytes), ctypes.c_int(_DMA_BUF_FD), ctypes.c_ulonglong(0)
    )
    if code:
        raise RegistrationError(f"CUDA error {code} for {nbytes} bytes at {address:#x}", "cuMemGetHandleForAddressRange", code)
    return fd.value


@dataclass
class Registered:
    """Device memory that a verbs device knows. `close` it before the memory is freed."""

    lkey: int
    rkey: int
    _mr: Any

    def close(self) -> None:
        """Idempotent."""
        mr, self._mr = self._mr, None
        if mr is not None and (code := _verbs().ibv_dereg_mr(mr)):
            raise RegistrationError(f"{os.strerror(code)}", "ibv_dereg_mr", code)


def register(pd: int, address: int, nbytes: int, access: int = LOCAL_WRITE | REMOTE_READ) -> Registered:
    """Registers device memory. Work requests name it by its own address.

    Args:
        pd: Address of a `struct ibv_pd`.

    Raises:
        RegistrationError: CUDA or the verbs device refuses.
    """
    start, length = span(address, nbytes)
    fd = export(start, length)
    try:
        mr = _verbs().ibv_reg_dmabuf_mr(pd, address - start, nbytes, address, fd, access)
    finally:
        os.close(fd)  # the registration has its own
    if not mr:
        code = ctypes.get_errno() or errno.EOPNOTSUPP
        raise RegistrationError(f"{os.strerror(code)} for {nbytes} bytes of device memory", "ibv_reg_dmabuf_mr", code)
    return Registered(mr.contents.lkey, mr.contents.rkey, mr)
