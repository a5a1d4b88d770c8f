"""`ModuleTarget`: the parameters and buffers of a torch module as the place where weights go, with fragments that somebody else knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.placement import Fragment

__all__ = ["ModuleTarget", "storages"]


def storages(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers by name; of those that are the same memory, tied ones say, only the first."""
    out: dict[str, torch.Tensor] = {}
    seen = set()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        where = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape)
        if where not in seen:
            seen.add(where)
            out[name] = tensor.detach()
    return out


class ModuleTarget:
    """A `Shard` over a module. A buffer is named as the parameter that it is; one whose bytes hold another dtype than the parameter says is
    `name:dtype`."""

    def __init__(self, module: torch.nn.Module, fragments: Iterable[Fragment]) -> None:
        """
        Args:
            module: looked at again for each `buffers()`, so its parameters may be replaced by others of the same shape.
            fragments: of its storages.

        Raises:
            PlanError: a fragment names a storage that the module has not.
        """
        self._module = module
        self._fragments = tuple(fragments)
        self._names = tuple(dict.fromkeys(f.buffer for f in self._fragments))
        there = storages(module)
        if missing := [n for n in self._names if n.partition(":")[0] not in there]:
            raise PlanError(f"the module has no {', '.join(missing[:5])} ({len(missing)} such parameters)")
        self._geometry = {n: _geometry(there[n.partition(":")[0]]) for n in self._names}

    def fragments(self) -> tuple[Fragment, ...]:
        return self._fragments

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Each storage that a fragment names, without autograd. Alive as long as the parameter.

        Raises:
            PlanError: a parameter is gone, or lies otherwise than when the fragments were made.
        """
        there = storages(self._module)
        out = {}
        for name in self._names:
            plain, _, dtype = name.partition(":")
            if plain not in there or _geometry(there[plain]) != self._geometry[name]:
                now = _geometry(there[plain]) if plain in there else "gone"
                raise PlanError(f"parameter {plain} was {self._geometry[name]} when its layout was learned, and is {now}")
            out[name] = there[plain].view(getattr(torch, dtype)) if dtype else there[plain]
        return out


def _geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
