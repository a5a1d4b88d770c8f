"""Copies to and from CUDA devices, by PyTorch. Imported where the first tensor of such a device is seen."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import numpy as np

from mooncake_ray.errors import RegistrationError

__all__ = ["Cuda"]

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of this process


class Cuda:
    """A `devices.Backend`. A stream for each device and direction, so copies go both ways at a time, and beside what is computed."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, bool], Any] = {}
        self._device = functools.cache(self._find)

    def raw(self, tensor: Any) -> Any:
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # from its own first element on
        return flat.view(self._torch.uint8)

    def empty(self, device: str, nbytes: int) -> Any:
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._device(device))

    def _find(self, device: str) -> Any:
        # PyTorch says which device that is here, or raises what it always raises where there is none.
        torch = self._torch
        if device == "cuda":
            device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cuda:0"
        return torch.serialization.default_restore_location(torch.UntypedStorage(0), device).device

    def begin(self, device: str, to_device: bool) -> Any:
        stream = self._stream(device, to_device)
        stream.wait_stream(self._torch.cuda.current_stream(stream.device))
        return stream

    def _stream(self, device: str, to_device: bool) -> Any:
        with self._lock:
            if (device, to_device) not in self._streams:
                self._streams[device, to_device] = self._torch.cuda.Stream(self._device(device))
            return self._streams[device, to_device]

    def copy(self, queue: Any, array: Any, host: np.ndarray, to_device: bool) -> None:
        torch = self._torch
        there = torch.from_numpy(host)
        with torch.cuda.stream(queue), torch.no_grad():
            if to_device:
                array.copy_(there, non_blocking=True)
            else:
                there.copy_(array, non_blocking=True)

    def follow(self, device: str) -> None:
        stream = self._stream(device, True)
        self._torch.cuda.current_stream(stream.device).wait_stream(stream)

    def mark(self, queue: Any) -> Any:
        return queue.record_event()

    def done(self, mark: Any) -> bool:
        return mark.query()

    def register(self, address: int, nbytes: int) -> None:
        code = int(self._torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if code:
            _forget_last_error()
            raise RegistrationError(f"CUDA error {code} for {nbytes} bytes (see `ulimit -l`)", "cudaHostRegister", code)

    def unregister(self, address: int) -> None:
        if int(self._torch.cuda.cudart().cudaHostUnregister(address)):
            _forget_last_error()


def _forget_last_error() -> None:
    """Or PyTorch would find it at the next kernel that it launches, and say that the kernel failed."""
    loaded = ctypes.CDLL(None)  # PyTorch loads the runtime for all to see
    if hasattr(loaded, "cudaGetLastError"):
        loaded.cudaGetLastError()
