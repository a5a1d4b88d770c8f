"""Greedy tokens of a module, and which version of the weights made which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

__all__ = ["Generation", "GrowingSpans", "VersionSpan", "next_token"]


class VersionSpan(NamedTuple):
    """Tokens `[start, end)` of an answer were made by one version. What `VersionSpans.of` takes."""

    version: int | None
    start: int
    end: int


@dataclass(frozen=True)
class Generation:
    tokens: tuple[int, ...]
    """What was made, without the prompt."""
    weight_versions: tuple[VersionSpan, ...]
    """All of it, in order."""
    finish_reason: str
    """"length", or "abort" if a pause ended it."""


@dataclass
class GrowingSpans:
    """Grows token by token."""

    _spans: list[VersionSpan] = field(default_factory=list)

    def add(self, version: int | None) -> None:
        last = self._spans[-1] if self._spans else VersionSpan(version, 0, 0)
        if self._spans and last.version == version:
            self._spans[-1] = VersionSpan(version, last.start, last.end + 1)
        else:
            self._spans.append(VersionSpan(version, last.end, last.end + 1))

    def closed(self) -> tuple[VersionSpan, ...]:
        return tuple(self._spans)


def next_token(module: torch.nn.Module, tokens: Sequence[int]) -> int:
    """The likeliest token after these. The module returns logits (1, tokens, vocabulary), or an object that has them as `logits`."""
    out: Any = module(torch.tensor([list(tokens)]))
    logits = getattr(out, "logits", out)
    return int(logits[0, -1].argmax())
