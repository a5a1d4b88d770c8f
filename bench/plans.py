"""What plans of benches have in common: what of the sizes they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from bench import workloads

__all__ = ["known_workloads", "one_step", "one_workload"]

S = TypeVar("S", bound=Any)


def one_step(name: str, step: S, sizes: Sequence[str] | None, runs: int | None) -> list[S]:
    """The step, with as many rounds as `runs` says, if it says so.

    Raises:
        ValueError: sizes are given.
    """
    if sizes:
        raise ValueError(f"{name} has no sizes to choose from")
    return [replace(step, rounds=runs or step.rounds)]


def known_workloads(sizes: Sequence[str] | None) -> None:
    """Raises ValueError if a size is none of the workloads."""
    if unknown := [s for s in sizes or () if s not in workloads.NAMES]:
        raise ValueError(f"no workload {unknown[0]!r}; there are {', '.join(workloads.NAMES)}")


def one_workload(name: str, sizes: Sequence[str] | None) -> str | None:
    """The workload that is asked for, if one is.

    Raises:
        ValueError: there is no workload of that name, or more than one is asked for.
    """
    known_workloads(sizes)
    if sizes and len(sizes) > 1:
        raise ValueError(f"{name} takes one workload at a time")
    return sizes[0] if sizes else None
