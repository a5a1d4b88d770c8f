"""CuPy's arrays, packed as tensors on devices are, by way of PyTorch: they share memory with a tensor, and no copy is made between the two.

As with CuPy's own pickling, an array comes back to whatever device is CuPy's current one.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from mooncake_ray.store import devices

__all__ = ["reduce_array", "unpack_array"]


def reduce_array(packer: Any, array: Any) -> Any:
    """A reduction of a `cupy.ndarray`, or NotImplemented: for a small one, a subclass, and in a process without PyTorch."""
    cupy, torch = sys.modules["cupy"], sys.modules.get("torch")
    if torch is None or type(array) is not cupy.ndarray or array.nbytes < packer.smallest:
        return NotImplemented
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = array.copy("C")
    order = "C" if array.flags.c_contiguous else "F"
    raw = array.reshape(-1, order=order).view(np.uint8)
    cupy.cuda.get_current_stream().synchronize()  # PyTorch's need not be the same
    tensor = torch.as_tensor(raw, device=f"cuda:{array.device.id}")
    return unpack_array, (*packer.fetch(f"cuda:{array.device.id}", tensor), array.nbytes, array.dtype, array.shape, order)


def unpack_array(region: Any, offset: int, nbytes: int, dtype: np.dtype, shape: tuple[int, ...], order: str) -> Any:
    """A copy on CuPy's current device. Raises what CuPy raises where there is none."""
    import cupy

    raw = devices.upload(region, offset, nbytes, f"cuda:{cupy.cuda.Device().id}")
    return cupy.from_dlpack(raw).view(dtype).reshape(shape, order=order)
