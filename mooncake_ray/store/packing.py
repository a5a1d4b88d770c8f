"""How tensors and arrays leave a pickle for the pool, and come back as views of it.

A `Packer` is asked for every object that is pickled. For a dense tensor or a NumPy array it notes the memory as a segment of the pool
object to be, and answers with a reduction that names the segment: what goes through the pickle is some hundred bytes. Everything else,
and whatever cannot be expressed as plain strided memory (sparse, quantised, object dtype, …), is pickled as usual. Tensors on CUDA devices are
copied from there straight into the pool object, and back (see `devices`).

Torch is looked up, never imported: a process that has no torch has no tensors.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mooncake_ray.store import devices, frameworks

__all__ = ["Call", "Packer", "Region", "Segments", "aligned", "scan", "unpack_array", "unpack_device_tensor", "unpack_tensor"]

_ALIGN = 64  # bytes: a cache line, and enough for every dtype
_PAGE = 4096  # bytes: large segments start on a page
_PAGE_FROM = 1 << 20
_SMALL = 1 << 10  # bytes: below, a segment costs more than pickling the value
_SEAL_S = 60.0  # a descriptor may be here before the seal of what it names; only the death of its maker can come between
_SCAN_NODES = 512  # containers and leaves that `scan` looks at


def aligned(at: int, nbytes: int) -> int:
    """Where so many bytes may begin, from `at` on."""
    align = _PAGE if nbytes >= _PAGE_FROM else _ALIGN
    return -(-at // align) * align


@dataclass
class Segments:
    """Memory that is going to be one pool object. Offsets are given out as segments are added; the copy comes last."""

    nbytes: int = 0
    held: int = 0
    """Bytes without the gaps between segments."""
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    """`(offset, address, nbytes)`, as `Lease.copy` takes them."""
    owners: list[Any] = field(default_factory=list)
    written: list[tuple[int, int, Callable[[np.ndarray], None]]] = field(default_factory=list)
    """`(offset, nbytes, write)` of what is made in its place: `write` gets those bytes, once the parts are copied."""
    downloads: list[tuple[int, str, Any]] = field(default_factory=list)
    """`(offset, device, array of bytes)`, as `devices.download` takes them."""

    def add(self, address: int, nbytes: int, owner: Any) -> int:
        """Notes `nbytes` bytes at `address`, which `owner` keeps alive. Returns their offset in the object."""
        offset = aligned(self.nbytes, nbytes)
        self.parts.append((offset, address, nbytes))
        self.owners.append(owner)
        self.nbytes = offset + nbytes
        self.held += nbytes
        return offset

    def add_made(self, nbytes: int, copies: Iterable[tuple[int, int, int]], write: Callable[[np.ndarray], None]) -> int:
        """Notes `nbytes` bytes, partly copied (`copies`, with offsets in them), partly written in place. Returns their offset, a page."""
        offset = -(-self.nbytes // _PAGE) * _PAGE
        self.parts += [(offset + at, address, n) for at, address, n in copies]
        self.written.append((offset, nbytes, write))
        self.nbytes = offset + nbytes
        self.held += nbytes
        return offset

    def add_download(self, device: str, array: Any) -> int:
        """Notes the bytes of an array on a device. Returns their offset."""
        offset = aligned(self.nbytes, len(array))
        self.downloads.append((offset, device, array))
        self.nbytes = offset + len(array)
        self.held += len(array)
        return offset

    def fill(self, client: Any, lease: Any, start: int = 0) -> None:
        """Writes everything into a lease of that client, `start` bytes from its beginning. Devices and the host copy at the same time."""
        downloads = [(start + offset, device, array) for offset, device, array in self.downloads]
        with devices.download(client, lease, downloads) if downloads else contextlib.nullcontext():
            lease.copy([(start + offset, address, n) for offset, address, n in self.parts] if start else self.parts)
            for offset, nbytes, write in self.written:
                write(np.frombuffer(lease, np.uint8, nbytes, start + offset))


class Region:
    """One pool object as the views on it see it: pinned on first use, shared read-only or private copy-on-write."""

    __slots__ = ("_private", "_shared", "client", "id")

    def __init__(self, client: Any, id: bytes) -> None:
        self.client, self.id = client, id
        self._shared = self._private = None

    def shared(self) -> Any:
        """A Pin for views that are not written: the same memory for every reader on the node, unless there is a private one already."""
        if self._private is not None:
            return self._private
        if self._shared is None:
            self._shared = self._pin(False)
        return self._shared

    def private(self) -> Any:
        """A Pin: writable; what is written stays with this region's views."""
        if self._private is None:
            self._private = self._pin(True)
        return self._private

    def _pin(self, writable: bool) -> Any:
        return self.client.get(self.id, _SEAL_S, writable)

    @property
    def is_here(self) -> bool:
        """Whether the object is in this node's pool, as far as is known without asking."""
        return True

    def read(self, runs: np.ndarray) -> np.ndarray:
        """Some bytes of an object that is not here: uint8 (bytes,), private, one run after the other.

        Args:
            runs: uint64 (n, 2): offset in the object, nbytes.
        """
        raise NotImplementedError


