"""Plans of benches that have one step, and no sizes to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

__all__ = ["one_step"]

S = TypeVar("S", bound=Any)


def one_step(name: str, step: S, sizes: Sequence[str] | None, runs: int | None) -> list[S]:
    """The step, with as many rounds as `runs` says, if it says so.

    Raises:
        ValueError: sizes are given.
    """
    if sizes:
        raise ValueError(f"{name} has no sizes to choose from")
    return [replace(step, rounds=runs or step.rounds)]
