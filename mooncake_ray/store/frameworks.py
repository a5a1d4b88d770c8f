"""Classes that are stored in a way of their own, because their pickling would hide their columns in one opaque blob.

A class is found by walking the method resolution order of what is pickled, so subclasses are too. What stores it is imported when the first
object of it is seen; a package that is not used is never imported.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["as_stored", "class_names", "reduce", "stored_only"]

_REDUCERS = {  # class → function(packer, obj) that gives a reduction, or NotImplemented for the class's own pickling
    "mooncake_ray.data.proto:DataProto": "mooncake_ray.data.packed:reduce_batch",
    "mooncake_ray.data.lazy:Handle": "mooncake_ray.data.packed:reduce_handle",
    "verl.protocol:DataProto": "mooncake_ray.integrations.verl:reduce_batch",
    "cupy:ndarray": "mooncake_ray.store.cupy_arrays:reduce_array",
    "tensordict._td:TensorDict": "mooncake_ray.integrations.tensordict:reduce_tensordict",
}
_known: dict[type, Callable[[Any, Any], Any] | None] = {}


def reduce(packer: Any, obj: Any) -> Any:
    """A reduction as `pickle` takes it, or NotImplemented."""
    cls = type(obj)
    try:
        function = _known[cls]
    except KeyError:
        function = _known[cls] = _find(cls)
    return NotImplemented if function is None else function(packer, obj)


def _find(cls: type) -> Callable[[Any, Any], Any] | None:
    for name in class_names(cls):
        if name in _REDUCERS:
            module, attribute = _REDUCERS[name].split(":")
            return getattr(importlib.import_module(module), attribute)
    return None


def class_names(cls: type) -> list[str]:
    """What a class is, as "module:name", the nearest first: so it can be told without importing what it might be."""
    return [f"{base.__module__}:{base.__qualname__}" for base in cls.__mro__]


_reading = threading.local()


@contextlib.contextmanager
def as_stored() -> Iterator[None]:
    """Meanwhile this thread unpickles batches of every class as a `mooncake_ray.DataProto` whose columns are not loaded."""
    outer, _reading.lazily = stored_only(), True
    try:
        yield
    finally:
        _reading.lazily = outer


def stored_only() -> bool:
    """Whether this thread is in `as_stored`."""
    return getattr(_reading, "lazily", False)