class Here:
    """Stands in a pickle for the pool object that the pickle's own segments go to."""


def unpack_array(region: Region, offset: int, dtype: np.dtype, shape: tuple[int, ...], order: str, writable: bool) -> np.ndarray:
    """A view of a region. Read-only unless `writable`, and then private. Keeps the pinned memory alive."""
    array: np.ndarray = np.ndarray(shape, dtype, region.private() if writable else region.shared(), offset, order=order)  # type: ignore[call-overload]
    if not writable:
        array.flags.writeable = False
    return array


def unpack_tensor(
    region: Region,
    offset: int,
    dtype: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    packed: tuple[int, ...],
    requires_grad: bool,
) -> Any:
    """A private copy-on-write view of a region, as a tensor. Keeps the pinned memory alive. A copy on a device where `devices.loading` says so.

    Args:
        packed: Shape of what is stored, row-major. Differs from `shape` where the tensor was expanded.
        stride: Strides in elements for a dense tensor that is not row-major, else None.
    """
    return unpack_device_tensor(region, offset, "cpu", dtype, shape, stride, packed, requires_grad)


def unpack_device_tensor(
    region: Region,
    offset: int,
    put_from: str,
    dtype: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    packed: tuple[int, ...],
    requires_grad: bool,
) -> Any:
    """As `unpack_tensor`, for one that was put from a device: a copy on the device of that name here, or where `devices.loading` says.

    Raises:
        RuntimeError: There is no such device here. As plain unpickling.
    """
    import torch

    kind = getattr(torch, dtype)
    nbytes = kind.itemsize
    for n in packed:
        nbytes *= n
    if (device := devices.wanted(put_from)) == "cpu":
        tensor = torch.frombuffer(region.private(), dtype=torch.uint8, count=nbytes, offset=offset).view(kind)
    else:
        tensor = devices.upload(region, offset, nbytes, device).view(kind)
    if stride is not None:
        tensor = tensor.as_strided(shape, stride)
    else:
        tensor = tensor.view(packed)
        if packed != shape:
            tensor = tensor.expand(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def scan(value: Any, minimum: int) -> int | None:
    """From which size on its tensors and arrays should be routed: bytes, or None for not at all.

    Looks only at plain containers, and only at so many of their members, so that an object that is not going to be routed pays microseconds.
    """
    torch = sys.modules.get("torch")
    tensor = torch.Tensor if torch else ()
    total, left, opaque, stack = 0, _SCAN_NODES, False, [value]
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind in _SCALARS:
            continue
        left -= 1
        if left < 0:
            opaque = True
            break
        if kind is dict:
            stack.extend(node.values())
        elif kind is list or kind is tuple:
            stack.extend(node if len(node) <= left else node[: left + 1])
        elif isinstance(node, np.ndarray):
            total += node.nbytes
        elif isinstance(node, tensor):
            try:
                total += node.nbytes
            except (RuntimeError, NotImplementedError):  # a layout without a size, such as sparse
                opaque = True
        else:
            opaque = True
        if total >= minimum:
            return _SMALL
    return minimum if opaque else None


_SCALARS = frozenset({int, float, bool, str, bytes, complex, type(None)})


class Packer:
    """Takes tensors and arrays of at least `smallest` bytes out of one pickle. Used by one thread, once."""

    def __init__(self, smallest: int = _SMALL, *, typed: bool = True, checksums: bool = False) -> None:
        """`typed`: batches are stored column by column, without padding; `checksums`: and with checksums."""
        self.smallest, self.typed, self.checksums = smallest, typed, checksums
        self.segments = Segments()
        self.here = Here()
        torch = sys.modules.get("torch")
        self._tensor = torch.Tensor if torch else ()

    def reduce(self, obj: Any) -> Any:
        """A reduction as `pickle` takes it, or NotImplemented for an object that is pickled as usual."""
        if isinstance(obj, np.ndarray):
            return self._reduce_array(obj)
        if isinstance(obj, self._tensor):
            return self._reduce_tensor(obj)
        return frameworks.reduce(self, obj)

    def place(self, address: int, nbytes: int, owner: Any) -> tuple[Any, int]:
        """Where these bytes are going to be: something that unpickles as a Region, and the offset in it."""
        return self.here, self.segments.add(address, nbytes, owner)

    def fetch(self, device: str, array: Any) -> tuple[Any, int]:
        """As `place`, for the bytes of an array on a device."""
        return self.here, self.segments.add_download(device, array)

    def make(self, nbytes: int, copies: Iterable[tuple[int, int, int]], write: Callable[[np.ndarray], None]) -> tuple[Any, int]:
        """As `place`, for bytes that are made where they are going to be (see `Segments.add_made`)."""
        return self.here, self.segments.add_made(nbytes, copies, write)

    def _reduce_array(self, array: np.ndarray) -> Any:
        cls = type(array)
        if array.nbytes < self.smallest or array.dtype.hasobject:
            return NotImplemented
        if cls is not np.ndarray:
            plain = np.ndarray
            if (
                cls.__reduce__ is not plain.__reduce__
                or cls.__reduce_ex__ is not plain.__reduce_ex__
                or cls.__setstate__ is not plain.__setstate__
            ):
                return NotImplemented
        # As pickle protocol 5 does: contiguous memory comes back read-only, anything else as a fresh array of its own.
        contiguous = (array.flags.c_contiguous or array.flags.f_contiguous) and _exports(array)
        base = array if array.flags.c_contiguous or array.flags.f_contiguous else np.ascontiguousarray(array)
        order = "C" if base.flags.c_contiguous else "F"
        where, offset = self.place(base.ctypes.data, base.nbytes, base)
        writable = not contiguous or cls is not np.ndarray
        plain_array = (where, offset, base.dtype, base.shape, order, writable)
        if cls is np.ndarray:
            return unpack_array, plain_array
        return np.ndarray.view, (Call(unpack_array, plain_array), cls)  # without its attributes, which NumPy's own pickling drops too

    def _reduce_tensor(self, tensor: Any) -> Any:
        torch = sys.modules["torch"]
        cls = type(tensor)
        try:
            device = devices.location(tensor) if cls is torch.Tensor else ""
            plain = (
                tensor.layout is torch.strided
                and (device or tensor.device.type == "cpu")
                and tensor.nbytes >= self.smallest
                and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
                and not tensor._backward_hooks
                and not hasattr(tensor, "__tensor_flatten__")
            )
        except (RuntimeError, NotImplementedError):  # a wrapper without storage
            return NotImplemented
        if not plain or cls.__reduce_ex__ is not torch.Tensor.__reduce_ex__:
            return NotImplemented
        state = torch._utils._get_obj_state(tensor)
        unpack, packed = self._pack_tensor(tensor, device)
        if cls is torch.Tensor and not state:
            return unpack, packed
        return torch._tensor._rebuild_from_type_v2, (unpack, cls, packed, state)

    def _pack_tensor(self, tensor: Any, device: str) -> tuple[Any, tuple[Any, ...]]:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        base, keep_stride = tensor.detach(), None
        if not base.is_contiguous():
            for dim, (n, step) in enumerate(zip(shape, stride, strict=True)):
                if step == 0 and n > 1:  # expanded: the copies are not stored
                    base = base.narrow(dim, 0, 1)
            if base.shape == tensor.shape and _is_dense(shape, stride):
                keep_stride = stride
            else:
                base = base.contiguous()
        described = str(tensor.dtype).removeprefix("torch."), shape, keep_stride, tuple(base.shape), tensor.requires_grad
        if device:
            return unpack_device_tensor, (*self.fetch(device, devices.backend().raw(base)), device, *described)
        where, offset = self.place(base.data_ptr(), base.numel() * base.element_size(), base)
        return unpack_tensor, (where, offset, *described)


def _exports(array: np.ndarray) -> bool:
    """Whether the array has a buffer to export; NumPy pickles one that has none (dates) as a copy."""
    try:
        memoryview(array)
    except (ValueError, BufferError):
        return False
    return True


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill one span of memory, each place once (a permuted row-major tensor)."""
    expected = 1
    for step, n in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= n
    return True


class Call:
    """A value that unpickles as `function(*args)`: for a reduction nested in another."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args
