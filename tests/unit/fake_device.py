"""Devices that are the host's memory, and do what they are told as late and in as odd an order as a device may."""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace

import numpy as np
import torch

from mooncake_ray.errors import RegistrationError
from mooncake_ray.store import devices


class FakeDevices:
    """A `devices.Backend` with `count` devices. A CPU tensor is on device n if `on` said so.

    A copy happens when somebody waits for its end, and reads its source only then. Copies that touch memory which is not registered happen at
    once. Each copy must lie in one registration, or in none.
    """

    def __init__(self, count: int = 2, *, refuse: bool = False, seed: int = 0, hang: bool = False) -> None:
        self.count, self.refuse, self.hang = count, refuse, hang
        self.registered: dict[int, int] = {}
        self.log: list[tuple] = []
        self.pending: list[tuple] = []
        self.places: dict[int, str] = {}  # address → device
        self._random = random.Random(seed)

    def install(self, monkeypatch) -> FakeDevices:
        monkeypatch.setattr(devices, "backend", lambda: self)
        monkeypatch.setattr(devices, "location", self.location)
        devices._warn_of_refusal.cache_clear()
        return self

    def on(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        self.places[tensor.untyped_storage().data_ptr()] = device
        return tensor

    def location(self, tensor) -> str:
        return self.places.get(tensor.untyped_storage().data_ptr(), "")

    def raw(self, tensor):
        return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)

    def empty(self, device: str, nbytes: int):
        kind, _, number = device.partition(":")
        if kind != "cuda" or int(number or 0) >= self.count:
            raise RuntimeError(f"no {device}")
        return self.on(torch.full((nbytes,), 0xEE, dtype=torch.uint8), device)

    def begin(self, device: str, to_device: bool):
        self.log.append(("begin", device, to_device))
        return device, to_device

    def copy(self, queue, array, host: np.ndarray, to_device: bool) -> None:
        assert isinstance(host, np.ndarray) and host.dtype == np.uint8 and len(host) == len(array)
        start, end = host.ctypes.data, host.ctypes.data + len(host)
        touched = [(a, a + n) for a, n in self.registered.items() if a < end and start < a + n]
        assert not touched or (len(touched) == 1 and touched[0][0] <= start and end <= touched[0][1]), "a copy crosses a registration"
        there = array.numpy()
        self.pending.append((queue, *((there, host) if to_device else (host, there))))
        self.log.append(("copy", *queue, len(host), bool(touched)))
        if not touched:
            self._run(queue)

    def follow(self, device: str) -> None:
        self.log.append(("follow", device))

    def mark(self, queue):
        return SimpleNamespace(queue=queue, asked=0)

    def done(self, mark) -> bool:
        mark.asked += 1
        if self.hang or mark.asked <= self._random.randrange(4):
            return False
        self._run(mark.queue)
        return True

    def _run(self, queue) -> None:
        mine = [job for job in self.pending if job[0] == queue]
        self.pending = [job for job in self.pending if job[0] != queue]
        self._random.shuffle(mine)
        for _, target, source in mine:
            ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)

    def register(self, address: int, nbytes: int) -> None:
        if self.refuse:
            raise RegistrationError("no more locked memory", "cudaHostRegister", 2)
        assert all(a + n <= address or address + nbytes <= a for a, n in self.registered.items()), "registered twice"
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        assert not self.pending, "copies are under way"
        del self.registered[address]
