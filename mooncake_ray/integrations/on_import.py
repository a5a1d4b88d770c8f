"""Registers adapters with the systems they are for, as soon as a process imports one of these, and never imports one itself."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["unwatch", "watch"]

logger = logging.getLogger("mooncake_ray")

_ADAPTERS = {  # what is imported → what is called with it, as "module:function"
    "transfer_queue": "mooncake_ray.integrations.transfer_queue:register",
    "miles.utils.object_store": "mooncake_ray.integrations.miles:register",
    "verl.experimental.fully_async_policy.message_queue": "mooncake_ray.integrations.verl_message_queue:register",
}


def watch() -> None:
    """Registers with what is imported already, and with the rest when it is. Idempotent."""
    if _finder in sys.meta_path:
        return
    sys.meta_path.insert(0, _finder)
    for name in _ADAPTERS:
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _register(module)


def unwatch() -> None:
    """Registers no more. What is registered stays."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _register(module: ModuleType) -> None:
    adapter, function = _ADAPTERS[module.__name__].split(":")
    if adapter in sys.modules and sys.modules[adapter].__spec__._initializing:  # type: ignore[union-attr]
        return  # it is what imports this system, and will know what to do
    try:
        getattr(importlib.import_module(adapter), function)(module)
    except (ImportError, AttributeError) as e:  # another version of it, which works as it does without us
        logger.warning("mooncake_ray: no adapter for this version of %s: %s", module.__name__, e)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a watched module as everybody else does, and has its loader say when it is complete."""

    def __init__(self) -> None:
        self._looking = threading.local()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _ADAPTERS or getattr(self._looking, "name", None) == name:
            return None
        self._looking.name = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking.name = None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, original: Any) -> None:
        self._original = original

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._original  # type: ignore[union-attr]
        self._original.exec_module(module)
        _register(module)


_finder = _Finder()
