"""Framework classes whose own pickling would hide their tensors in one opaque blob."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["reduce"]


def rebuild_plain(cls: type, state: dict[str, Any]) -> Any:
    """An instance with that `__dict__`, made without its constructor."""
    out = cls.__new__(cls)
    out.__dict__.update(state)
    return out


def reduce(obj: Any) -> Any:
    """A reduction by parts, or NotImplemented. A subclass that pickles in its own way keeps it."""
    verl = sys.modules.get("verl.protocol")
    if verl is None:
        return NotImplemented
    base, cls = verl.DataProto, type(obj)
    if not isinstance(obj, base) or cls.__getstate__ is not base.__getstate__ or cls.__setstate__ is not base.__setstate__:
        return NotImplemented
    return rebuild_plain, (cls, dict(obj.__dict__))
