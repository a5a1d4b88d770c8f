"""`TracedTarget`: where a module wants its weights, learned from its own `load_weights`.

The loader runs once, with tensors that have a shape and a dtype but no memory. What it does to them is watched underneath, where operations
are dispatched: a view of such a tensor is told by where it lies in the tensor's (imagined) storage, whatever operations made it; a copy into
the module's own memory is noted instead of done. So every fused, sharded or transposed layout that a loader can express by views and copies
comes out as fragments, and no layout has to be known by name. Anything that makes new numbers is refused.

Only one thread is watched: what a loader gives to a pool of threads is done in its own meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.coverage import Coverage
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.module_target import ModuleTarget, storages
from mooncake_ray.weights.placement import Fragment
from mooncake_ray.weights.strided import Axis, boxes, storage_order

__all__ = ["TracedTarget"]

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]

_one_at_a_time = threading.Lock()
_aten = torch.ops.aten
_COPIES = {_aten.clone.default, _aten._to_copy.default}
_JOINS = {_aten.cat.default, _aten.stack.default}
_CONSTANTS = {"copy_", "fill_", "zero_"}
_SHAPES_ONLY = {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"}


class TracedTarget(ModuleTarget):
    """A `Shard`: what a module's loader makes of the tensors of a model. The module's parameters are not changed."""

    def __init__(
        self,
        module: torch.nn.Module,
        metas: Iterable[ParamMeta],
        load: Loader | None = None,
        *,
        ignore: Collection[str] = (),
    ) -> None:
        """
        Args:
            metas: the tensors of the model, in the order the loader gets them. It may take a part of each, or none of some: what other ranks
                have. That somebody wants each is for the plan to prove.
            load: gets an iterable of (name, tensor); the module's own `load_weights` if it is None.
            ignore: names of parameters that the loader may leave as they are.

        Raises:
            PlanError: the loader computes with weights instead of moving them, looks at their values, converts them, repeats them or scatters
                them; two tensors go to the same place; or a parameter is not loaded whole. Names the tensor, and the operation.
        """
        self._metas = tuple(metas)
        load = load or getattr(module, "load_weights", None)
        if load is None:
            raise PlanError(f"{type(module).__name__} has no load_weights, and no loader is given")
        trace = _Trace(module)
        trace.run(load, self._metas)
        trace.check(set(ignore))
        super().__init__(module, trace.fragments)

    @property
    def unused(self) -> tuple[str, ...]:
        """The tensors that the loader took nothing of."""
        used = {f.meta.name for f in self._fragments}
        return tuple(m.name for m in self._metas if m.name not in used)


@dataclass(frozen=True)
class _Origin:
    """What a storage without memory stands for: a tensor of the model, or a copy made of views of others."""

    shape: tuple[int, ...]
    """As it lies in that storage, C order."""
    meta: ParamMeta | None
    parts: tuple[tuple[tuple[int, ...], _View], ...]
    """Of a copy: (where the part's box begins, what it is of). The view has the dimensions of `shape`."""
    keep: torch.Tensor
    """So that no other storage gets the same address."""


@dataclass(frozen=True)
class _View:
    origin: _Origin
    offset: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass
class _Slot:
    """A parameter or buffer of the module, as something that is written."""

    name: str
    tensor: torch.Tensor
    coverage: Coverage | None = None


class _Trace(TorchDispatchMode):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.fragments: list[Fragment] = []
        self._module = module
        self._origins: dict[int, _Origin] = {}
        self._slots: dict[int, list[_Slot]] = {}
        self._seen: set[Fragment] = set()
        self._current = "nothing yet"
        for name, tensor in storages(module).items():
            self._slots.setdefault(_storage(tensor), []).append(_Slot(name, tensor))
        for slots in self._slots.values():
            slots.sort(key=lambda s: s.tensor.storage_offset())

    def run(self, load: Loader, metas: tuple[ParamMeta, ...]) -> None:
        try:
            with _in_this_thread(), torch.no_grad(), self:
                load(self._tensors(metas))
        except PlanError:
            raise
        except Exception as e:  # whatever the loader raises, it did not take this tensor
            raise PlanError(f"{self._current}: the module's loader fails: {type(e).__name__}: {e}") from e

    def _tensors(self, metas: tuple[ParamMeta, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in metas:
            self._current = meta.name
            tensor = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")
            self._origins[_storage(tensor)] = _Origin(meta.shape, meta, (), tensor)
            yield meta.name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        traced = [t for t in tensors if _storage(t) in self._origins]
        if func._schema.is_mutable:
            return self._mutation(func, args, kwargs, traced)
        if not traced or func.is_view or func is _aten._unsafe_view.default:  # the latter shares memory, too, and does not say so
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name in _SHAPES_ONLY:
            return func(*args, **kwargs)
        if func in _COPIES:
            return self._copied(func, args, kwargs)
        if func in _JOINS:
            return self._joined(func, *args, **kwargs)
        raise PlanError(f"{self._name(traced[0])}: the loader computes with it ({name}); weights can only be moved")

    def _mutation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], traced: list[torch.Tensor]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        written = _written(func, args, kwargs)
        ours = [t for t in written if _storage(t) in self._slots]
        if not ours and not traced:
            return func(*args, **kwargs)
        if func is _aten.copy_.default and ours and traced and traced[0] is args[1]:
            self._write(args[0], args[1])
            return args[0]
        if traced:
            where = "" if ours or any(t is w for t in traced for w in written) else " into a tensor that is none of the module's"
            raise PlanError(f"{self._name(traced[0])}: the loader computes with it ({name}{where}); weights can only be moved")
        if name not in _CONSTANTS:
            raise PlanError(
                f"{self._current}: the loader changes parameter {self._slot(ours[0]).name} by {name}; weights can only be moved"
            )
        for tensor in ours:
            slot = self._slot(tensor)
            self._cover(slot).fill(tensor.storage_offset() - slot.tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return written[0] if len(written) == 1 else tuple(written)

    def _write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        view, slot = self._view(source), self._slot(target)
        name = self._name(source)
        if source.dtype != target.dtype:
            raise PlanError(
                f"{name}: is {source.dtype} and parameter {slot.name} is {target.dtype}: weights are not converted on their way"
            )
        lengths = (1,) * (target.dim() - source.dim()) + view.lengths
        strides = (0,) * (target.dim() - source.dim()) + view.strides
        if lengths != tuple(target.shape):
            raise PlanError(f"{name}: a part of shape {list(view.lengths)} is copied into {list(target.shape)} of parameter {slot.name}")
        axes = [Axis(n, s, t) for n, s, t in zip(lengths, strides, target.stride(), strict=True)]
        to = target.storage_offset() - slot.tensor.storage_offset()
        try:
            for fragment in self._pieces(view.origin, axes, view.offset, to, slot):
                if fragment not in self._seen:  # loaded again, to the same place: once is enough
                    self._seen.add(fragment)
                    self.fragments.append(fragment)
                    extent = tuple(b - a for a, b in zip(fragment.lo, fragment.hi, strict=True))
                    item = fragment.meta.itemsize
                    self._cover(slot).load(fragment.meta.name, fragment.offset // item, extent, tuple(s // item for s in fragment.strides))
        except PlanError as e:
            raise PlanError(f"{name}, into parameter {slot.name}: {e}") from None

    def _pieces(self, origin: _Origin, axes: list[Axis], start: int, to: int, slot: _Slot) -> Iterator[Fragment]:
        """Fragments of what a storage without memory stands for, through however many copies it is made of."""
        for piece in boxes(origin.shape, axes, start, to):
            if (meta := origin.meta) is not None:
                buffer = slot.name
                if slot.tensor.dtype != getattr(torch, meta.dtype):
                    if slot.tensor.element_size() != meta.itemsize:
                        raise PlanError(f"{meta.name} is {meta.dtype}, and the parameter {slot.tensor.dtype}")
                    buffer = f"{slot.name}:{meta.dtype}"
                item = meta.itemsize
                yield Fragment(meta, piece.lo, piece.hi, buffer, piece.offset * item, tuple(s * item for s in piece.strides))
            for at, view in origin.parts:
                lo = [max(a, b) for a, b in zip(piece.lo, at, strict=True)]
                hi = [min(a, b + n) for a, b, n in zip(piece.hi, at, view.lengths, strict=True)]
                if all(a < b for a, b in zip(lo, hi, strict=True)):
                    inner = [Axis(b - a, s, t) for a, b, s, t in zip(lo, hi, view.strides, piece.strides, strict=True)]
                    begin = view.offset + sum((a - b) * s for a, b, s in zip(lo, at, view.strides, strict=True))
                    end = piece.offset + sum((a - b) * t for a, b, t in zip(lo, piece.lo, piece.strides, strict=True))
                    yield from self._pieces(view.origin, inner, begin, end, slot)

    def _copied(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        source = args[0]
        if (dtype := kwargs.get("dtype")) is not None and dtype != source.dtype:
            raise PlanError(f"{self._name(source)}: the loader converts it from {source.dtype} to {dtype}; weights can only be moved")
        out = _aten.clone.default(source, memory_format=kwargs.get("memory_format"))
        return self._derived(out, [((0,) * out.dim(), self._view(source))])

    def _joined(self, func: Any, tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
        if func is _aten.stack.default:
            tensors = [_aten.unsqueeze.default(t, dim) for t in tensors]
        for t in tensors:
            if _storage(t) not in self._origins:
                raise PlanError(f"{self._current}: the loader joins it with a tensor that is none of the model's")
        if len({t.dtype for t in tensors}) != 1:
            raise PlanError(f"{self._name(tensors[0])}: the loader joins tensors of several dtypes, and so converts them")
        out = _aten.cat.default(tensors, dim)
        dim %= out.dim()
        parts, at = [], 0
        for t in tensors:
            parts.append((tuple(at if i == dim else 0 for i in range(out.dim())), self._view(t)))
            at += t.shape[dim]
        return self._derived(out, parts)

    def _derived(self, out: torch.Tensor, parts: list[tuple[tuple[int, ...], _View]]) -> torch.Tensor:
        order = storage_order(out.shape, out.stride())
        if order is None:
            raise PlanError(f"{self._current}: the loader makes a copy of it with gaps")

        def turned(values: Iterable[int]) -> tuple[int, ...]:
            values = tuple(values)
            return tuple(values[i] for i in order)

        turned_parts = tuple((turned(at), _View(v.origin, v.offset, turned(v.lengths), turned(v.strides))) for at, v in parts)
        self._origins[_storage(out)] = _Origin(turned(out.shape), None, turned_parts, out)
        return out

    def _view(self, tensor: torch.Tensor) -> _View:
        origin = self._origins[_storage(tensor)]
        if tensor.element_size() != origin.keep.element_size():
            raise PlanError(f"{self._name(tensor)}: the loader takes {origin.keep.dtype} for {tensor.dtype}, of another size")
        return _View(origin, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())

    def _slot(self, tensor: torch.Tensor) -> _Slot:
        slots = self._slots[_storage(tensor)]
        slot = next((s for s in reversed(slots) if s.tensor.storage_offset() <= tensor.storage_offset()), slots[0])
        if tensor.element_size() != slot.tensor.element_size():
            raise PlanError(
                f"{self._current}: the loader takes {slot.tensor.dtype} of parameter {slot.name} for {tensor.dtype}, of another size"
            )
        return slot

    def _cover(self, slot: _Slot) -> Coverage:
        if slot.coverage is None:
            slot.coverage = Coverage(slot.name, tuple(slot.tensor.shape), slot.tensor.stride())
        return slot.coverage

    def _name(self, tensor: torch.Tensor) -> str:
        """Of the tensor of the model that it is, or was made of."""
        origin = self._origins[_storage(tensor)]
        while origin.meta is None:
            origin = origin.parts[0][1].origin
        return origin.meta.name

    def check(self, ignore: set[str]) -> None:
        """Every parameter is still where it was, and loaded whole."""
        now = storages(self._module)
        slots = [s for slots in self._slots.values() for s in slots]
        if moved := [s.name for s in slots if s.name not in now or _storage(now[s.name]) != _storage(s.tensor)]:
            raise PlanError(f"the loader puts other memory in the place of {len(moved)} parameters: {', '.join(moved[:5])}")
        parameters = {name for name, _ in self._module.named_parameters()}
        missing = []
        for slot in slots:
            if slot.name in ignore or (slot.coverage is None and slot.name not in parameters) or not slot.tensor.numel():
                continue
            if gap := self._cover(slot).gap():
                missing.append(f"{slot.name}{gap}")
        if missing:
            raise PlanError(f"the loader leaves {len(missing)} parameters unloaded, or parts of them: {'; '.join(missing[:5])}")


@contextlib.contextmanager
def _in_this_thread() -> Iterator[None]:
    """What the loader gives to a pool of threads is done at once: only what this thread does is watched."""
    with _one_at_a_time:
        me, submit = threading.get_ident(), ThreadPoolExecutor.submit

        def done(pool: ThreadPoolExecutor, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if threading.get_ident() != me:
                return submit(pool, task, *args, **kwargs)
            future: Future[Any] = Future()
            try:
                future.set_result(task(*args, **kwargs))
            except Exception as e:
                future.set_exception(e)
            return future

        ThreadPoolExecutor.submit = done  # type: ignore[method-assign]
        try:
            yield
        finally:
            ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    out = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            out += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return out
