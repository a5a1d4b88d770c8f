"""A mixture of experts of about 200 MB in the proportions of Kimi-K2, and how ranks of trainers and engines cut it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["LAYOUTS", "Tensor", "nbytes", "parts", "tensors"]

_HIDDEN, _EXPERT, _DENSE, _VOCAB, _LAYERS, _EXPERTS, _HEADS = 512, 144, 1296, 11_776, 9, 48, 8
_Q_RANK, _KV_RANK, _ROPE, _NOPE, _V = 112, 40, 16, 32, 32

LAYOUTS = {
    "tp2pp2": {"tp": 2, "pp": 2},
    "ep4": {"ep": 4},
    "tp4": {"tp": 4},
    "tp2": {"tp": 2},
    "tp1": {},
}


@dataclass(frozen=True)
class Tensor:
    """One of the model's."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    """Along which tensor parallelism cuts it; None: every rank has all of it."""
    layer: int = -1
    expert: int = -1


def tensors() -> Iterator[Tensor]:
    """All of them, by their canonical names."""
    yield Tensor("model.embed_tokens.weight", (_VOCAB, _HIDDEN), 0)
    for n in range(_LAYERS):
        at = f"model.layers.{n}."
        yield Tensor(at + "input_layernorm.weight", (_HIDDEN,), None, n)
        yield Tensor(at + "post_attention_layernorm.weight", (_HIDDEN,), None, n)
        yield Tensor(at + "self_attn.q_a_proj.weight", (_Q_RANK, _HIDDEN), None, n)
        yield Tensor(at + "self_attn.q_b_proj.weight", (_HEADS * (_NOPE + _ROPE), _Q_RANK), 0, n)
        yield Tensor(at + "self_attn.kv_a_proj_with_mqa.weight", (_KV_RANK + _ROPE, _HIDDEN), None, n)
        yield Tensor(at + "self_attn.kv_b_proj.weight", (_HEADS * (_NOPE + _V), _KV_RANK), 0, n)
        yield Tensor(at + "self_attn.o_proj.weight", (_HIDDEN, _HEADS * _V), 1, n)
        if n == 0:  # the first layer is dense
            yield from _mlp(at + "mlp.", _DENSE, n, -1)
            continue
        yield Tensor(at + "mlp.gate.weight", (_EXPERTS, _HIDDEN), None, n)
        yield from _mlp(at + "mlp.shared_experts.", _EXPERT, n, -1)
        for e in range(_EXPERTS):
            yield from _mlp(f"{at}mlp.experts.{e}.", _EXPERT, n, e)
    yield Tensor("model.norm.weight", (_HIDDEN,), None, _LAYERS - 1)
    yield Tensor("lm_head.weight", (_VOCAB, _HIDDEN), 0, _LAYERS - 1)


def _mlp(at: str, inner: int, layer: int, expert: int) -> Iterator[Tensor]:
    yield Tensor(at + "gate_proj.weight", (inner, _HIDDEN), 0, layer, expert)
    yield Tensor(at + "up_proj.weight", (inner, _HIDDEN), 0, layer, expert)
    yield Tensor(at + "down_proj.weight", (_HIDDEN, inner), 1, layer, expert)


def nbytes() -> int:
    """Of the whole, in bfloat16."""
    return sum(2 * torch.Size(t.shape).numel() for t in tensors())


def parts(layout: str, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A rank's tensors, not filled, and for each the shape of the whole and where the part begins: as `StateDictSource` takes them."""
    cut = {"tp": 1, "pp": 1, "ep": 1} | LAYOUTS[layout]
    tp, stage, group = rank % cut["tp"], rank // cut["tp"] % cut["pp"], rank // (cut["tp"] * cut["pp"]) % cut["ep"]
    held: dict[str, torch.Tensor] = {}
    boxes = {}
    for t in tensors():
        if max(t.layer, 0) * cut["pp"] // _LAYERS != stage or (t.expert >= 0 and t.expert * cut["ep"] // _EXPERTS != group):
            continue
        shape, lo = list(t.shape), [0] * len(t.shape)
        if t.dim is not None:
            shape[t.dim] //= cut["tp"]
            lo[t.dim] = tp * shape[t.dim]
        held[t.name], boxes[t.name] = torch.empty(shape, dtype=torch.bfloat16), (t.shape, tuple(lo))
    return held, boxes
