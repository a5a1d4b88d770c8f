"""`Refs`: tensors of versions as objects of the pool, for readers in the cluster: they map them, or pull them from node to node."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import mooncake_ray
from mooncake_ray.serve.contents import Volume

__all__ = ["Refs"]


class Refs:
    """Puts each tensor once, for all who ask while it is kept. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes`: of tensors that are kept for the next who asks. Whoever has a ref keeps its object, whatever is kept here."""
        self._most, self._bytes = most_bytes, 0
        self._kept: OrderedDict[tuple[str, str], tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, volume: Volume, names: Iterable[str]) -> Mapping[str, Any]:
        """An `ObjectRef` for each name. Raises SnapshotNotFoundError: there is no such tensor."""
        return {name: self._one(volume, name) for name in names}

    def _one(self, volume: Volume, name: str) -> Any:
        key = volume.tag, name
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        tensor = volume.whole(name)
        ref = mooncake_ray.put(tensor)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = ref, tensor.nbytes
                self._bytes += tensor.nbytes
            while self._bytes > self._most:
                self._bytes -= self._kept.popitem(last=False)[1][1]
        return ref
