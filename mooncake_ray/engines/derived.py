"""`Derived`: tensors that an engine computes from its weights, kept where they are when the weights change.

What was captured with their addresses (CUDA graphs, registered memory, views that others hold) goes on reading there: a tensor that is made
anew at another address would leave it with the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

import torch

from mooncake_ray.errors import PlanError, WeightSyncError

__all__ = ["Derived"]


class Derived:
    def __init__(
        self,
        module: torch.nn.Module,
        compute: Mapping[str, Callable[[torch.nn.Module], torch.Tensor]],
        post_load: Callable[..., None] | None,
    ) -> None:
        """
        Args:
            compute: by the name that the tensor has in the module, however it is kept there: parameter, buffer or attribute.
            post_load: called with the module, or a bound method of it.

        Raises:
            PlanError: there is no tensor of that name.
        """
        self._module, self._compute, self._post_load = module, dict(compute), post_load
        for name in self._compute:
            self._find(name)

    def refresh(self) -> None:
        """Computes all of it, and copies it to where it is; then calls `post_load`.

        Raises:
            WeightSyncError: something has another shape or dtype than before, or has moved.
        """
        before = self._addresses()
        for name, compute in self._compute.items():
            there, new = self._find(name), compute(self._module)
            if new.shape != there.shape or new.dtype != there.dtype:
                raise WeightSyncError(f"{name} was {there.dtype} {list(there.shape)}, and is {new.dtype} {list(new.shape)} now")
            there.copy_(new)
        if self._post_load is not None:
            bound = getattr(self._post_load, "__self__", None) is self._module
            self._post_load() if bound else self._post_load(self._module)
        after = self._addresses()
        if moved := [name for name, at in before.items() if after.get(name) != at]:
            names = ", ".join(moved[:5])
            raise WeightSyncError(
                f"{len(moved)} tensors are not where they were before new weights: {names}; post_load is to change in place"
            )

    def _find(self, name: str) -> torch.Tensor:
        owner, _, attribute = name.rpartition(".")
        try:
            found = getattr(self._module.get_submodule(owner), attribute)
        except AttributeError as e:
            raise PlanError(f"the module has no {name}: {e}") from None
        if not isinstance(found, torch.Tensor):
            raise PlanError(f"{name} is no tensor but {type(found).__name__}")
        return found.detach()

    def _addresses(self) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
        named = chain(self._module.named_parameters(), self._module.named_buffers(), ((n, self._find(n)) for n in self._compute))
        plain = (
            (f"{owner}.{key}".lstrip("."), value)
            for owner, part in self._module.named_modules()
            for key, value in vars(part).items()
            if isinstance(value, torch.Tensor)
        )
        return {name: (t.data_ptr(), tuple(t.shape), t.dtype) for name, t in chain(named, plain)}
