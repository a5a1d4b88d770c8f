"""Columns of Python lists of numbers, as the typed values they are stored as."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from mooncake_ray.data.bits import dtype_name, named_dtype
from mooncake_ray.data.block.node import bits, check_within, corrupt, natural, spans
from mooncake_ray.data.block.read import Runs, Steps, offsets_of, together
from mooncake_ray.data.block.scalars import NUMBERS, numbers
from mooncake_ray.data.ragged import Ragged

__all__ = ["alike", "common_dtype", "dtype_of", "rows_of"]

_CONST = {"bool": "bool", "int": "int64", "float": "float64"}


def dtype_of(tree: Any) -> str | None:
    """The dtype in which lists of numbers (or None) are stored; None for other values."""
    if not isinstance(tree, dict):
        return None
    if tree.get("kind") == "nullable":
        tree = tree.get("child")
    child = tree.get("child") if isinstance(tree, dict) and tree.get("kind") == "list" else None
    if not isinstance(child, dict):
        return None
    if child.get("kind") == "const":
        return _CONST.get(child.get("type"))
    return ("bool" if child["kind"] == "bools" else str(child.get("type"))) if child.get("kind") in NUMBERS else None


def common_dtype(dtypes: Iterable[str]) -> str | None:
    """The narrowest dtype that holds all numbers of those dtypes as what they are; None if there is none, as for ints and floats."""
    kinds = [np.dtype(name) for name in dtypes]
    common = np.result_type(*kinds)
    families = {"iu" if kind.kind in "iu" else kind.kind for kind in kinds}
    return common.name if len(families) == 1 and common.kind in families.pop() else None


def alike(columns: Sequence[Ragged]) -> list[Ragged]:
    """Parts of one column of lists in one dtype: each has the narrowest for its own numbers."""
    wanted = common_dtype({dtype_name(column.dtype) for column in columns})
    if wanted is None:
        return list(columns)
    dtype = named_dtype(wanted)
    return [c if c.dtype == dtype else Ragged(c.values.to(dtype), c.offsets, c.valid) for c in columns]


def rows_of(tree: dict[str, Any], rows: Runs) -> Steps[Ragged]:
    """The selected rows as a ragged column of that dtype; null where there is None instead of a list."""
    valid, lists = None, tree
    if tree["kind"] == "nullable":
        lists = tree["child"]
        valid, (values, edges) = yield from together([bits(natural(tree, "valid"), rows), _items(lists, rows)])
        lengths = np.where(valid, np.diff(edges), 0)
        if lengths.sum() != edges[-1]:
            raise corrupt("a row is None, and has items")
        valid = torch.from_numpy(valid.copy())
    else:
        values, edges = yield from _items(lists, rows)
        lengths = np.diff(edges)
    return Ragged(torch.from_numpy(np.ascontiguousarray(values)), torch.from_numpy(offsets_of(lengths)), valid)


def _items(node: dict[str, Any], rows: Runs) -> Steps[tuple[np.ndarray, np.ndarray]]:
    check_within(rows, natural(node, "rows"), "list")
    inner, edges = yield from spans(node, rows)
    check_within(inner, natural(node["child"], "rows"), node["child"]["kind"])
    return (yield from numbers(node["child"], inner)), edges
