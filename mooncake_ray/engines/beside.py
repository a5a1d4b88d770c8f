"""`Beside`: a module's weights a second time, which are made new while the first are served, and change places with them at once."""

from __future__ import annotations

from itertools import chain

import torch

from mooncake_ray.engines.base import UpdateInfo
from mooncake_ray.engines.in_place import InPlace
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.shard import Shard

__all__ = ["Beside"]


class Beside:
    """For weights in this process's memory, whose addresses nobody has noted. Twice the memory from the first update on: what was served is kept
    for the next one."""

    def __init__(self, module: torch.nn.Module, placement: Placement, shard: Shard) -> None:
        self._module, self._placement, self._shard = module, placement, shard
        self._spare: dict[str, torch.Tensor] = {}
        self._own: dict[str, torch.Tensor] = {}

    def prepare(self, update_info: UpdateInfo) -> InPlace | None:
        """Writes a version, while the module may be computing: all of it, or what changes of it into a copy of what is served. None where the
        module's tensors cannot be exchanged.

        Raises as `InPlace.write`; what is served is as it was.
        """
        here = self._exchangeable()
        if here is None:
            return None
        for name, tensor in here.items():
            if name not in self._spare or not _alike(self._spare[name], tensor):
                self._spare[name] = tensor.detach().clone(memory_format=torch.preserve_format)  # with what no fragment covers
            elif "apply" in update_info:
                self._spare[name].copy_(tensor.detach())
        update = InPlace(self._placement, self._spare)
        update.write(update_info)
        return update if update.complete or "apply" in update_info else None

    def fits(self) -> bool:
        """Whether what was prepared can still take the module's place: looked at by the thread that is going to exchange them."""
        self._own = self._exchangeable() or {}
        return bool(self._own) and all(_alike(self._spare[name], tensor) for name, tensor in self._own.items())

    def exchange(self) -> None:
        """What was prepared is the module's now. Right after `fits`, between two steps."""
        for name, tensor in self._own.items():
            self._spare[name], tensor.data = tensor.data, self._spare[name]

    def _exchangeable(self) -> dict[str, torch.Tensor] | None:
        """The module's own tensors by the names of buffers; None if one is not in memory, is read as another dtype, or something else in the
        module looks at the same memory, and would go on to see what was there."""
        own = dict(chain(self._module.named_parameters(), self._module.named_buffers()))
        names = self._shard.buffers().keys()
        if any(name not in own or own[name].device.type != "cpu" or not _dense(own[name]) for name in names):
            return None
        found = {name: own[name] for name in names}
        objects = {tensor.untyped_storage().data_ptr(): id(tensor) for tensor in found.values()}
        if len(objects) < len(found):
            return None
        plain = (value for part in self._module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor))
        held = (value for part in self._module.modules() for value in chain(part._parameters.values(), part._buffers.values()))
        for tensor in chain(plain, held):
            if tensor is not None and objects.get(tensor.untyped_storage().data_ptr(), id(tensor)) != id(tensor):
                return None
        return found


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def _dense(tensor: torch.Tensor) -> bool:
    """Whether it is all of its storage, so that a copy lies as it does."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes
