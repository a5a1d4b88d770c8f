"""Rows of any other type: each pickled by itself, and unpickled when it is selected.

object  see `node.spans`; `buffer` holds a pickle a row
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mooncake_ray.data.bits import dtype_name, flat_bytes, named_tensor
from mooncake_ray.data.block.arrays import tensor_group
from mooncake_ray.data.block.chunk import Builder
from mooncake_ray.data.block.node import Node, corrupt, decoder, lengths, pieces
from mooncake_ray.data.block.read import Runs, Steps

__all__ = ["NotStorable", "encode_objects"]


class NotStorable(TypeError):
    """A value holds a handle that Ray counts when it pickles it, and so must travel in Ray's own pickle: leave its column out of the block."""


def encode_objects(values: list[Any], out: Builder) -> Node:
    """Pickles each value; functions and classes that cannot be imported by name go by value.

    Raises:
        NotStorable: A value holds a ray.ObjectRef, an actor handle or the like.
        Exception: Whatever pickling a value raises.
    """
    # Ray's own, where Ray is: it knows the serializers that were registered with Ray.
    make = _pickler(importlib.import_module("ray.cloudpickle").CloudPickler, _counted())
    pickles = []
    for value in values:
        with io.BytesIO() as file:
            make(file, protocol=5).dump(value)
            pickles.append(file.getvalue())
    counts = np.fromiter(map(len, pickles), np.int64, len(pickles))
    return {"kind": "object", "rows": len(values), **lengths(counts, out), "buffer": out.add(np.frombuffer(b"".join(pickles), np.uint8))}


@decoder("object")
def _decode_objects(node: Node, runs: Runs) -> Steps[list[Any]]:
    got, bounds = yield from pieces(node, runs)
    data = memoryview(got)
    try:
        return [pickle.loads(data[a:b]) for a, b in pairwise(bounds)]
    except (pickle.UnpicklingError, EOFError) as error:
        raise corrupt(f"the pickle of a value: {error}") from error


def _counted() -> tuple[type, ...]:
    """The types of handles that Ray counts, of what is loaded of Ray."""
    found = []
    for module, names in (
        ("ray", ("ObjectRef", "ObjectRefGenerator", "DynamicObjectRefGenerator")),
        ("ray.actor", ("ActorHandle",)),
        ("ray.util.client.common", ("ClientObjectRef", "ClientActorHandle")),
    ):
        loaded = sys.modules.get(module)
        found += [kind for name in names if isinstance(kind := getattr(loaded, name, None), type)]
    return tuple(found)


@functools.cache
def _pickler(base: type, refused: tuple[type, ...]) -> type:
    class Pickler(base):
        def reducer_override(self, obj: Any) -> Any:
            if issubclass(type(obj), refused):
                raise NotStorable(f"a {type(obj).__name__} must be pickled by Ray, which counts such handles")
            if type(obj) is torch.Tensor and tensor_group(obj) is not None:  # torch's own way takes 50 times as long, and not all dtypes
                return named_tensor, (bytearray(flat_bytes(obj).numpy()), dtype_name(obj.dtype), tuple(obj.shape))
            return super().reducer_override(obj)

    return Pickler
