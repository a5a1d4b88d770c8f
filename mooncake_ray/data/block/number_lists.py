"""Columns of Python lists of numbers, as the typed values they are stored as."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mooncake_ray.data.block.families import offsets_of
from mooncake_ray.data.block.node import bits, check_within, corrupt, natural, spans
from mooncake_ray.data.block.read import Runs, Steps, together
from mooncake_ray.data.block.scalars import NUMBERS, numbers
from mooncake_ray.data.ragged import Ragged

__all__ = ["dtype_of", "rows_of"]

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
