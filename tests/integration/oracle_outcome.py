"""Turns what a case returns into JSON that can be compared between two processes."""

from __future__ import annotations

import collections
import dataclasses
import enum
import hashlib
import json
import sys
import types
import typing
from contextlib import contextmanager

import numpy as np
import ray
import torch

_worker_routed = 0


def routed() -> int:
    """Serialisations of this process that went through the pool; 0 where it is not installed."""
    pool = sys.modules.get("mooncake_ray")
    stats = getattr(pool, "stats", None)
    return int(stats()["routed"]) if stats else 0


@contextmanager
def counting(*actors):
    """Adds what these actors' processes routed in the block to the running case's count."""
    global _worker_routed
    before = ray.get([actor.routed.remote() for actor in actors])
    yield
    after = ray.get([actor.routed.remote() for actor in actors])
    _worker_routed += sum(after) - sum(before)


def take_worker_routed() -> int:
    global _worker_routed
    count, _worker_routed = _worker_routed, 0
    return count


class Described(typing.NamedTuple):
    """What a worker saw, on its way to the driver."""

    outcome: object


def described(value) -> Described:
    return Described(outcome(value))


def outcome(value):
    """A JSON value equal for two results that no user of them could tell apart."""
    return _Describer().describe(value)


class _Describer:
    """Describes one object graph; an object met again becomes a reference to its first place."""

    def __init__(self):
        self._places = {}
        self._alive = []

    def describe(self, value):
        if isinstance(value, Described):
            return value.outcome
        if type(value) in (type(None), bool, int, float, complex):
            return f"{_name(type(value))} {value!r}"
        if isinstance(value, str) and type(value) is str and len(value) < 4096:
            return f"str {value}"
        if id(value) in self._places:
            return {"same as": self._places[id(value)]}
        if not isinstance(value, (tuple, frozenset, np.generic)):
            self._places[id(value)] = len(self._places)
            self._alive.append(value)
        return {"type": _name(type(value)), **self._content(value)}

    def _content(self, value):
        for kinds, describe in self._kinds():
            if isinstance(value, kinds):
                return describe(value)
        return self._object(value)

    def _kinds(self):
        return (
            (torch.Tensor, self._tensor),
            (np.ndarray, self._array),
            (np.generic, self._numpy_scalar),
            (BaseException, self._error),
            (ray.ObjectRef, lambda ref: {}),
            ((str, bytes, bytearray, memoryview), _blob),
            ((set, frozenset), self._set),
            (dict, self._dict),
            ((list, tuple, collections.deque), self._sequence),
            (torch.nn.Module, self._module),
            ((type, types.FunctionType), lambda named: {"name": _name(named)}),
            ((torch.dtype, torch.device, np.dtype, enum.Enum, range), lambda plain: {"repr": repr(plain)}),
            (_tensordict_types(), self._tensordict),
        )

    def _sequence(self, value):
        return {"items": [self.describe(item) for item in value], **self._attributes(value)}

    def _dict(self, value):
        items = [[self.describe(key), self.describe(item)] for key, item in value.items()]
        return {"items": items, **self._attributes(value)}

    def _set(self, value):
        return {"items": sorted((outcome(item) for item in value), key=json.dumps)}

    def _attributes(self, value):
        attributes = getattr(value, "__dict__", None)
        if not attributes:
            return {}
        return {"attributes": {name: self.describe(item) for name, item in attributes.items()}}

    def _object(self, value):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        fields = {name: self.describe(getattr(value, name)) for name in slots if hasattr(value, name)}
        if dataclasses.is_dataclass(value):
            fields["dataclass fields"] = [field.name for field in dataclasses.fields(value)]
        return {"slots": fields, **self._attributes(value)}

    def _module(self, value):
        return {"repr": repr(value), "training": value.training, "state": self.describe(value.state_dict())}

    def _tensordict(self, value):
        return {
            "batch_size": list(value.batch_size),
            "device": str(value.device),
            "names": [str(name) for name in value.names],
            "locked": value.is_locked,
            "items": [[str(key), self.describe(item)] for key, item in value.items()],
        }

    def _array(self, value):
        content = {
            "dtype": repr(value.dtype),
            "byteorder": value.dtype.byteorder,
            "shape": list(value.shape),
            "writeable": bool(value.flags.writeable),
        }
        if isinstance(value, np.ma.MaskedArray):
            content["mask"] = _blob(np.ma.getmaskarray(value).tobytes())
            content["fill"] = repr(value.fill_value)
            value = value.data
        elif type(value) is not np.ndarray:
            content.update(self._attributes(value))
        plain = np.asarray(value)
        if plain.dtype.hasobject:
            content["items"] = [self.describe(item) for item in plain.reshape(-1).tolist()]
        else:
            content.update(_blob(plain.tobytes()))
        return content

    def _numpy_scalar(self, value):
        if isinstance(value, np.void) and value.dtype.hasobject:
            return {"items": self.describe(value.item())}
        return {"dtype": repr(value.dtype), **_blob(value.tobytes())}

    def _tensor(self, value):
        content = {
            "dtype": str(value.dtype),
            "device": str(value.device),
            "layout": str(value.layout),
            "requires_grad": value.requires_grad,
            "leaf": value.is_leaf,
            "grad": self.describe(value.grad) if value.is_leaf else None,
        }
        if value.is_nested:
            parts = {"values": value.values().detach(), "offsets": value.offsets()}
            return {**content, "parts": self.describe(parts)}
        if hasattr(type(value), "__tensor_flatten__"):
            content["shape"] = list(value.shape)
        else:
            content.update(self._tensor_values(value.detach()))
        return {**content, **self._attributes(value)}

    def _tensor_values(self, value):
        content = {"shape": list(value.shape)}
        if value.is_meta:
            return content
        if value.layout == torch.sparse_coo:
            parts = [value._indices(), value._values(), value.is_coalesced()]
        elif value.layout == torch.sparse_csr:
            parts = [value.crow_indices(), value.col_indices(), value.values()]
        elif value.is_quantized:
            parts = [value.int_repr(), str(value.qscheme()), value.q_scale(), value.q_zero_point()]
        else:
            return {**content, **_blob(tensor_bytes(value))}
        return {**content, "parts": self.describe(parts)}

    def _error(self, value):
        content = {"kinds": [_name(kind) for kind in type(value).__mro__]}
        if isinstance(value, ray.exceptions.RayTaskError):
            content["cause"] = self.describe(value.cause)
            content["last line"] = str(value).strip().splitlines()[-1]
        elif not isinstance(value, ray.exceptions.RayError):
            content["message"] = str(value)
            content["args"] = self.describe(value.args)
            content.update(self._attributes(value))
        content["from"] = self.describe(value.__cause__)
        return content


