"""The meta_info of several batches as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import repr as short_repr
from typing import Any

from mooncake_ray.data.equality import values_equal
from mooncake_ray.errors import SchemaError

__all__ = ["join_meta"]


def join_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins the meta_info of batches.

    Args:
        metas: One meta_info per batch. The key `metrics` may hold a dict, a list of dicts, or None.

    Returns:
        A new dict of all keys. `metrics` becomes one dict with a list of values per metric, in the
        order of the batches, and is left out where no batch has any.

    Raises:
        SchemaError: Batches disagree on another key, or have a metric the first one does not have.
    """
    joined: dict[str, Any] = {}
    metrics: list[Any] = []
    for position, meta in enumerate(metas):
        for key, value in meta.items():
            if key == "metrics":
                if isinstance(value, list):
                    metrics.extend(value)
                elif value is not None:
                    metrics.append(value)
            elif key not in joined:
                joined[key] = value
            elif not values_equal(joined[key], value):
                raise SchemaError(
                    f"meta_info[{key!r}] of batch {position} is {short_repr(value)}, "
                    f"expected {short_repr(joined[key])} as in the batches before"
                )
    if metrics:
        joined["metrics"] = _metric_lists(metrics)
    return joined


def _metric_lists(metrics: Sequence[Any]) -> dict[str, list[Any]]:
    for entry in metrics:
        if not isinstance(entry, Mapping):
            raise SchemaError(f"meta_info['metrics'] holds a {type(entry).__name__}, expected dicts")
    lists: dict[str, list[Any]] = {name: [] for name in metrics[0]}
    for entry in metrics:
        for name, value in entry.items():
            if name not in lists:
                raise SchemaError(f"meta_info['metrics'] has {name!r} in a later batch only, expected one of {list(lists)}")
            lists[name].append(value)
    return lists
