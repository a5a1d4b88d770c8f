"""Stands for SGLang's kernels, of which there is no package for CPUs. SGLang imports their names, finds that none is registered with torch, and
computes with torch instead; to call one is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__version__ = "0.0.0"


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"there is no kernel {name} for CPUs")

    return kernel