def tensor_bytes(value) -> bytes:
    flat = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _blob(value):
    raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
    return {"length": len(raw), "sha256": hashlib.sha256(raw).hexdigest(), "head": raw[:16].hex()}


def _name(kind) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _tensordict_types():
    module = sys.modules.get("tensordict")
    base = getattr(module, "TensorDictBase", None)
    return (base,) if base else ()


def first_difference(expected, actual, path="outcome") -> str | None:
    """Where two outcomes first differ, in words; None where they are equal."""
    if type(expected) is not type(actual):
        return f"{path}: expected {expected!r:.600}, got {actual!r:.600}"
    if isinstance(expected, dict):
        if list(expected) != list(actual):
            return f"{path}: expected keys {list(expected)}, got {list(actual)}"
        pairs = [(f".{key}", expected[key], actual[key]) for key in expected]
    elif isinstance(expected, list):
        if len(expected) != len(actual):
            return f"{path}: expected {len(expected)} items, got {len(actual)}"
        pairs = [(f"[{i}]", a, b) for i, (a, b) in enumerate(zip(expected, actual, strict=True))]
    else:
        return None if expected == actual else f"{path}: expected {expected!r:.600}, got {actual!r:.600}"
    return next(filter(None, (first_difference(a, b, path + step) for step, a, b in pairs)), None)
