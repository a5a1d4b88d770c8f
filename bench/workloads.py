"""Seeded rollout batches of a GRPO step: as verl's padded `DataProto`, as a dict of Python lists, and how few bytes their content needs.

Lengths are as in real runs: log-normal, cut off at the widths, prompts shared by a group, and 60 % of the variance of a response's log length
the group's. So most of a padded batch is padding. Every row has objects of its own, as rows have that come from several workers.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bench.payloads import objects

__all__ = ["NAMES", "WORKLOADS", "Rollout", "Texts", "Workload", "build", "ideal", "lists", "padded", "padded_bytes"]

_SEED = 1234
_VOCABULARY, _PAD = 151_936, 151_643
_ROWS_AT_A_TIME = 256  # so that masks and other temporaries stay small
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz ETAOIN 0123456789 .,:;()[]{}<>=+-*/\n" * 8 + "éüßπλ∑→中文字"


@dataclass(frozen=True)
class Workload:
    """A kind of batch: `prompts * samples` rows, prompts up to `prompt_width` tokens, responses up to `response_width`."""

    name: str
    prompts: int
    samples: int
    prompt_width: int
    response_width: int
    median: int  # tokens of a response
    sigma: float  # of their log

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def width(self) -> int:
        return self.prompt_width + self.response_width


WORKLOADS = {
    w.name: w
    for w in (
        Workload("XS", 8, 8, 128, 512, 120, 0.7),
        Workload("S64", 64, 8, 256, 1536, 350, 0.8),
        Workload("M256", 64, 8, 1024, 6144, 1400, 0.85),
        Workload("M1G", 128, 16, 1024, 6144, 1400, 0.85),
        Workload("L8G", 512, 8, 2048, 28672, 5200, 0.95),
    )
}
NAMES = tuple(WORKLOADS)


@dataclass(frozen=True)
class Texts:
    """What a row has besides its tensors."""

    uid: list[str]  # of the group
    prompt: list[str]
    calls: list[list[tuple[str, str]]]  # of tools: code, output
    accuracy: np.ndarray  # (rows,) float64, 0 or 1


@dataclass(frozen=True)
class Rollout:
    """The rows of a batch without any padding. All other forms are made of it.

    Attributes:
        prompt_lengths: (rows,) int64.
        response_lengths: (rows,) int64.
        tokens: Prompt and response of each row, int32 (sum of both lengths,).
        log_probs: Of the rollout, the old and the reference policy, float32 (3, sum of the response lengths).
        advantages: Of a whole row, float32 (rows,).
        scores: Of a whole row, float32 (rows,), 0 or 1.
    """

    workload: Workload
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray
    advantages: np.ndarray
    scores: np.ndarray
    texts: Texts

    @cached_property
    def token_offsets(self) -> np.ndarray:
        """Where each row begins in `tokens`, and the end: int64 (rows + 1,)."""
        return _offsets(self.prompt_lengths + self.response_lengths)

    @cached_property
    def response_offsets(self) -> np.ndarray:
        """Where each row begins in `log_probs`, and the end: int64 (rows + 1,)."""
        return _offsets(self.response_lengths)


def build(name: str) -> Rollout:
    """The rows of the workload of that name: the same ones every time."""
    w = WORKLOADS[name]
    rng = np.random.default_rng(_SEED)
    prompts = rng.lognormal(np.log(0.22 * w.prompt_width), 0.6, w.prompts)
    of_group = rng.normal(0, w.sigma * np.sqrt(0.6), w.prompts).repeat(w.samples)
    of_sample = rng.normal(0, w.sigma * np.sqrt(0.4), w.rows)
    prompt_lengths = np.clip(np.rint(prompts), 16, w.prompt_width).astype(np.int64).repeat(w.samples)
    response_lengths = np.clip(np.rint(w.median * np.exp(of_group + of_sample)), 8, w.response_width).astype(np.int64)
    responses = int(response_lengths.sum())
    log_probs = rng.standard_exponential((3, responses), dtype=np.float32)
    log_probs *= np.float32(-0.5)
    return Rollout(
        w,
        prompt_lengths,
        response_lengths,
        rng.integers(0, _VOCABULARY, int(prompt_lengths.sum()) + responses, dtype=np.int32),
        log_probs,
        rng.standard_normal(w.rows, dtype=np.float32),
        rng.integers(0, 2, w.rows).astype(np.float32),
        _texts(w, prompt_lengths, rng),
    )


def _texts(w: Workload, prompt_lengths: np.ndarray, rng: np.random.Generator) -> Texts:
    letters = np.array(list(_LETTERS))

    def text(length: int) -> str:
        start = int(rng.integers(0, len(source) - length + 1))
        return source[start : start + length]

    source = "".join(letters[rng.integers(0, len(letters), 1 << 17)])
    groups = [(str(uuid.UUID(int=int.from_bytes(rng.bytes(16), "big"))), text(4 * int(n))) for n in prompt_lengths[:: w.samples]]
    of_rows = [groups[i // w.samples] for i in range(w.rows)]
    return Texts(
        uid=["".join(uid) for uid, _ in of_rows],
        prompt=[prompt[:1] + prompt[1:] for _, prompt in of_rows],  # a string of its own
        calls=[
            [(text(int(rng.integers(50, 801))), text(int(rng.integers(50, 801)))) for _ in range(n)] for n in rng.integers(0, 4, w.rows)
        ],
        accuracy=rng.integers(0, 2, w.rows).astype(np.float64),
    )


def padded_bytes(w: Workload) -> int:
    """Bytes of the tensors of `padded`: six int64 columns, and eight of float32 over the responses."""
    return w.rows * (24 * w.width + 8 * w.prompt_width + 16 * w.response_width + 32 * w.response_width)


def padded(rollout: Rollout) -> Any:
    """The rows as verl has them: a `DataProto` of 14 tensor columns, each with its own memory.

    Prompts are padded on the left, responses on the right.
    """
    import torch
    from verl import DataProto

    w = rollout.workload
    integers = {"prompts": w.prompt_width, "responses": w.response_width, "response_mask": w.response_width}
    integers |= dict.fromkeys(("input_ids", "attention_mask", "position_ids"), w.width)
    floats = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "advantages", "returns")
    floats += ("token_level_scores", "token_level_rewards", "rm_scores")
    columns = {name: np.empty((w.rows, width), np.int64) for name, width in integers.items()}
    columns |= {name: np.empty((w.rows, w.response_width), np.float32) for name in floats}
    for rows in _slices(w.rows):
        _pad(rollout, rows, {name: column[rows] for name, column in columns.items()})
    names = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask", *floats)
    meta_info = {"global_steps": 7, "temperature": 1.0}
    return DataProto.from_dict({name: torch.from_numpy(columns[name]) for name in names}, _non_tensors(rollout), meta_info=meta_info)


def _pad(rollout: Rollout, rows: slice, into: dict[str, np.ndarray]) -> None:
    """Fills some rows of every column."""
    w, tokens, responses = rollout.workload, rollout.token_offsets, rollout.response_offsets
    prompt_lengths, response_lengths = (n[rows, None] for n in (rollout.prompt_lengths, rollout.response_lengths))
    at = np.arange(w.width)
    attended = (at >= w.prompt_width - prompt_lengths) & (at < w.prompt_width + response_lengths)
    responded = attended[:, w.prompt_width :]
    into["attention_mask"][:] = attended
    into["position_ids"][:] = np.clip(attended.cumsum(1) - 1, 0, None)
    into["response_mask"][:] = responded
    into["input_ids"][:] = _PAD
    into["input_ids"][attended] = rollout.tokens[tokens[rows.start] : tokens[rows.stop]]
    into["prompts"][:] = into["input_ids"][:, : w.prompt_width]
    into["responses"][:] = into["input_ids"][:, w.prompt_width :]
    flat = rollout.log_probs[:, responses[rows.start] : responses[rows.stop]]
    for name, values in zip(("rollout_log_probs", "old_log_probs", "ref_log_prob"), flat, strict=True):
        into[name][:] = 0
        into[name][responded] = values
    for name in ("advantages", "returns"):  # a product with the mask, as verl does it: the padding of a row below zero is -0.0
        into[name][:] = rollout.advantages[rows, None] * responded
    last = np.arange(len(responded)), response_lengths[:, 0] - 1
    for name in ("token_level_scores", "token_level_rewards", "rm_scores"):
        into[name][:] = 0
        into[name][last] = rollout.scores[rows]


def _non_tensors(rollout: Rollout) -> dict[str, np.ndarray]:
    return {
        "uid": objects(rollout.texts.uid),
        "raw_prompt": objects([_messages(text) for text in rollout.texts.prompt]),
        "tool_trace": objects([_trace(calls) for calls in rollout.texts.calls]),
        "extra_fields": objects([_extra(float(acc)) for acc in rollout.texts.accuracy]),
        "data_source": objects(["math"] * rollout.workload.rows),
    }


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _trace(calls: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"name": "python", "args": {"code": code}, "out": out} for code, out in calls]


def _extra(accuracy: float) -> dict[str, Any]:
    return {"acc": accuracy, "pred": "42", "min_global_steps": 7, "max_global_steps": 8}


def lists(rollout: Rollout) -> dict[str, list[Any]]:
    """The same rows as the rollout manager of Miles hands them on: a dict of Python lists, a row of ints or floats being a list too."""
    rows = range(rollout.workload.rows)
    tokens, responses = rollout.token_offsets.tolist(), rollout.response_offsets.tolist()

    def floats(values: np.ndarray) -> list[list[float]]:
        return [values[responses[i] : responses[i + 1]].tolist() for i in rows]

    lengths, scores = rollout.response_lengths.tolist(), rollout.scores.tolist()
    return {
        "tokens": [rollout.tokens[tokens[i] : tokens[i + 1]].tolist() for i in rows],
        "loss_masks": [[1] * n for n in lengths],
        "rollout_log_probs": floats(rollout.log_probs[0]),
        "log_probs": floats(rollout.log_probs[1]),
        "ref_log_probs": floats(rollout.log_probs[2]),
        "advantages": rollout.advantages.tolist(),
        "rewards": scores,
        "raw_reward": list(scores),
        "truncated": [int(n == rollout.workload.response_width) for n in lengths],
        "response_lengths": lengths,
        "total_lengths": (rollout.prompt_lengths + rollout.response_lengths).tolist(),
        "sample_indices": list(rows),
        "group_indices": [i // rollout.workload.samples for i in rows],
        "prompt": [_messages(text) for text in rollout.texts.prompt],
        "metadata": [
            {"uid": uid, "trace": _trace(calls), **_extra(float(acc))}
            for uid, calls, acc in zip(rollout.texts.uid, rollout.texts.calls, rollout.texts.accuracy, strict=True)
        ],
        "weight_versions": [["7"] for _ in rows],
    }


def ideal(rollout: Rollout) -> int:
    """Bytes that the content of `padded` needs once values are narrowed and nothing is said twice. Exact, and computed from the rows alone.

    * 4 a token: `input_ids`, in int32 since ids reach 151,935. `prompts` and `responses` are parts of it.
    * 12 a response token: three float32 log-probs.
    * Per row, 4 for the two lengths, in two bytes each (widths are below 65,536). `attention_mask`, `position_ids` and `response_mask` follow.
    * Per row, 4 for the advantage and 4 for the score, in float32, as they are on every token or on the last one. `returns` is the
      advantage, `token_level_scores`, `token_level_rewards` and `rm_scores` are the score.
    * UTF-8 of every text, also where rows of a group have the same, and two bytes for the length of one whose length varies: prompt, code and
      output of a call. A uid is always as long.
    * Per row, 1 for the number of tool calls, and 8 for the accuracy, a float64.
    * Nothing for what all rows share: `data_source`, names of keys, roles and tools, `pred`, the global steps, `meta_info`.
    """
    texts = rollout.texts
    utf8 = sum(len(text.encode()) for text in _all_texts(texts))
    varying = len(texts.prompt) + 2 * sum(map(len, texts.calls))
    per_row = 4 + 4 + 4 + 1 + 8
    return 4 * len(rollout.tokens) + 12 * rollout.log_probs.shape[1] + per_row * rollout.workload.rows + utf8 + 2 * varying


def _all_texts(texts: Texts) -> Iterator[str]:
    yield from texts.uid
    yield from texts.prompt
    for calls in texts.calls:
        for code, out in calls:
            yield from (code, out)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _slices(rows: int) -> Iterator[slice]:
    for start in range(0, rows, _ROWS_AT_A_TIME):
        yield slice(start, min(start + _ROWS_AT_A_TIME, rows))
