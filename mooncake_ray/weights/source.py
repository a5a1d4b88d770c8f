"""`ModuleSource` and `StateDictSource`: models as torch holds them, plain or as DTensors, as boxes over the storages they have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.dtensor import Part, parts_of
from mooncake_ray.weights.held import Held, Piece, held_tensors
from mooncake_ray.weights.placement import Fragment

__all__ = ["ModuleSource", "StateDictSource"]

Names = Callable[[str], str | None] | Mapping[str, str | None]

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


class ModuleSource:
    """The parameters and the persistent buffers of a module, where they are. Plain tensors, and DTensors (FSDP2, HSDP, tensor parallelism).

    A `Shard`, so a target as well. Tied parameters keep all their names, over one storage. What a buffer is now is looked up at every
    `buffers()`, so an optimizer or a reload may replace tensors, as long as dtype, shape and strides stay.

    Attributes:
        aliases: Canonical names that are another one's very storage: `{"lm_head.weight": "model.embed_tokens.weight"}`.
    """

    def __init__(self, module: torch.nn.Module, names: Names | None = None) -> None:
        """
        Args:
            names: The canonical name of each of the module's own names; None leaves one out. As they are by default, without what
                `torch.compile`, activation checkpoints and FSDP put into them.

        Raises:
            PlanError: a name is not in the mapping `names`, two tensors have the same canonical name, or a tensor cannot be moved as it is.
        """
        self.module = module
        self.aliases: dict[str, str] = {}
        self._held = Held()
        first: dict[int, tuple[str, str]] = {}
        taken: dict[str, str] = {}
        for own, tensor in held_tensors(module):
            canonical = _canonical(names, own)
            if canonical is None:
                continue
            # A name that is there twice is one tensor, if it is the same storage.
            buffer, known = first.setdefault(id(tensor), (own, canonical))
            if taken.setdefault(canonical, buffer) != buffer:
                raise PlanError(f"{canonical} is both {taken[canonical]} and {own}")
            if known != canonical:
                self.aliases[canonical] = known
            elif own != buffer:
                continue
            shape, local, parts = parts_of(own, tensor)
            self._held.add(buffer, local, _pieces(canonical, shape, local, parts))

    def fragments(self) -> Sequence[Fragment]:
        return tuple(self._held.rows)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The module's tensors (their local parts), by its own names; detached, over the same memory.

        Raises:
            PlanError: one is gone, or looks different from when the layout was described (an FSDP module that is gathered just now, say).
        """
        return self._held.checked(dict(held_tensors(self.module)))


class StateDictSource:
    """Tensors by name: whole ones, parts of whole ones, or DTensors. A `Shard`, so a target as well.

    The mapping is kept, and looked into at every `buffers()`: tensors in it may be replaced by others of the same dtype, shape and strides.
    """

    def __init__(self, mapping: Mapping[str, torch.Tensor], boxes: Mapping[str, tuple] | None = None) -> None:
        """
        Args:
            boxes: For what is a part: `(shape of the whole, where the part begins in it)`; or `(shape, lo, canonical name)`, where the key in
                `mapping` is not that name, since there are several parts of it.

        Raises:
            PlanError: a part is not within its whole, or `boxes` names what is not there.
        """
        self.mapping = mapping
        self._held = Held()
        boxes = boxes or {}
        if missing := sorted(set(boxes) - set(mapping)):
            raise PlanError(f"boxes are given for {len(missing)} tensors that are not there: {', '.join(missing[:5])}")
        for name, tensor in mapping.items():
            shape, local, parts = parts_of(name, tensor)
            canonical = name
            if name in boxes:
                if local is not tensor:
                    raise PlanError(f"{name} is a DTensor, which knows its box by itself")
                whole, lo, canonical = (*boxes[name], name)[:3]
                if not len(whole) == len(lo) == len(shape):
                    raise PlanError(f"{name}: a part of shape {list(shape)} at {list(lo)} in a whole of {list(whole)}")
                parts = [(tuple(lo), tuple(a + n for a, n in zip(lo, shape, strict=True)), (0,) * len(shape))]
                shape = tuple(whole)
            self._held.add(name, local, _pieces(canonical, shape, local, parts))

    def fragments(self) -> Sequence[Fragment]:
        return tuple(self._held.rows)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The mapping's tensors (their local parts), detached, over the same memory.

        Raises:
            PlanError: one is gone, or looks different from when the layout was described.
        """
        return self._held.checked(self.mapping)


def _pieces(name: str, shape: tuple[int, ...], local: torch.Tensor, parts: Sequence[Part]) -> Iterator[Piece]:
    strides = tuple(local.stride())
    for lo, hi, at in parts:
        yield Piece(name, shape, lo, hi, sum(a * s for a, s in zip(at, strides, strict=True)), strides)


def _canonical(names: Names | None, own: str) -> str | None:
    if names is None:
        return _WRAPPERS.sub("", own)
    if callable(names):
        return names(own)
    if own not in names:
        raise PlanError(f"{own} has no canonical name: map it to one, or to None to leave it out")
    return names[own]
