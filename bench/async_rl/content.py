"""What samples hold, and where learners put it: the bytes of a real job, without their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from bench.async_rl.job import Job
from mooncake_ray.data import Ragged

__all__ = ["Device", "Source"]

_VOCABULARY = 151_936


class Source:
    """Of a rollout worker."""

    def __init__(self, job: Job, seed: int) -> None:
        self._job = job
        most = job.group_size * job.longest
        rng = np.random.default_rng(seed)
        self._tokens = rng.integers(0, _VOCABULARY, most, dtype=np.int32)
        self._log_probs = -rng.exponential(0.5, most).astype(np.float32)
        self._mask = np.ones(most, np.uint8)
        self._routed = rng.integers(0, 128, (most, job.routed), dtype=np.uint8)

    def columns(self, lengths: np.ndarray) -> dict[str, Any]:
        """Typed ragged columns of all samples of a group; views."""
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        total = int(lengths.sum())
        flat = {"tokens": self._tokens, "log_probs": self._log_probs, "mask": self._mask}
        if self._job.routed:
            flat["routed_experts"] = self._routed
        return {name: Ragged(torch.from_numpy(values[:total]), offsets) for name, values in flat.items()}

    @cached_property
    def _routed_in_miles(self) -> np.ndarray:
        return self._routed.astype(np.int32)

    def samples(self, lengths: np.ndarray) -> list[dict[str, Any]]:
        """The same as Miles has it: a sample each, with lists; only what experts tokens went to is an array."""
        ends = np.cumsum(lengths)
        out = []
        for begin, end in zip(ends - lengths, ends, strict=True):
            sample = {
                "tokens": self._tokens[begin:end].tolist(),
                "log_probs": self._log_probs[begin:end].tolist(),
                "mask": self._mask[begin:end].tolist(),
            }
            if self._job.routed:
                sample["routed_experts"] = self._routed_in_miles[begin:end]
            out.append(sample)
        return out


class Device:
    """Memory that stands in for an accelerator's: what a learner rank learns from is copied to it, column by column."""

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray] = {}

    def load(self, columns: Mapping[str, Ragged]) -> int:
        """Returns tokens."""
        for name, column in columns.items():
            self._write(name, [column.values.numpy()[int(column.offsets[0]) : int(column.offsets[-1])]])
        return int(columns["tokens"].offsets[-1] - columns["tokens"].offsets[0])

    def load_samples(self, samples: list[dict[str, Any]]) -> int:
        for name, dtype in {"tokens": torch.int32, "log_probs": torch.float32, "mask": torch.uint8}.items():
            self._write(name, [torch.tensor(sample[name], dtype=dtype).numpy() for sample in samples])
        if "routed_experts" in samples[0]:
            self._write("routed_experts", [sample["routed_experts"] for sample in samples])
        return sum(len(sample["tokens"]) for sample in samples)

    def _write(self, name: str, parts: list[np.ndarray]) -> None:
        flat = [part.reshape(-1).view(np.uint8) for part in parts]
        total = sum(map(len, flat))
        if len(self._memory.get(name, ())) < total:
            self._memory[name] = np.zeros(total * 3 // 2, np.uint8)
        at = 0
        for part in flat:
            self._memory[name][at : at + len(part)] = part
            at += len(part)
