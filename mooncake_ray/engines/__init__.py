"""Engines that get new weights: what each of them must do, the reference engine, and the names they are found by."""

from mooncake_ray.engines.base import EngineAdapter, PauseMode
from mooncake_ray.engines.registry import engine_names, get_engine, register_engine

__all__ = ["EngineAdapter", "PauseMode", "engine_names", "get_engine", "register_engine"]
