"""Seeded payloads, what they hold, and whether two are the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = [
    "SIZES",
    "VERL",
    "arrays_of",
    "as_numpy",
    "build",
    "chunks_of",
    "nbytes",
    "objects",
    "probe",
    "rewards",
    "rollout",
    "same",
    "small",
    "tensors",
    "total",
    "touch",
    "verl_batch",
]

SIZES = {"64KiB": 64 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20, "256MiB": 256 << 20, "1GiB": 1 << 30}
VERL = "verl"
SMALL = "small"
_SEED = 1234
_PAGE = 4096  # bytes
_VOCABULARY, _PAD = 151_936, 151_643


def build(name: str) -> Any:
    """The payload of that name."""
    return verl_batch() if name == VERL else small() if name == SMALL else tensors(SIZES[name])


def small() -> dict[str, Any]:
    """What an RL step passes around besides its batches: under any threshold."""
    return {"step": 7, "policy": "actor", "loss": 0.25, "lengths": np.arange(64), "metrics": {"kl": 0.01, "clip": [0.2, 0.28]}}


def tensors(size: int) -> dict[str, Any]:
    """Two float32 and two int64 tensors of `size` bytes in all."""
    import torch

    rng = np.random.default_rng(_SEED)
    tokens, mask = (rng.integers(0, top, size // 32, dtype=np.int64) for top in (_VOCABULARY, 2))
    log_probs, advantages = (rng.random(size // 16, dtype=np.float32) for _ in range(2))
    columns = {"tokens": tokens, "response_mask": mask, "log_probs": log_probs, "advantages": advantages}
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def rollout(size: int, number: int) -> dict[str, Any]:
    """A batch as a rollout returns it: five columns of tokens, `size` bytes in all, and the rewards of batch `number` beside them."""
    import torch

    rng = np.random.default_rng(_SEED)
    shape = size // 32 // _width(size), _width(size)
    columns = {
        "input_ids": rng.integers(0, _VOCABULARY, shape),
        "position_ids": np.broadcast_to(np.arange(shape[1]), shape).copy(),
        "response_mask": rng.integers(0, 2, shape),
        "old_log_probs": -rng.exponential(0.5, shape).astype(np.float32),
        "ref_log_probs": -rng.exponential(0.5, shape).astype(np.float32),
    }
    return {**{name: torch.from_numpy(column) for name, column in columns.items()}, "rewards": rewards(size, number)}


def rewards(size: int, number: int) -> Any:
    """A reward a row of `rollout`. They say which batch it is."""
    import torch

    return torch.full((size // 32 // _width(size),), float(number))


def _width(size: int) -> int:
    """Tokens of a row."""
    return min(4096, size // 32)


def total(value: Any) -> float:
    """The sum of all that is in a payload."""
    return sum(float(a.sum(dtype=np.float64 if a.dtype.kind == "f" else None)) for a in arrays_of(value))


def verl_batch(prompts: int = 70, samples: int = 8, prompt_width: int = 1024, response_width: int = 6144) -> Any:
    """A padded verl `DataProto` as a GRPO step has it, with 14 tensor columns; by default 254 MiB of them.

    Prompt lengths are log-normal and shared by a group. Response lengths are log-normal too: the group accounts for 60 % of the variance.
    """
    import torch
    from verl import DataProto

    rng = np.random.default_rng(_SEED)
    rows, width = prompts * samples, prompt_width + response_width
    prompt_lengths = np.clip(rng.lognormal(np.log(0.22 * prompt_width), 0.6, prompts), 16, prompt_width).astype(int).repeat(samples)
    spread = rng.normal(0, 0.66, prompts).repeat(samples) + rng.normal(0, 0.54, rows)
    response_lengths = np.clip(0.23 * response_width * np.exp(spread), 8, response_width).astype(int)

    at = np.arange(width)
    attended = (at >= prompt_width - prompt_lengths[:, None]) & (at < prompt_width + response_lengths[:, None])
    tokens = np.where(attended, rng.integers(0, _VOCABULARY, (rows, width)), _PAD)
    responded = attended[:, prompt_width:]

    def log_probs() -> np.ndarray:
        return -rng.exponential(0.5, responded.shape).astype(np.float32) * responded

    advantages = rng.standard_normal((rows, 1), dtype=np.float32) * responded
    scores = np.zeros(responded.shape, np.float32)
    scores[np.arange(rows), response_lengths - 1] = rng.integers(0, 2, rows)
    columns = {
        "prompts": tokens[:, :prompt_width],
        "responses": tokens[:, prompt_width:],
        "input_ids": tokens,
        "attention_mask": attended.astype(np.int64),
        "position_ids": np.clip(attended.cumsum(1) - 1, 0, None),
        "response_mask": responded.astype(np.int64),
        "rollout_log_probs": log_probs(),
        "old_log_probs": log_probs(),
        "ref_log_prob": log_probs(),
        "advantages": advantages,
        "returns": advantages.copy(),
        "token_level_scores": scores,
        "token_level_rewards": scores.copy(),
        "rm_scores": scores.copy(),
    }
    return DataProto.from_dict(
        tensors={name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in columns.items()},
        non_tensors={
            "uid": objects(f"group-{i // samples}" for i in range(rows)),
            "raw_prompt": objects([{"role": "user", "content": "x" * int(4 * n)}] for n in prompt_lengths),
            "tool_trace": objects([{"name": "python", "output": "z" * int(n)}] * int(n % 4) for n in rng.integers(50, 800, rows)),
            "extra_fields": objects({"acc": float(a), "min_global_steps": 7, "max_global_steps": 8} for a in rng.integers(0, 2, rows)),
            "data_source": objects("math" for _ in range(rows)),
        },
        meta_info={"global_steps": 7, "temperature": 1.0},
    )


def objects(values: Iterable[Any]) -> np.ndarray:
    """An object array (rows,) of the values."""
    return np.fromiter(values, object)


def as_numpy(value: Any) -> Any:
    """The same data as a dict of arrays that share the memory of the tensors."""
    if hasattr(value, "non_tensor_batch"):
        batch = {k: v.numpy() for k, v in value.batch.items()}
        return {"batch": batch, "non_tensor_batch": value.non_tensor_batch, "meta_info": value.meta_info}
    return {k: v.numpy() if hasattr(v, "numpy") else v for k, v in value.items()}


def chunks_of(value: Any, n: int) -> list[Any]:
    """`n` groups of rows of a verl batch, or of what `as_numpy` makes of it."""
    if hasattr(value, "chunk"):
        return value.chunk(n)
    rows = len(value["non_tensor_batch"]["uid"]) // n

    def piece(at: slice) -> dict[str, Any]:
        columns = {part: {k: v[at] for k, v in value[part].items()} for part in ("batch", "non_tensor_batch")}
        return {**columns, "meta_info": value["meta_info"]}

    return [piece(slice(i * rows, (i + 1) * rows)) for i in range(n)]


def arrays_of(value: Any) -> list[np.ndarray]:
    """Every tensor and array in a payload, in order."""
    if isinstance(value, np.ndarray):
        return [value]
    if hasattr(value, "non_tensor_batch"):
        value = as_numpy(value)
    if isinstance(value, dict):
        return [a for v in value.values() for a in arrays_of(v)]
    return [value.numpy()] if hasattr(value, "numpy") else []


def nbytes(value: Any) -> int:
    """Bytes of the tensors and arrays in a payload; objects are not counted."""
    return sum(a.nbytes for a in arrays_of(value) if not a.dtype.hasobject)


def probe(value: Any) -> float:
    """A checksum of a few elements of every tensor and array."""
    return float(sum(float(a.flat[i]) for a in arrays_of(value) for i in (0, a.size // 2, a.size - 1)))


def touch(value: Any) -> int:
    """Reads a byte of every page of the tensors and arrays in a batch, so that mapped memory is not taken for data that is there."""
    if isinstance(value, dict):
        return sum(map(touch, value.values()))
    if hasattr(value, "non_tensor_batch"):
        return sum(touch(column) for part in (value.batch, value.non_tensor_batch) for _, column in part.items())
    if hasattr(value, "offsets"):  # rows of different lengths, one after the other
        return touch(value.values)
    if hasattr(value, "numpy"):
        value = value.numpy()
    if not isinstance(value, np.ndarray) or value.dtype.hasobject or not value.flags.c_contiguous:
        return 0
    return int(value.reshape(-1).view(np.uint8)[::_PAGE].sum())


def same(a: Any, b: Any) -> bool:
    """Whether two payloads are of one type and hold equal data."""
    if type(a) is not type(b):
        return False
    if hasattr(a, "non_tensor_batch"):
        return same(as_numpy(a), as_numpy(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if hasattr(a, "numpy"):
        a, b = a.numpy(), b.numpy()
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)
