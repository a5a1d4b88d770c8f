"""Placements of layouts that are described by numbers, with no model there: for planning ahead, and for measuring the planner.

A trainer is laid out as Megatron does it, an engine as vLLM and SGLang do. Every rank's boxes lie packed in one buffer a dtype, in the order of
the tensors' names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from mooncake_ray.errors import ConfigError
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.models import Config, Tensor, tensors_of
from mooncake_ray.weights.placement import Placement, packed_strides
from mooncake_ray.weights.topology import Topology

__all__ = ["Parallel", "described", "joined", "on_hosts"]


@dataclass(frozen=True)
class Parallel:
    """Sizes of the parallel groups. There are tp x cp x dp x pp ranks; experts have (tp x cp x dp) / (ep x etp) replicas."""

    tp: int = 1
    """Tensor parallelism, of all but routed experts."""
    pp: int = 1
    ep: int = 1
    etp: int = 0
    """Tensor parallelism of routed experts; 0: `tp`, but 1 for an engine with expert parallelism."""
    dp: int = 1
    cp: int = 1
    vpp: int = 1
    """Stages of the model that each rank of a pipeline has."""

    @classmethod
    def parse(cls, text: str) -> Parallel:
        """From "tp=8,ep=32,dp=4".

        Raises:
            ConfigError: that is not what it is.
        """
        names = [f.name for f in fields(cls)]
        given: dict[str, int] = {}
        for item in filter(None, text.replace(" ", "").split(",")):
            found = re.fullmatch(r"([a-z]+)=?([0-9]+)", item)
            if not found or found[1] not in names or int(found[2]) < 1 or found[1] in given:
                raise ConfigError(f"{text!r} is not a layout: {item!r} is not one of {', '.join(names)} with a number from 1, each once")
            given[found[1]] = int(found[2])
        return cls(**given)

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def __str__(self) -> str:
        shown = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) > 1]
        return ",".join(shown) or "tp=1"


def described(config: Config, parallel: Parallel, *, engine: bool, dtype: str | None = None) -> Placement:
    """What each rank of a layout holds of a model.

    Args:
        engine: whether it is that of an inference engine, whose ranks are named "e0/0" (engine 0, rank 0), …; else of a trainer, "trainer/0", ….

    Raises:
        ConfigError: the model's sizes cannot be divided that way.
    """
    if not parallel.etp:
        parallel = replace(parallel, etp=1 if engine and parallel.ep > 1 else parallel.tp)
    stage_ranks = parallel.tp * parallel.cp * parallel.dp
    if stage_ranks % (parallel.ep * parallel.etp):
        raise ConfigError(f"{stage_ranks} ranks of a stage cannot be divided into groups of ep x etp = {parallel.ep} x {parallel.etp}")
    tensors = sorted(tensors_of(config, dtype), key=lambda t: t.meta)
    table = _Table(config, tensors, parallel, engine)
    parts = [table.of(stage, inner) for stage in range(parallel.pp) for inner in range(stage_ranks)]
    names = [_name(parallel, stage, inner, engine) for stage in range(parallel.pp) for inner in range(stage_ranks)]
    tensor, lo, hi = (np.concatenate(a) for a in zip(*parts, strict=True))
    rank = np.repeat(np.arange(len(parts), dtype=np.int32), [len(p[0]) for p in parts])
    dtypes = tuple(sorted({t.meta.dtype for t in tensors}))
    buffer = np.array([dtypes.index(t.meta.dtype) for t in tensors], np.int32)[tensor]
    itemsize = np.array([t.meta.itemsize for t in tensors], np.int64)[tensor]
    nbytes = np.prod(hi - lo, axis=1) * itemsize
    padded = -(-nbytes // 64) * 64
    line = np.argsort(rank * np.int64(len(dtypes)) + buffer, kind="stable")
    ends = np.cumsum(padded[line])
    before = ends - padded[line]
    new = np.ones(len(line), bool)
    new[1:] = (rank[line][1:] != rank[line][:-1]) | (buffer[line][1:] != buffer[line][:-1])
    offset = np.empty(len(line), np.int64)
    offset[line] = before - np.maximum.accumulate(np.where(new, before, 0))
    metas = tuple(t.meta for t in tensors)
    return Placement(
        metas, tuple(names), dtypes, tensor.astype(np.int32), rank, lo, hi, buffer, offset, packed_strides(hi - lo, itemsize)
    )  # fmt: skip


def on_hosts(ranks: Sequence[str], each: int, name: str, racks: int = 0) -> tuple[dict[str, str], dict[str, str]]:
    """(host of each rank, rack of each host): `each` ranks a host, and `racks` hosts a rack (0: no racks)."""
    n = -(-len(ranks) // each)
    names = [f"{name}-{i:0{len(str(max(0, n - 1)))}}" for i in range(n)]  # so that they sort
    hosts = {rank: names[i // each] for i, rank in enumerate(ranks)}
    return hosts, {host: f"rack of {names[i // racks * racks]}" for i, host in enumerate(names)} if racks else {}


def joined(*parts: tuple[dict[str, str], dict[str, str]], nics: int = 0) -> Topology:
    """A topology of what `on_hosts` gave."""
    return Topology({k: v for hosts, _ in parts for k, v in hosts.items()}, {k: v for _, racks in parts for k, v in racks.items()}, nics)


def _name(parallel: Parallel, stage: int, inner: int, engine: bool) -> str:
    if not engine:
        return f"trainer/{inner + parallel.tp * parallel.cp * parallel.dp * stage}"
    size = parallel.tp * parallel.cp * max(1, -(-parallel.ep * parallel.etp // (parallel.tp * parallel.cp)))
    return f"e{inner // size}/{stage * size + inner % size}"


class _Table:
    """A model's tensors as arrays, and what of them each rank has."""

    def __init__(self, config: Config, tensors: list[Tensor], parallel: Parallel, engine: bool) -> None:
        self.config, self.parallel, self.engine = config, parallel, engine
        metas = [t.meta for t in tensors]
        self.tensors, self.d = tensors, max(len(m.shape) for m in metas)
        self.shape = np.array([(1,) * (self.d - len(m.shape)) + m.shape for m in metas], np.int64)
        self.axis = np.array([t.axis + self.d - len(t.meta.shape) if t.axis >= 0 else -1 for t in tensors], np.int64)
        self.expert = np.array([t.expert for t in tensors], np.int64)
        self.part = np.array([t.part for t in tensors], object)
        self.stage = self._stages(metas)
        routed = self.expert >= 0
        experts = int(self.expert.max(initial=-1)) + 1
        if experts % parallel.ep or (experts == 0 and parallel.ep > 1):
            raise ConfigError(f"{experts} experts cannot be divided among ep={parallel.ep}")
        self.group = np.where(routed, self.expert // max(1, experts // parallel.ep), -1)
        self.ways = np.where(routed, parallel.etp, parallel.tp)
        heads = np.isin(self.part, ["q", "k", "v"])
        self.attention = np.flatnonzero(heads)
        cut = (self.axis >= 0) & ~heads
        length = self.shape[np.arange(len(metas)), self.axis]
        vocab = np.isin(self.part, ["first", "last"])
        bad = np.flatnonzero(cut & ~vocab & (length % self.ways != 0))
        if len(bad):
            raise ConfigError(
                f"{metas[bad[0]].name} has {length[bad[0]]} rows or columns, which {self.ways[bad[0]]} ranks cannot share evenly"
            )
        # What a rank has of a vocabulary is a part of it padded; the padding is nobody's.
        multiple = 64 if engine else 128 * parallel.tp
        self.step = np.where(vocab, -(-length // multiple) * multiple // self.ways, length // self.ways)
        self.plain, self.cut, self.length = ~heads, cut, length
        self.bands = [self._bands(r) for r in range(parallel.tp)] if len(self.attention) else []

    def _stages(self, metas: list[ParamMeta]) -> np.ndarray:
        """int64 (tensors): the stage of each; -1 for the first and the last (tied embeddings)."""
        layers, pp, vpp = self.config["num_hidden_layers"], self.parallel.pp, self.parallel.vpp
        if layers < pp * vpp:
            raise ConfigError(f"{layers} layers are not enough for pp x vpp = {pp} x {vpp} stages")
        edges = np.cumsum([0] + [layers // (pp * vpp) + (n < layers % (pp * vpp)) for n in range(pp * vpp)])
        layer = np.array([m.layer for m in metas], np.int64)
        out = (np.searchsorted(edges, layer, side="right") - 1) % pp
        out[self.part == "first"] = -1 if self.config.get("tie_word_embeddings") else 0
        out[self.part == "last"] = pp - 1
        return out

    def of(self, stage: int, inner: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tensor, lo, hi) of one rank of a stage."""
        p = self.parallel
        tp, etp, ep = inner % p.tp, inner % p.etp, inner // p.etp % p.ep
        ends = self.stage == -1 if stage in (0, p.pp - 1) else np.zeros(len(self.stage), bool)
        here = ((self.stage == stage) | ends) & ((self.group < 0) | (self.group == ep))
        mine = np.flatnonzero(here & self.plain)
        lo, hi = np.zeros((len(mine), self.d), np.int64), self.shape[mine].copy()
        cut = np.flatnonzero(self.cut[mine])
        which = mine[cut]
        begin = self.step[which] * np.where(self.expert[which] >= 0, etp, tp)
        lo[cut, self.axis[which]] = np.minimum(begin, self.length[which])
        hi[cut, self.axis[which]] = np.minimum(begin + self.step[which], self.length[which])
        parts = [(mine, lo, hi)]
        if self.bands:
            tensor, begin, end = self.bands[tp]
            keep = here[tensor]
            tensor, begin, end = tensor[keep], begin[keep], end[keep]
            lo, hi = np.zeros((len(tensor), self.d), np.int64), self.shape[tensor].copy()
            at = np.arange(len(tensor)), self.axis[tensor]
            lo[at], hi[at] = begin, end
            parts.append((tensor, lo, hi))
        tensor, lo, hi = (np.concatenate(a) for a in zip(*parts, strict=True))
        order = np.lexsort((*lo.T[::-1], tensor))
        order = order[np.all(lo[order] < hi[order], axis=1)]
        return tensor[order], lo[order], hi[order]

    def _bands(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tensor, first row, end) of q, k and v that a rank has."""
        heads = self.config["num_attention_heads"]
        groups = self.config.get("num_key_value_heads") or heads
        size = self.config.get("head_dim") or self.config["hidden_size"] // heads
        rows = (
            _engine_rows(heads, groups, self.parallel.tp, rank) if self.engine else _fused_rows(heads, groups, size, self.parallel.tp, rank)
        )
        scale = size if self.engine else 1
        out = [(t, begin * scale, end * scale) for t in self.attention.tolist() for begin, end in rows[self.part[t]]]
        tensor, begin, end = (np.array(a, np.int64) for a in zip(*out, strict=True))
        return tensor, begin, end


def _engine_rows(heads: int, groups: int, tp: int, rank: int) -> dict[str, list[tuple[int, int]]]:
    """In heads. Where there are fewer groups than ranks, several ranks have the same."""
    if heads % tp or (groups % tp if groups >= tp else tp % groups):
        raise ConfigError(f"{heads} heads in {groups} groups cannot be shared by tp={tp} ranks of an engine")
    first, n = (rank * (groups // tp), groups // tp) if groups >= tp else (rank // (tp // groups), 1)
    return {"q": [(rank * heads // tp, (rank + 1) * heads // tp)], "k": [(first, first + n)], "v": [(first, first + n)]}


def _fused_rows(heads: int, groups: int, size: int, tp: int, rank: int) -> dict[str, list[tuple[int, int]]]:
    """In rows: what a rank's rows of the fused matrix have of each group's queries, keys and values, which follow each other in it."""
    total = (heads + 2 * groups) * size
    if total % tp:
        raise ConfigError(f"{total} rows of queries, keys and values cannot be divided by tp={tp}")
    begin, end = rank * (total // tp), (rank + 1) * (total // tp)
    q = heads // groups * size
    out: dict[str, list[tuple[int, int]]] = {"q": [], "k": [], "v": []}
    for group in range(groups):
        at = group * (q + 2 * size)
        for part, skip, length in (("q", 0, q), ("k", q, size), ("v", q + size, size)):
            lo, hi = max(begin, at + skip), min(end, at + skip + length)
            if lo < hi:
                shift = group * length - (at + skip)
                out[part].append((lo + shift, hi + shift))
    return out
