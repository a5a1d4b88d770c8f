"""What the cases send: tensors, arrays, and objects that contain them."""

from __future__ import annotations

import dataclasses
import enum
import typing

import numpy as np
import torch


def floats(seed=0, shape=(256, 384)):
    return torch.arange(seed, seed + int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def array(seed=0, shape=(256, 384), dtype=np.float32):
    return np.arange(seed, seed + int(np.prod(shape))).reshape(shape).astype(dtype)


def random_bytes(size=512 * 1024):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


@dataclasses.dataclass
class Sample:
    prompt: torch.Tensor
    scores: np.ndarray
    tags: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSample:
    prompt: torch.Tensor
    name: str


class Pair(typing.NamedTuple):
    left: typing.Any
    right: typing.Any


class Color(enum.Enum):
    RED = 1


class Episode:
    """An arbitrary object with tensors in attributes and in containers."""

    def __init__(self, seed=0):
        self.states = floats(seed)
        self.info = {"rewards": [array(seed), floats(seed + 1)], "length": 3}
        self.parent = self


class WithState:
    """Chooses itself what is pickled."""

    def __init__(self, data):
        self.data, self.cache = data, lambda: None

    def __getstate__(self):
        return {"data": self.data}

    def __setstate__(self, state):
        self.data, self.cache = state["data"], "rebuilt"


class WithReduce:
    def __init__(self, data, note):
        self.data, self.note = data, note

    def __reduce__(self):
        return WithReduce, (self.data, self.note + "+")


class WithSlots:
    __slots__ = ("data", "other")

    def __init__(self, data):
        self.data = data


class ListOfTensors(list):
    """A list subclass with an attribute of its own."""


class BrokenState:
    """Pickles, but cannot be unpickled."""

    def __init__(self, data):
        self.data = data

    def __setstate__(self, state):
        raise ValueError("this state is refused")


class Unpicklable:
    def __reduce__(self):
        raise ArithmeticError("this object refuses to be pickled")


class LabelledTensor(torch.Tensor):
    """A tensor subclass that keeps its label."""

    @classmethod
    def labelled(cls, tensor, label):
        result = tensor.as_subclass(cls)
        result.label = label
        return result


class ScaledTensor(torch.Tensor):
    """A wrapper subclass: no storage of its own, the data are in two inner tensors."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values, scale):
        self.values_, self.scale_ = values, scale

    def __tensor_flatten__(self):
        return ["values_", "scale_"], None

    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].values_, args[0].scale_)
        raise NotImplementedError(str(function))

    def __repr__(self):
        return "ScaledTensor"


class LabelledArray(np.ndarray):
    """A NumPy subclass as NumPy's manual describes it; its label is not pickled."""

    def __array_finalize__(self, source):
        self.label = getattr(source, "label", "none")


class DomainError(Exception):
    """Carries a tensor argument and a tensor attribute."""

    def __init__(self, message, tensor):
        super().__init__(message, tensor)
        self.culprit = tensor + 1

    def __str__(self):
        return f"{self.args[0]} of shape {tuple(self.args[1].shape)}"


class ErrorWithoutReduce(Exception):
    """Cannot be rebuilt from its args alone."""

    def __init__(self, message, tensor):
        super().__init__(message)
        self.tensor = tensor


def small_network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 384), torch.nn.BatchNorm1d(384), torch.nn.Linear(384, 256))
