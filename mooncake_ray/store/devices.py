"""Tensors on devices: copied from there straight into the pool, and back.

What is here knows how copies are cut, queued and waited for; a `Backend` (see `cuda`) makes them. The host's side of a copy is the pool's own
memory, which is registered with the device piece by piece as it is first used, so that the device reads and writes it by itself (pinned).
Nothing a process needs here is loaded, and no memory registered, before the first tensor of a device is seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mooncake_ray.counters import count
from mooncake_ray.errors import GetTimeoutError, RegistrationError

__all__ = [
    "AS_PUT",
    "Backend",
    "Registrations",
    "backend",
    "download",
    "forget",
    "loading",
    "location",
    "registrations",
    "upload",
    "wanted",
]

logger = logging.getLogger("mooncake_ray")

AS_PUT = "as-put"
REGISTERED_BYTES = 256 << 20  # registered at a time: it populates the memory, some 0.1 s a GiB
TRANSFER_S = 600.0  # only turns a device that hangs into an error


class Backend(Protocol):
    """What a kind of device can do. Arrays on devices are flat and contiguous, of bytes; slices of them are views."""

    def raw(self, tensor: Any) -> Any:
        """The bytes of a dense tensor on a device, in the order of memory."""

    def empty(self, device: str, nbytes: int) -> Any:
        """New bytes on a device. Raises what unpickling a tensor of that device would, where there is no such device."""

    def begin(self, device: str, to_device: bool) -> Any:
        """A queue for copies. They come after what the device has been given to do by this thread so far."""

    def copy(self, queue: Any, array: Any, host: np.ndarray, to_device: bool) -> None:
        """Queues one copy. Does not wait for it where the host's memory is registered."""

    def follow(self, device: str) -> None:
        """What this thread gives the device to do from now on comes after the copies to it that are queued."""

    def mark(self, queue: Any) -> Any:
        """Something to wait for: the end of what is queued."""

    def done(self, mark: Any) -> bool:
        """Raises if the device has failed."""

    def register(self, address: int, nbytes: int) -> None:
        """Raises RegistrationError."""

    def unregister(self, address: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a pool, as a client of it sees them."""

    client: Any
    arena: int
    offset: int


class Registrations:
    """Which parts of one client's memory are registered with the devices. Thread-safe. Keeps the client alive until `release`."""

    def __init__(self, client: Any, backend: Backend, unit: int = REGISTERED_BYTES) -> None:
        self._client, self._backend, self._unit = client, backend, unit
        self._lock = threading.Lock()
        self._arenas: dict[int, np.ndarray] = {}
        self._registered: dict[tuple[int, int], np.ndarray] = {}
        self._refused = self._released = False
        self._uses = 0

    def pieces(self, arena: int, offset: int, nbytes: int) -> list[np.ndarray]:
        """The memory as bytes, registered if it can be, and cut where registrations end: no copy may cross such an end.

        Stays registered until `done`, which is to be called once for each call of this."""
        with self._lock:
            self._uses += 1
            if arena not in self._arenas:
                self._arenas |= {
                    index: at_address(rw, size) for index, rw, _, size, _ in self._client.arenas() if index not in self._arenas
                }
            memory = self._arenas[arena]
            spans = list(cut(offset, nbytes, self._unit))
            for start, _ in spans:
                self._register(arena, start // self._unit)
        return [memory[start : start + n] for start, n in spans]

    def done(self) -> None:
        """The copies to or from some pieces are over."""
        with self._lock:
            self._uses -= 1
            self._unregister()

    def release(self) -> None:
        """Gives the registrations up, once no copy is under way."""
        with self._lock:
            self._released = True
            self._unregister()

    def _unregister(self) -> None:
        if self._released and not self._uses:
            for memory in self._registered.values():
                self._backend.unregister(memory.ctypes.data)
            self._registered.clear()
            self._arenas.clear()

    @property
    def nbytes(self) -> int:
        """What is registered."""
        with self._lock:
            return sum(memory.nbytes for memory in self._registered.values())

    def _register(self, arena: int, unit: int) -> None:
        if self._refused or self._released or (arena, unit) in self._registered:
            return
        memory = self._arenas[arena][unit * self._unit : (unit + 1) * self._unit]
        try:
            self._backend.register(memory.ctypes.data, memory.nbytes)
        except RegistrationError as e:
            self._refused = True
            _warn_of_refusal(str(e))
        else:
            self._registered[arena, unit] = memory


def at_address(address: int, nbytes: int) -> np.ndarray:
    """Memory of this process as writable bytes. Keeps nothing alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def cut(offset: int, nbytes: int, unit: int) -> Iterator[tuple[int, int]]:
    """`(offset, nbytes)` of the parts of a span that lie in one unit each."""
    end = offset + nbytes
    while offset < end:
        n = min(end, (offset // unit + 1) * unit) - offset
        yield offset, n
        offset += n


@functools.cache
def _warn_of_refusal(why: str) -> None:
    logger.warning("mooncake_ray: the pool's memory is not registered with the device, so copies are slower: %s", why)


_lock = threading.Lock()
_registrations: dict[int, Registrations] = {}  # by the id of the client, which they keep
os.register_at_fork(after_in_child=_registrations.clear)  # a child has neither the device nor the maps


def location(tensor: Any) -> str:
    """Which device a tensor is on, if copies from there can be made ("cuda:0"); "" for the host, and for others."""
    device = tensor.device
    return f"cuda:{device.index}" if device.type == "cuda" else ""


@functools.cache
def backend() -> Backend:
    """The one there is."""
    return importlib.import_module("mooncake_ray.store.cuda").Cuda()


def registrations(client: Any) -> Registrations:
    """Those of a client; the same until `forget`."""
    with _lock:
        if id(client) not in _registrations:
            _registrations[id(client)] = Registrations(client, backend())
        return _registrations[id(client)]


def forget(client: Any) -> None:
    """To be called before a client is closed or left for another, as its memory is unmapped then. Cheap where there is nothing to forget."""
    with _lock:
        known = _registrations.pop(id(client), None)
    if known is not None:
        known.release()


# ---- copies under way


class Transfers:
    """Copies of one thread, all in one direction. What they read and write is kept until `finish`; for ever, should a device not finish them."""

    def __init__(self, *, to_device: bool) -> None:
        self._to_device = to_device
        self._queues: dict[str, Any] = {}
        self._kept: list[tuple[Any, Any]] = []
        self._used: list[Registrations] = []

    def add(self, device: str, array: Any, host: Any, place: Place | None) -> None:
        """Queues the copy of an array on a device, after what this thread has given that device to do. Nothing waits; devices work side by side.

        Args:
            host: Keeps the host's memory. An array of it, unless there is a `place`.
            place: Where that memory is in a pool.
        """
        here = backend()
        queue = self._queues[device] = here.begin(device, self._to_device)
        self._kept.append((array, host))
        if place is None:
            pieces = [at_address(host.ctypes.data, host.nbytes)]
        else:
            known = registrations(place.client)
            pieces = known.pieces(place.arena, place.offset, len(array))
            self._used.append(known)
        at = 0
        for piece in pieces:
            here.copy(queue, array[at : at + len(piece)], piece, self._to_device)
            at += len(piece)
        count("bytes_to_devices" if self._to_device else "bytes_from_devices", at)

    def finish(self, timeout_s: float = TRANSFER_S) -> None:
        """Waits for all of them.

        Raises:
            GetTimeoutError: A device hangs. Its copies may still come to be, so their memory is never used for anything else.
        """
        queues, kept, used = self._queues, self._kept, self._used
        self._queues, self._kept, self._used = {}, [], []
        end = time.monotonic() + timeout_s
        try:
            marks = [(device, backend().mark(queue)) for device, queue in queues.items()]
            for device, mark in marks:
                pause = 0.0  # first only lets others run
                while not backend().done(mark):
                    if time.monotonic() > end:
                        raise GetTimeoutError(f"copies {'to' if self._to_device else 'from'} {device} are not over after {timeout_s} s")
                    time.sleep(pause)
                    pause = min(pause + 1e-6, 1e-4)
        except BaseException:
            _stuck.append(kept)
            raise
        for known in used:
            known.done()
        del kept  # not before


_stuck: list[Any] = []  # memory that a device may still read or write


# ---- into the pool


@contextlib.contextmanager
def download(client: Any, lease: Any, parts: Iterable[tuple[int, str, Any]]) -> Iterator[None]:
    """Copies bytes from devices into a lease, while the block runs; they are all there when it is over.

    Args:
        parts: `(offset in the lease, device, array)`.
    """
    transfers = Transfers(to_device=False)
    try:
        for offset, device, array in parts:
            transfers.add(device, array, memoryview(lease), Place(client, lease.arena, lease.offset + offset))
        yield
    finally:
        transfers.finish()


# ---- out of the pool


class _State(threading.local):
    transfers: Transfers | None = None  # of the outermost `loading`
    device: str = ""
    default: str = AS_PUT


_state = _State()


def wanted(put_from: str = "cpu") -> str:
    """Where a tensor goes that this thread unpickles: a device, or "cpu"."""
    there = _state.device or (AS_PUT if put_from == "cpu" else _state.default)
    return put_from if there == AS_PUT else there


@contextlib.contextmanager
def loading(device: str | None = None, default: str = AS_PUT) -> Iterator[None]:
    """Says where tensors go that this thread unpickles meanwhile. The outermost such block waits for all of them at its end.

    Args:
        device: For all of them: "cpu", "cuda" (the current one), "cuda:1", …, or AS_PUT. None: what the block around this one says.
        default: For those that were put from devices, if nobody has said it for all.
    """
    outer = _state.device, _state.default, _state.transfers
    mine = Transfers(to_device=True) if outer[2] is None else None
    _state.device, _state.default, _state.transfers = device or outer[0], default, outer[2] or mine
    try:
        yield
    finally:
        _state.device, _state.default, _state.transfers = outer
        if mine is not None:
            mine.finish()


def upload(region: Any, offset: int, nbytes: int, device: str) -> Any:
    """Bytes of a pool object as an array on a device. What this thread gives the device to do from now on sees them.

    The host's memory is kept until the copy is over: to the end of the `loading` block around this, or of this call.

    Raises:
        RuntimeError: There is no such device. As unpickling a tensor from there.
    """
    array = backend().empty(device, nbytes)
    view = region.shared()
    memory = np.frombuffer(view, np.uint8, nbytes, offset)
    around = _state.transfers
    transfers = around if around is not None else Transfers(to_device=True)
    try:
        transfers.add(device, array, memory, _place(region.client, view, memory))
        backend().follow(device)
    finally:
        if around is None:
            transfers.finish()
    return array


def _place(client: Any, view: Any, memory: np.ndarray) -> Place | None:
    """Where bytes of a pinned object are in the pool; None where they are this process's own."""
    pin = view.obj if isinstance(view, memoryview) else view
    if (place := getattr(pin, "place", None)) is None:
        return None
    arena, start = place
    return Place(client, arena, start + memory.ctypes.data - pin.address)
