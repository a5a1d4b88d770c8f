"""What a value's envelope (the some hundred bytes that Ray has of it) says about the pool objects behind it.

It is unpickled with every class and function in it replaced by nothing at all, except the few that name pool objects: so nothing is pinned,
nothing comes from another node, and no code of the user's runs.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import ray

__all__ = ["Named", "flat", "loads", "named"]


class _Nothing(type):
    """Its only class takes part in any pickle, and stays what it is."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls

    def __setitem__(cls, key: Any, value: Any) -> None:
        """A pickled mapping's item."""

    def __setattr__(cls, name: str, value: Any) -> None:
        """A pickled object's attribute."""


class _Any(metaclass=_Nothing):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls

    @classmethod
    def _ignore(cls, *args: Any) -> None: ...

    __setstate__ = append = extend = add = update = _ignore


class Named:
    """A pool object that an envelope names."""

    __slots__ = ("id", "nbytes", "pool_id")

    def __init__(self, pool_id: bytes, id: bytes) -> None:
        self.pool_id, self.id = pool_id, id
        self.nbytes = 0
        """Its size, or less where the value is not all of it."""


def _array_bytes(dtype: np.dtype, shape: tuple[int, ...], *_: Any) -> int:
    return dtype.itemsize * math.prod(shape)


def _tensor_bytes(dtype: str, shape: Any, stride: Any, packed: tuple[int, ...], *_: Any) -> int:
    import torch

    return getattr(torch, dtype).itemsize * math.prod(packed)


_SEGMENTS: dict[str, Callable[..., int]] = {  # a function whose arguments begin with a region and an offset → bytes, by the other ones
    "mooncake_ray.store.packing:unpack_array": _array_bytes,
    "mooncake_ray.store.packing:unpack_tensor": _tensor_bytes,
    "mooncake_ray.store.packing:unpack_device_tensor": lambda device, *rest: _tensor_bytes(*rest),
    "mooncake_ray.store.cupy_arrays:unpack_array": lambda nbytes, *_: nbytes,
    "mooncake_ray.data.packed:open_block": lambda nbytes, *_: nbytes,
}


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, found: dict[bytes, Named], buffers: Iterable[Any] | None) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._found = found

    def find_class(self, module: str, name: str) -> Any:
        place = f"{module}:{name}"
        if place == "mooncake_ray.objects.session:open_region":
            return lambda pool_id, id: self._found.setdefault(id, Named(pool_id, id))
        if place == "mooncake_ray.objects.session:load":
            return lambda data, buffers: _Reader(data, self._found, buffers).load()
        if place == "numpy:dtype":
            return np.dtype
        if (nbytes_of := _SEGMENTS.get(place)) is not None:
            return lambda region, offset, *rest: _grown(region, offset + nbytes_of(*rest))
        return _Any

    def persistent_load(self, pid: Any) -> Any:
        return _Any


def _grown(region: Named, nbytes: int) -> Any:
    region.nbytes = max(region.nbytes, nbytes)
    return _Any


_local = threading.local()


def loads(original: Callable[..., Any]) -> Callable[..., Any]:
    """`pickle.loads` as Ray's serialization module is to use it."""

    def loads(data: Any, **kwargs: Any) -> Any:
        found = getattr(_local, "found", None)
        if found is None:
            return original(data, **kwargs)
        return _Reader(data, found, kwargs.get("buffers")).load()

    return loads


@contextlib.contextmanager
def _reading() -> Iterator[dict[bytes, Named]]:
    outer = getattr(_local, "found", None)
    _local.found = found = {}
    try:
        yield found
    finally:
        _local.found = outer


def named(ref: ray.ObjectRef, timeout_s: float | None) -> list[Named]:
    """The pool objects behind a ref; none where Ray's own store has the value. Needs the seams (see `install.open_seams`).

    Raises what `ray.get` does; GetTimeoutError (Ray's) where the envelope is not here in time.
    """
    with _reading() as found:
        ray.get(ref, timeout=timeout_s)
    return list(found.values())


def flat(refs: Any) -> list[ray.ObjectRef]:
    """The refs in a ref, a `BatchRef`, or lists and tuples of them (nested), each once.

    Raises TypeError for what is none of these.
    """
    out: dict[ray.ObjectRef, None] = {}
    stack = [refs]
    while stack:
        node = stack.pop()
        if isinstance(node, ray.ObjectRef):
            out[node] = None
        elif isinstance(node, list | tuple):
            stack.extend(reversed(node))
        elif hasattr(node, "as_put") and hasattr(node, "refs"):  # a BatchRef, whose module needs torch
            stack.extend(reversed(node.refs))
        else:
            raise TypeError(f"expected an ObjectRef, a BatchRef, or lists of them, got a {type(node).__name__}")
    return list(out)
