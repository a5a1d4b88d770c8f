"""What a repetition of a call is answered."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

__all__ = ["remember"]

_REMEMBERED = 1 << 16


def remember(answers: OrderedDict[Any, Any], name: object, answer: object) -> None:
    """Keeps the answer, and forgets the oldest of very many."""
    answers[name] = answer
    if len(answers) > _REMEMBERED:
        answers.popitem(last=False)
