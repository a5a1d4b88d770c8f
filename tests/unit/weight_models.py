"""Random models, random layouts of them, and random ways in which a rank stores its part."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.source import StateDictSource

GUARD = 0x5A  # what is in memory that belongs to no weight
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Param:
    """A tensor, and how parallelism may cut it."""

    meta: ParamMeta
    dim: int | None = None
    """That tensor parallelism cuts."""
    expert: int | None = None
    block: int = 1
    """Sources cut at multiples of it."""
    scales: str = ""
    """The weight that it holds the scales of: it is cut where that is, and rows at a cut are on both sides."""
    tied: str = ""
    """It is the same tensor as that one."""


@dataclass(frozen=True)
class Model:
    params: tuple[Param, ...]
    layers: int
    experts: int


@st.composite
def models(draw) -> Model:
    """Dense with grouped queries, latent attention, experts, block scales; odd sizes, and tensors of every kind that is rare."""
    h, layers, experts = draw(st.integers(2, 12)), draw(st.integers(1, 2)), draw(st.sampled_from([0, 0, 2, 3]))
    dtype = draw(st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"]))
    latent, fp8, tied = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    vocabulary, inner, heads = draw(st.integers(3, 37)), draw(st.integers(2, 17)), draw(st.integers(1, 4))
    groups = draw(st.integers(1, heads))
    block = draw(st.sampled_from([2, 4]))
    out: list[Param] = []

    def add(name: str, *shape: int, dim: int | None = None, kind: str = dtype, expert: int | None = None) -> None:
        out.append(Param(ParamMeta(name, kind, shape), dim, expert))

    def linear(name: str, rows: int, columns: int, dim: int | None, expert: int | None = None) -> None:
        if not fp8:
            add(f"{name}.weight", rows, columns, dim=dim, expert=expert)
            return
        out.append(Param(ParamMeta(f"{name}.weight", "float8_e4m3fn", (rows, columns)), dim, expert, block))
        scale = ParamMeta(f"{name}.weight_scale_inv", "float32", (-(-rows // block), -(-columns // block)))
        out.append(Param(scale, dim, expert, block, scales=f"{name}.weight"))

    def gated(at: str, width: int, expert: int | None = None) -> None:
        linear(f"{at}.gate_proj", width, h, 0, expert)
        linear(f"{at}.up_proj", width, h, 0, expert)
        linear(f"{at}.down_proj", h, width, 1, expert)

    add("model.embed_tokens.weight", vocabulary, h, dim=0)
    for n in range(layers):
        at = f"model.layers.{n}"
        add(f"{at}.input_layernorm.weight", h, kind=draw(st.sampled_from([dtype, "float32"])))
        if latent:
            linear(f"{at}.self_attn.q_a_proj", 6, h, None)
            linear(f"{at}.self_attn.q_b_proj", heads * 6, 6, 0)
            linear(f"{at}.self_attn.kv_a_proj_with_mqa", 7, h, None)
            linear(f"{at}.self_attn.kv_b_proj", heads * 8, 5, 0)
        else:
            linear(f"{at}.self_attn.q_proj", heads * 4, h, 0)
            linear(f"{at}.self_attn.k_proj", groups * 4, h, 0)
            linear(f"{at}.self_attn.v_proj", groups * 4, h, 0)
            add(f"{at}.self_attn.q_proj.bias", heads * 4, dim=0)
        linear(f"{at}.self_attn.o_proj", h, heads * 4, 1)
        if experts and n:
            add(f"{at}.mlp.gate.weight", experts, h)
            add(f"{at}.mlp.gate.e_score_correction_bias", experts, kind="float32")
            for e in range(experts):
                gated(f"{at}.mlp.experts.{e}", inner, e)
            gated(f"{at}.mlp.shared_experts", inner)
        else:
            gated(f"{at}.mlp", inner)
    add("model.norm.weight", h)
    add("lm_head.weight", vocabulary, h, dim=0)
    if tied:
        out[-1] = replace(out[-1], tied="model.embed_tokens.weight")
    rare = {
        "scalar": ((), "float32"),
        "empty": ((0, h), "bfloat16"),
        "zeros": ((h, 3), "int8"),
        "mask": ((5, 7), "bool"),
        "steps": ((), "int64"),
        "conv": ((3, 2, 2, 5), "float16"),
        "e8m0": ((9,), "float8_e8m0fnu"),
        "twos": ((4, 3), "float8_e5m2"),
        "bytes": ((1, 11, 1), "uint8"),
        "wide": ((2, 3), "float64"),
    }
    for name in draw(st.lists(st.sampled_from(sorted(rare)), unique=True, max_size=4)):
        add(f"model.extra.{name}", *rare[name][0], kind=rare[name][1], dim=0 if len(rare[name][0]) > 1 else None)
    return Model(tuple(out), layers, experts)


class Weights:
    """The whole model, as nobody holds it."""

    def __init__(self, model: Model, seed: int) -> None:
        self.model, self._rng = model, np.random.default_rng(seed)
        self.tensors = {p.meta.name: torch.zeros(p.meta.shape, dtype=getattr(torch, p.meta.dtype)) for p in model.params}
        self.change("all")

    def change(self, how: str) -> None:
        """Other bits in "all", "some" (of some tensors a few), "tensor" (one) or "none" of the elements; whatever bits."""
        names = [p.meta.name for p in self.model.params if not p.tied and self.tensors[p.meta.name].numel()]
        if how in ("tensor", "some"):
            names = self._rng.choice(names, 1 if how == "tensor" else -(-len(names) // 3), replace=False).tolist()
        for name in names if how != "none" else ():
            tensor = self.tensors[name]
            raw = tensor.view(-1).view(torch.uint8).numpy().reshape(tensor.numel(), -1)
            rows = np.flatnonzero(self._rng.random(len(raw)) < 0.1) if how == "some" else np.arange(len(raw))
            raw[rows] = self._rng.integers(0, 2 if tensor.dtype == torch.bool else 256, raw[rows].shape, np.uint8)
        for p in self.model.params:
            if p.tied:
                self.tensors[p.meta.name].view(-1).view(torch.uint8).copy_(self.tensors[p.tied].view(-1).view(torch.uint8))


@dataclass(frozen=True)
class Layout:
    """For each rank its boxes, by key: name and box."""

    ranks: tuple[Mapping[str, tuple[Param, Box]], ...]


@st.composite
def layouts(draw, model: Model, *, source: bool, most: int = 4) -> Layout:
    """Grids of TP x PP x EP x DP with even or uneven cuts; or each tensor cut on its own along all dimensions, its parts spread at will.

    A source's boxes are disjoint or the same; a target's may overlap."""
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    if draw(st.integers(0, 3)) == 0:
        return _scattered(model, rng, draw(st.integers(1, most)), source)
    grids = [g for g in itertools.product(range(1, 4), range(1, model.layers + 1), (1, 2), (1, 2)) if math.prod(g) <= most]
    tp, pp, ep, dp = draw(st.sampled_from(grids))
    return _grid(model, rng, tp, pp, ep if model.experts else 1, dp, uneven=draw(st.booleans()), source=source)


def _edges(rng: random.Random, length: int, parts: int, uneven: bool, step: int) -> list[int]:
    """Where a length is cut; some parts may be empty."""
    inner = sorted(rng.randint(0, length) for _ in range(parts - 1)) if uneven else [length * i // parts for i in range(1, parts)]
    return [0, *(min(length, i // step * step) for i in inner), length]


def _cut(param: Param, edges: list[int], part: int) -> Box:
    shape = param.meta.shape
    lo, hi = [0] * len(shape), list(shape)
    if param.dim is not None:
        a, b = edges[part], edges[part + 1]
        if param.scales:
            a, b = a // param.block, -(-b // param.block) if b > a else a // param.block
        lo[param.dim], hi[param.dim] = a, b
    return tuple(lo), tuple(hi)


def _grid(model: Model, rng: random.Random, tp: int, pp: int, ep: int, dp: int, *, uneven: bool, source: bool) -> Layout:
    stages = _edges(rng, model.layers, pp, uneven, 1)
    experts = _edges(rng, model.experts, ep, uneven, 1)
    edges: dict[str, list[int]] = {}
    for p in model.params:
        if p.dim is not None and not p.scales:
            edges[p.meta.name] = edges.get(p.tied) or _edges(rng, p.meta.shape[p.dim], tp, uneven, p.block if source else 1)
    ranks = []
    for _, e, s, t in itertools.product(range(dp), range(ep), range(pp), range(tp)):
        here = {}
        for p in model.params:
            layer = p.meta.layer
            ends = 0 if layer < 0 and ("embed" in p.meta.name or "extra" in p.meta.name) else model.layers - 1
            layer = layer if layer >= 0 else ends
            last = max(i for i in range(pp) if stages[i] <= layer)
            if last != s or (p.expert is not None and not experts[e] <= p.expert < experts[e + 1]):
                continue
            here[p.meta.name] = p, _cut(p, edges.get(p.scales or p.meta.name, []), t)
        ranks.append(here)
    return Layout(tuple(ranks))


def _scattered(model: Model, rng: random.Random, ranks: int, source: bool) -> Layout:
    out: list[dict[str, tuple[Param, Box]]] = [{} for _ in range(ranks)]
    for p in model.params:
        edges = [_edges(rng, n, rng.randint(1, 3), True, 1) for n in p.meta.shape]
        for number, cell in enumerate(itertools.product(*(itertools.pairwise(e) for e in edges))):
            lo, hi = tuple(a for a, _ in cell), tuple(b for _, b in cell)
            for rank in rng.sample(range(ranks), rng.randint(1, ranks)):
                more = [rng.randint(0, 1) for _ in lo] if not source and math.prod(b - a for a, b in cell) else [0] * len(lo)
                wider = tuple(max(0, a - m) for a, m in zip(lo, more, strict=True)), hi
                out[rank][f"{p.meta.name}#{number}"] = p, wider
    return Layout(tuple(out))


class Part:
    """What one rank holds: tensors that lie packed, transposed, with gaps, or side by side in one piece of memory."""

    def __init__(self, held: Mapping[str, tuple[Param, Box]], seed: int) -> None:
        rng = random.Random(seed)
        self.held, self.views, self._memory = held, {}, []
        items = sorted(held)
        rng.shuffle(items)
        firsts: dict[tuple[str, Box], str] = {}
        flat: dict[str, torch.Tensor] = {}
        for key in items:
            param, (lo, hi) = held[key]
            same = firsts.setdefault((param.tied or param.meta.name, (lo, hi)), key)
            extents = [b - a for a, b in zip(lo, hi, strict=True)]
            self.views[key] = self.views[same] if same != key else self._stored(extents, getattr(torch, param.meta.dtype), rng, flat)
        boxes = {key: (p.meta.shape, lo, p.meta.name) for key, (p, (lo, _)) in held.items()}
        self.shard = StateDictSource(self.views, boxes)

    def _stored(self, extents: list[int], dtype: torch.dtype, rng: random.Random, flat: dict[str, torch.Tensor]) -> torch.Tensor:
        how = rng.choice(["packed", "transposed", "gaps", "together"])
        n = math.prod(extents)
        if how == "together":  # one after the other in one storage, as an optimizer's flat buffers
            there = flat.get(str(dtype))
            if there is None or there.numel() < n:
                there = flat[str(dtype)] = self._fresh([n + 64], dtype)
            flat[str(dtype)] = there[n:]
            return there[:n].view(extents)
        order = rng.sample(range(len(extents)), len(extents)) if how == "transposed" else list(range(len(extents)))
        steps = [rng.randint(1, 2) if how == "gaps" else 1 for _ in extents]
        whole = self._fresh([extents[i] * steps[i] for i in order], dtype)
        whole = whole.permute([order.index(i) for i in range(len(extents))])
        return whole[tuple(slice(None, None, s) for s in steps)]

    def _fresh(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        raw = torch.full((math.prod(shape) * dtype.itemsize,), GUARD, dtype=torch.uint8)
        self._memory.append(raw)
        return raw.view(dtype).view(shape)

    def fill(self, weights: Weights) -> None:
        for key, want in self._wanted(weights):
            self.views[key].copy_(want)

    def has(self, weights: Weights) -> str:
        """The first of its tensors that is not, bit for bit, what it should be; "" if all are, and nothing beside them was written."""
        before = [m.clone() for m in self._memory]
        wrong = [key for key, want in self._wanted(weights) if not torch.equal(bits(self.views[key]), bits(want))]
        if wrong:
            return f"{wrong[0]} of {len(wrong)}"
        for view in self.views.values():  # what is left without the weights is what was there before anything came
            _clear(view)
        clean = all(bool((m == GUARD).all()) for m in self._memory)
        for m, was in zip(self._memory, before, strict=True):
            m.copy_(was)
        return "" if clean else "bytes beside the weights were written"

    def snapshot(self) -> list[torch.Tensor]:
        """All of its memory."""
        return [m.clone() for m in self._memory]

    def is_as(self, snapshot: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self._memory, snapshot, strict=True))

    def _wanted(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for key, (param, (lo, hi)) in self.held.items():
            yield key, weights.tensors[param.meta.name][tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _clear(view: torch.Tensor) -> None:
    item = view.element_size()
    if view.numel():
        raw = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
        lengths, strides = [*view.shape, item], [*(s * item for s in view.stride()), 1]
        torch.as_strided(raw, lengths, strides, view.storage_offset() * item).fill_(GUARD)
