"""Tells which task an item of an async generator belongs to.

Ray stores such items on an executor thread, where nothing says whose they are. The executor is Ray's to replace
(`reset_event_loop_executor`), and `submit` still runs in the context of the generator's task.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

__all__ = ["RUN", "ItemExecutor", "item"]

_item = threading.local()


def item() -> tuple[bytes, int]:
    """TaskID and ordinal (from 1) of the item that this thread is storing. Only under the frame `RUN`."""
    return _item.value


class ItemExecutor(ThreadPoolExecutor):
    """Ray's executor for the items of async generators, one thread as Ray's own, that knows for which task it works."""

    def __init__(self, task_id: Any) -> None:
        """`task_id`: Ray's context variable of that name."""
        super().__init__(max_workers=1, thread_name_prefix="mooncake_ray.items")
        self._task_id = task_id
        self._ordinals: dict[bytes, int] = {}

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        task = self._task_id.get(None)
        if task is None:
            return super().submit(fn, *args, **kwargs)
        key = task.binary()
        self._ordinals[key] = ordinal = self._ordinals.pop(key, 0) + 1
        if len(self._ordinals) > 4096:  # a task's own end cannot be seen from here; the longest silent goes first
            del self._ordinals[next(iter(self._ordinals))]
        return super().submit(_run, key, ordinal, fn, args, kwargs)


def _run(task: bytes, ordinal: int, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _item.value = task, ordinal
    try:
        return fn(*args, **kwargs)
    finally:
        del _item.value


RUN = _run.__code__  # the Python frame above which such an item is stored
