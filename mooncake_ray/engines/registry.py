"""The engines there are, by name."""

from __future__ import annotations

import importlib
from typing import Any

from mooncake_ray.errors import ConfigError

__all__ = ["engine_names", "get_engine", "register_engine"]

_known: dict[str, str | type] = {"torch_module": "mooncake_ray.engines.torch_module:TorchModuleEngine"}
"""A class, or "module:Class", which is imported when it is first asked for."""


def register_engine(name: str, engine: str | type) -> None:
    """Makes an engine known: its class, or "module:Class", which is imported when it is first asked for.

    Raises:
        ValueError: another engine has that name, or a string is not of that form.
    """
    if not name:
        raise ValueError("an engine needs a name")
    if isinstance(engine, str) and not all(engine.partition(":")):
        raise ValueError(f"engine {name!r} is to be a class or 'module:Class', got {engine!r}")
    if (there := _known.setdefault(name, engine)) != engine:
        raise ValueError(f"an engine {name!r} is there already: {there}")


def engine_names() -> list[str]:
    """All names that `get_engine` knows, sorted. That there is one does not say that it can be used here."""
    return sorted(_known)


def get_engine(name: str) -> Any:
    """The class of that name. What it needs is imported; an ImportError says what is missing.

    Raises:
        ConfigError: there is no such engine.
    """
    if name not in _known:
        raise ConfigError(f"there is no engine {name!r}; there are {', '.join(engine_names())}")
    if isinstance(known := _known[name], str):
        module, _, attribute = known.partition(":")
        _known[name] = known = getattr(importlib.import_module(module), attribute)
    return known
