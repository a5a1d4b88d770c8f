"""`Held`: fragments over tensors that somebody else holds, and whether those tensors still are what the fragments say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.dtensor import parts_of
from mooncake_ray.weights.meta import ITEMSIZE, ParamMeta
from mooncake_ray.weights.placement import Fragment

__all__ = ["Held", "Layout", "Piece", "held_tensors"]


@dataclass(frozen=True)
class Piece:
    """A box of a canonical tensor within a local one. Counts elements."""

    name: str
    shape: tuple[int, ...]
    """Of the whole."""
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    offset: int
    """Of the box's first element from the local tensor's first."""
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """What a tensor looked like when its fragments were described."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} with strides {list(self.strides)}"


@dataclass
class Held:
    """Fragments, and the layouts they were made from. Keeps no tensor alive."""

    rows: list[Fragment] = field(default_factory=list)
    layouts: dict[str, Layout] = field(default_factory=dict)

    def add(self, buffer: str, local: torch.Tensor, pieces: Iterable[Piece]) -> None:
        """
        Raises:
            PlanError: the tensor's bytes are not its values: another dtype than any known, or a subclass with a storage of its own.
        """
        dtype = str(local.dtype).removeprefix("torch.")
        if dtype not in ITEMSIZE:
            raise PlanError(f"{buffer}: a tensor of dtype {dtype} cannot be moved")
        if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise PlanError(f"{buffer}: a {type(local).__name__} keeps its values in its own way; give the plain tensors in it")
        self.layouts[buffer] = Layout.of(local)
        item = local.element_size()
        for p in pieces:
            meta = ParamMeta(p.name, dtype, p.shape)
            self.rows.append(Fragment(meta, p.lo, p.hi, buffer, p.offset * item, tuple(s * item for s in p.strides)))

    def checked(self, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The memory of each buffer as it is now, detached.

        Raises:
            PlanError: one is gone, or does not look as it did.
        """
        out = {}
        for name, known in self.layouts.items():
            if name not in tensors:
                raise PlanError(f"{name} is gone since its layout was described")
            local = parts_of(name, tensors[name])[1].detach()
            if (local.dtype, local.shape, local.stride()) != (known.dtype, known.shape, known.strides):
                raise PlanError(f"{name} was {known} when its layout was described, and is {Layout.of(local)}")
            out[name] = local
        return out


def held_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of the parameters and persistent buffers, tied ones under each of their names; without running any hook."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        dot = prefix + "." if prefix else ""
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield dot + name, parameter
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield dot + name, buffer
