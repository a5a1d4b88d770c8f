"""`ModuleSource` and `StateDictSource`: models as torch holds them, plain or as DTensors, as boxes over the storages they have."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.dtensor import Part, parts_of
from mooncake_ray.weights.held import Held, Piece, held_tensors
from mooncake_ray.weights.placement import Fragment

__all__ = ["ModuleSource", "Slice", "StateDictSource", "unwrapped"]


@dataclass(frozen=True)
class Slice:
    """A box of a module's tensor that is a canonical tensor by itself, such as one expert's matrix in a stack of them."""

    name: str
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    drop: int = 0
    """Leading dimensions, of length 1, that the canonical tensor has not."""


Name = str | None | Sequence[Slice]
Names = Callable[[str], Name] | Mapping[str, Name]

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def unwrapped(name: str) -> str:
    """A parameter's name without what `torch.compile`, activation checkpoints and FSDP put into it."""
    return _WRAPPERS.sub("", name)


class ModuleSource:
    """The parameters and the persistent buffers of a module, where they are. Plain tensors, and DTensors (FSDP2, HSDP, tensor parallelism).
    Of a `DistributedDataParallel`, the module in it.

    A `Shard`, so a target as well. Tied parameters keep all their names, over one storage. What a buffer is now is looked up at every
    `buffers()`, so an optimizer or a reload may replace tensors, as long as dtype, shape and strides stay.

    Attributes:
        aliases: Canonical names that are another one's very storage: `{"lm_head.weight": "model.embed_tokens.weight"}`.
    """

    def __init__(self, module: torch.nn.Module, names: Names | None = None) -> None:
        """
        Args:
            names: The canonical name of each of the module's own names; None leaves one out; slices, where it is several canonical tensors in
                one (see `layouts.checkpoint`). As they are by default, without what `torch.compile`, activation checkpoints and FSDP put into
                them.

        Raises:
            PlanError: a name is not in the mapping `names`, two tensors have the same canonical name, a slice is not within its tensor, or a
                tensor cannot be moved as it is.
        """
        self.module = module.module if isinstance(module, DistributedDataParallel) else module
        self.aliases: dict[str, str] = {}
        self._held = Held()
        first: dict[int, tuple[str, tuple[str, ...]]] = {}
        taken: dict[str, str] = {}
        for own, tensor in held_tensors(self.module):
            named = _canonical(names, own)
            if named is None:
                continue
            shape, local, parts = parts_of(own, tensor)
            zeros = (0,) * len(shape)
            slices = [Slice(named, zeros, shape)] if isinstance(named, str) else list(named)
            canonical = tuple(s.name for s in slices)
            # A name that is there twice is one tensor, if it is the same storage.
            buffer, known = first.setdefault(id(tensor), (own, canonical))
            for name in canonical:
                if taken.setdefault(name, buffer) != buffer:
                    raise PlanError(f"{name} is both {taken[name]} and {own}")
            if known != canonical:
                self.aliases |= {name: known[i] for i, name in enumerate(canonical)} if len(known) == len(canonical) else {}
            elif own != buffer:
                continue
            self._held.add(buffer, local, _pieces(own, slices, shape, local, parts))

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
                if not len(whole) == len(lo) == len(shape) or any(not 0 <= a <= n - m for a, m, n in zip(lo, shape, whole, strict=True)):
                    raise PlanError(f"{name}: a part of shape {list(shape)} at {list(lo)} is not in a whole of {list(whole)}")
                parts = [(tuple(lo), tuple(a + n for a, n in zip(lo, shape, strict=True)), (0,) * len(shape))]
                shape = tuple(whole)
            self._held.add(name, local, _pieces(name, [Slice(canonical, (0,) * len(shape), shape)], shape, local, parts))

    def fragments(self) -> Sequence[Fragment]:
        return tuple(self._held.rows)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The mapping's tensors (their local parts), detached, over the same memory.

        Raises:
            PlanError: one is gone, or looks different from when the layout was described.
        """
        return self._held.checked(self.mapping)


def _pieces(own: str, slices: Sequence[Slice], shape: tuple[int, ...], local: torch.Tensor, parts: Sequence[Part]) -> Iterator[Piece]:
    """Where the parts of the whole that are here meet the slices of it."""
    strides = tuple(local.stride())
    for s in slices:
        within = len(s.lo) == len(s.hi) == len(shape) and all(0 <= a <= b <= n for a, b, n in zip(s.lo, s.hi, shape, strict=True))
        if not within or any(b - a != 1 for a, b in zip(s.lo[: s.drop], s.hi[: s.drop], strict=True)):
            raise PlanError(f"{own}: {s} is no slice of a tensor of shape {list(shape)}")
        extent = tuple(b - a for a, b in zip(s.lo, s.hi, strict=True))
        for lo, hi, at in parts:
            a, b = tuple(map(max, lo, s.lo)), tuple(map(min, hi, s.hi))
            if any(map(operator.ge, a, b)):
                continue
            offset = sum((x - y + z) * step for x, y, z, step in zip(a, lo, at, strides, strict=True))
            first, end = (tuple(map(operator.sub, x, s.lo)) for x in (a, b))
            yield Piece(s.name, extent[s.drop :], first[s.drop :], end[s.drop :], offset, strides[s.drop :])


def _canonical(names: Names | None, own: str) -> Name:
    if names is None:
        return unwrapped(own)
    if callable(names):
        return names(own)
    if own not in names:
        raise PlanError(f"{own} has no canonical name: map it to one, or to None to leave it out")
    return names[own]
