"""Versions of a model over HTTP, behind Ray Serve: `run` starts the endpoint, `WeightClient` reads from it (and needs nothing of Serve)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mooncake_ray.serve.app import build_app
    from mooncake_ray.serve.client import WeightClient
    from mooncake_ray.serve.deployment import Endpoint, run
    from mooncake_ray.serve.settings import Settings

__all__ = ["Endpoint", "Settings", "WeightClient", "build_app", "run"]

_HOMES = {"Endpoint": "deployment", "Settings": "settings", "WeightClient": "client", "build_app": "app", "run": "deployment"}


def __getattr__(name: str) -> Any:
    # As the client must be importable where there is no fastapi.
    if name not in _HOMES:
        raise AttributeError(name)
    from importlib import import_module

    return getattr(import_module(f"mooncake_ray.serve.{_HOMES[name]}"), name)
