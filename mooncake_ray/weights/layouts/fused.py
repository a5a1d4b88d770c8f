"""From an engine's table to fragments: what each parameter of a rank is, worked out from its name and shape."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.coverage import Coverage
from mooncake_ray.weights.layouts.serving import EngineRank, Shapes, Table, experts_of, setting
from mooncake_ray.weights.meta import ITEMSIZE, ParamMeta
from mooncake_ray.weights.placement import Fragment

__all__ = ["fused_fragments"]

_SCALES = "weight_scale_inv"
_VOCABULARY = ("embed_tokens", "lm_head")
_KV = ("k_proj", "v_proj")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_NAMES = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}


def fused_fragments(
    table: Table, config: Any, metas: Iterable[ParamMeta], parameters: Shapes, rank: EngineRank, ignore: Collection[str] = ()
) -> list[Fragment]:
    """The fragments of one rank of an engine. A pure function: no module needs to be there.

    Args:
        config: as Hugging Face has it, a mapping or an object: `tie_word_embeddings`, `quantization_config["weight_block_size"]`.
        metas: the tensors of the model.
        parameters: what the rank has; C order.
        ignore: parameters that get nothing.

    Raises:
        PlanError: a parameter is no tensor of the model, or its shape is none that the table explains; or a rank's rows are cut so that blocks
            of its parameter are not blocks of the whole, so the scales cannot be the same. Names up to five of them.
    """
    fit = _Fit(table, config, metas, rank)
    wrong = []
    for name, (shape, dtype) in parameters.items():
        if name in ignore:
            continue
        try:
            fit.add(name, shape, dtype, parameters)
        except PlanError as e:
            wrong.append(str(e))
    if wrong:
        raise PlanError(f"{len(wrong)} parameters of the engine are not understood: {'; '.join(wrong[:5])}")
    return fit.fragments


class _Fit:
    def __init__(self, table: Table, config: Any, metas: Iterable[ParamMeta], rank: EngineRank) -> None:
        self.fragments: list[Fragment] = []
        self._table, self._rank = table, rank
        self._metas = {m.name: m for m in metas}
        self._tied = bool(setting(config, "tie_word_embeddings", default=False))
        blocks = setting(setting(config, "quantization_config", default={}), "weight_block_size", default=(128, 128))
        self._blocks = tuple(blocks)
        self._experts: dict[str, int] = {}
        for name, meta in self._metas.items():
            if found := _EXPERT.search(name):
                at = name[: found.start()]
                self._experts[at] = max(self._experts.get(at, 0), int(found[1]) + 1)
            elif name.endswith(".experts.gate_up_proj"):
                self._experts[name.removesuffix(".experts.gate_up_proj")] = meta.shape[0]

    def add(self, name: str, shape: tuple[int, ...], dtype: str, parameters: Shapes) -> None:
        own = _Parameter(name, shape, dtype)
        plain = self._table.rename(name)
        module, _, leaf = plain.rpartition(".")
        at, _, last = module.rpartition(".")
        stacked = self._stacked(plain)
        if stacked is not None and stacked[0] not in self._metas:
            self._add_experts(own, *stacked[1:])
        elif last in self._table.fused and plain not in self._metas:
            self._add_fused(own, [f"{at}.{part}.{leaf}" for part in self._table.fused[last]], last)
        else:
            self._add_plain(own, self._canonical(plain), parameters.get(f"{name.removesuffix(leaf)}weight"))
        self.fragments += own.finished()

    def _canonical(self, name: str) -> str:
        if name not in self._metas and self._tied and name == "lm_head.weight":
            return "model.embed_tokens.weight"
        return name

    def _meta(self, name: str, own: _Parameter) -> ParamMeta:
        if name not in self._metas:
            raise PlanError(f"{own.name}: the model has no {name}")
        return self._metas[name]

    # One tensor

    def _add_plain(self, own: _Parameter, name: str, weight: tuple[tuple[int, ...], str] | None) -> None:
        meta = self._meta(name, own)
        module, _, leaf = name.rpartition(".")
        last = module.rpartition(".")[2]
        if len(own.shape) != len(meta.shape):
            raise PlanError(f"{own.name}: has shape {list(own.shape)}, the model's {name} {list(meta.shape)}")
        if last in _VOCABULARY and leaf == "weight":
            me, ranks = self._rank.part("vocabulary")
            rows, there = own.shape[0], meta.shape[0]
            if rows * ranks < there or own.shape[1:] != meta.shape[1:]:
                raise PlanError(f"{own.name}: {ranks} times {list(own.shape)} does not hold {name}, {list(meta.shape)}")
            first = min(me * rows, there)
            own.put(meta, (first, 0), (min(rows, there - first), own.shape[1]), (0, 0))
            own.padded = True
            return
        if leaf == _SCALES and weight is not None:
            whole = self._meta(f"{module}.weight", own)
            lo = self._lo(own, whole.shape, weight[0], name)
            spans = [self._scales(own, a, n, size, b) for a, n, size, b in zip(lo, weight[0], whole.shape, self._blocks, strict=True)]
            own.put(meta, tuple(a for a, _ in spans), tuple(n for _, n in spans), (0,) * len(spans))
        else:
            own.put(meta, self._lo(own, meta.shape, own.shape, name), own.shape, (0,) * len(own.shape))

    def _lo(self, own: _Parameter, whole: tuple[int, ...], local: tuple[int, ...], name: str) -> tuple[int, ...]:
        """Where the rank's part begins. A dimension is split where it is shorter than that of the whole."""
        kind = "attention" if ".self_attn." in name or ".attn." in name else "tp"
        me, ranks = self._rank.part(kind)
        lo = [0] * len(whole)
        split = [i for i, (n, size) in enumerate(zip(local, whole, strict=True)) if n != size]
        if len(split) > 1:
            raise PlanError(f"{own.name}: {list(local)} is split along {len(split)} dimensions of {list(whole)}")
        for dim in split:
            copies = 1
            if local[dim] * ranks > whole[dim] and name.rpartition(".")[0].rpartition(".")[2] in _KV:
                copies = local[dim] * ranks // whole[dim]
            if local[dim] * ranks != whole[dim] * copies:
                raise PlanError(f"{own.name}: {ranks} times {list(local)} is not {name}, {list(whole)}")
            lo[dim] = me // copies * local[dim]
        return tuple(lo)

    def _scales(self, own: _Parameter, first: int, length: int, whole: int, block: int) -> tuple[int, int]:
        """Which scales elements `[first, first + length)` of a dimension need: (the first, how many). A cut within a block gives the block's
        scale to both sides."""
        inside = first % block
        if inside and inside + length > block:
            raise PlanError(
                f"{own.name}: elements {first} to {first + length} of {whole} begin within a block of {block} and go on in the next one, so the"
                " rank's blocks are not the whole's: weights and scales would have to be computed anew"
            )
        return first // block, -(-length // block)

    # Several tensors, one after the other

    def _add_fused(self, own: _Parameter, names: list[str], last: str) -> None:
        metas = [self._meta(n, own) for n in names]
        leaf = names[0].rpartition(".")[2]
        if own.shape == (len(metas),) and not any(m.shape for m in metas):  # one number for each, such as a scale of the whole tensor
            for i, meta in enumerate(metas):
                own.put(meta, (), (), (i,))
            return
        if any(not m.shape or m.shape[1:] != own.shape[1:] for m in metas):
            raise PlanError(f"{own.name}: {list(own.shape)} is not made of {', '.join(f'{m.name} {list(m.shape)}' for m in metas)}")
        kind = "attention" if ".self_attn." in names[0] or ".attn." in names[0] else "tp"
        me, ranks = self._rank.part(kind)
        scaled = leaf == _SCALES
        wholes = [self._meta(f"{n.removesuffix(leaf)}weight", own).shape[0] for n in names] if scaled else [m.shape[0] for m in metas]
        if own.shape[0] == sum(m.shape[0] for m in metas):
            me, ranks = 0, 1  # not split, whatever the group
        copies = [1] * len(names)
        block = self._blocks[0] if scaled else 1
        if last == "qkv_proj" and ranks > 1:
            copies[1] = copies[2] = self._kv_copies(own, wholes, ranks, block)
        if any(n * k % ranks for n, k in zip(wholes, copies, strict=True)):
            raise PlanError(f"{own.name}: rows {wholes} cannot be split over {ranks}")
        local = [n * k // ranks for n, k in zip(wholes, copies, strict=True)]
        if sum(-(-n // block) for n in local) != own.shape[0]:
            raise PlanError(f"{own.name}: has {own.shape[0]} rows, where {ranks} ranks with {local} of {', '.join(names)} are expected")
        to = 0
        for i, (meta, n) in enumerate(zip(metas, local, strict=True)):
            first, rows = me // copies[i] * n, n
            if scaled:
                if n % block and i + 1 < len(local):
                    raise PlanError(
                        f"{own.name}: {n} rows of {meta.name} are no whole blocks of {block}, and others follow in the same parameter"
                    )
                first, rows = self._scales(own, first, n, wholes[i], block)
            own.put(meta, (first, *(0,) * (len(meta.shape) - 1)), (rows, *meta.shape[1:]), (to, *(0,) * (len(meta.shape) - 1)))
            to += rows

    def _kv_copies(self, own: _Parameter, wholes: list[int], ranks: int, block: int) -> int:
        """How many ranks have the same heads of keys and values: where there are more ranks than heads."""
        rows = (own.shape[0] * block - wholes[0] // ranks) // 2
        return max(1, -(-rows * ranks // wholes[1])) if rows * ranks > wholes[1] else 1

    # Experts

    def _stacked(self, name: str) -> tuple[str, str, str, str] | None:
        """(Its name, what the experts belong to, w13 or w2, what their tensors' names end with) of a parameter of all experts."""
        at, dot, rest = name.partition(".experts.")
        for which, forms in (("w13", self._table.w13), ("w2", self._table.w2)):
            for form in forms:
                leaf = next((leaf for leaf in ("weight", _SCALES, "bias") if rest == form.format(leaf=leaf)), None)
                if dot and leaf is not None:
                    return name, at, which, leaf
        return None

    def _add_experts(self, own: _Parameter, at: str, which: str, leaf: str) -> None:
        if at not in self._experts:
            raise PlanError(f"{own.name}: the model has no {at}.experts.0, 1, …")
        count = self._experts[at]
        here = experts_of(count, self._rank, self._table.shared)
        if own.shape[0] != len(here):
            raise PlanError(f"{own.name}: has {own.shape[0]} experts, where {len(here)} of {count} are expected on rank {self._rank.ep}")
        parts = ("down",) if which == "w2" else ("up", "gate") if self._table.up_first else ("gate", "up")
        for slot, expert in enumerate(here):
            to = 0
            for part in parts:
                to += self._add_expert(own, at, expert, count, part, leaf, slot, to)

    def _add_expert(self, own: _Parameter, at: str, expert: int, count: int, part: str, leaf: str, slot: int, to: int) -> int:
        """Returns how many rows it took."""
        base = f"{at}.experts.{expert}" if expert < count else f"{at}.shared_experts"
        module = next((f"{base}.{n}" for n in _NAMES[part] if f"{base}.{n}.{leaf}" in self._metas), None)
        stack = self._metas.get(f"{at}.experts.{'down_proj' if part == 'down' else 'gate_up_proj'}")
        outer: tuple[int, ...] = ()
        row = 0
        if module is not None:
            meta = self._metas[f"{module}.{leaf}"]
            shape, whole = meta.shape, self._meta(f"{module}.weight", own).shape
        elif stack is not None and len(stack.shape) == 3 and leaf == "weight" and expert < count:
            meta, outer = stack, (expert,)
            shape = whole = stack.shape[1:] if part == "down" else (stack.shape[1] // 2, stack.shape[2])
            row = shape[0] if part == "up" else 0
        else:
            raise PlanError(f"{own.name}: the model has no {base}.{_NAMES[part][0]}.{leaf}")
        me, ranks = self._rank.part("expert_tp")
        lo, extent = [0] * len(shape), list(shape)
        dim = 1 if part == "down" else 0
        if dim < len(shape):  # the bias of a down projection is not split
            if whole[dim] % ranks:
                raise PlanError(f"{own.name}: {meta.name}, {list(whole)}, cannot be split over {ranks}")
            n = whole[dim] // ranks
            lo[dim], extent[dim] = me * n, n
            if leaf == _SCALES:
                block = self._blocks[dim]
                if dim == 0 and n % block:
                    raise PlanError(f"{own.name}: {n} rows of {meta.name} are no whole blocks of {block}, and others follow them")
                lo[dim], extent[dim] = self._scales(own, me * n, n, whole[dim], block)
        lo[0] += row
        inner = (to, *(0,) * (len(own.shape) - 2))
        own.put(meta, (*outer, *lo), (*(1,) * len(outer), *extent), (slot, *inner))
        return extent[0]


class _Parameter:
    """One of the engine's, and what is put into it."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self.padded = False
        """Whether something may stay empty."""
        self._fragments: list[Fragment] = []
        self._steps = [1] * len(shape)
        for i in reversed(range(len(shape) - 1)):
            self._steps[i] = self._steps[i + 1] * shape[i + 1]
        self._coverage = Coverage(name, shape, tuple(self._steps))

    def put(self, meta: ParamMeta, lo: tuple[int, ...], extent: tuple[int, ...], to: tuple[int, ...]) -> None:
        """The box `[lo, lo + extent)` of a tensor begins at `to` in the parameter."""
        if meta.dtype != self.dtype and ITEMSIZE.get(self.dtype) != meta.itemsize:
            raise PlanError(f"{self.name}: is {self.dtype}, the model's {meta.name} {meta.dtype}")
        d = len(meta.shape)
        if any(a + n > size for a, n, size in zip(to[len(to) - d :], extent, self.shape[len(self.shape) - d :], strict=True)):
            raise PlanError(f"{self.name}: {list(extent)} of {meta.name} at {list(to)} is more than there is in {list(self.shape)}")
        if not all(extent):
            return
        buffer = self.name if meta.dtype == self.dtype else f"{self.name}:{meta.dtype}"
        offset = sum(a * s for a, s in zip(to, self._steps, strict=True))
        strides = tuple(self._steps[len(self._steps) - d :])
        hi = tuple(a + n for a, n in zip(lo, extent, strict=True))
        self._fragments.append(Fragment(meta, lo, hi, buffer, offset * meta.itemsize, tuple(s * meta.itemsize for s in strides)))
        self._coverage.load(meta.name, offset, extent, strides)

    def finished(self) -> list[Fragment]:
        gap = self._coverage.gap()
        if gap and not self.padded:
            raise PlanError(f"{self.name}{gap} is nothing of the model")
        return self._fragments
