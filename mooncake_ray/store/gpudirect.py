"""GPU memory that a network card reads and writes by itself: exported by CUDA as a dma-buf, registered with the RDMA ports.

CUDA is loaded when it is first needed; `unsupported` says what is missing.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooncake_ray.errors import RegistrationError

__all__ = ["export", "register", "span", "unsupported"]

_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_…
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_…
_PEER_MEMORY = Path("/sys/module/nvidia_peermem")


@functools.cache
def _cuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def unsupported(device: int = 0) -> str:
    """Why memory of that CUDA device cannot be exported; "" if it can be, as far as the driver says. Creates no CUDA context."""
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


def register(rails: Any, device: int, address: int, nbytes: int, near: Sequence[int] | None = None) -> list[int]:
    """Registers memory of a CUDA device with all of a process's RDMA ports: as a dma-buf, or else, where the driver's own module for that is
    loaded, by its address. The memory must stay allocated as long as it is registered.

    Args:
        rails: A `_native.verbs.Rails`.
        near: As `Rails.register` takes it; as is what it returns.

    Raises:
        RegistrationError: neither way is there (EOPNOTSUPP), or CUDA or a port refuses.
    """
    why = unsupported(device)
    if why and _PEER_MEMORY.exists():
        return rails.register(address, nbytes, near)
    if why:
        text = f"{nbytes} bytes of CUDA device {device} cannot be registered: {why}; and {_PEER_MEMORY.name} is not loaded"
        raise RegistrationError(text, "register", errno.EOPNOTSUPP)
    start, length = span(address, nbytes)
    fd = export(start, length)
    try:
        return rails.register_dmabuf(fd, address - start, address, nbytes, near)
    finally:
        os.close(fd)  # the registration has its own
