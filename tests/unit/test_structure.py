"""Layers point down, modules stay small, and user input is never checked by assert."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mooncake_ray"
MODULES = sorted(p for p in PACKAGE.rglob("*.py"))
LEVELS = {
    "_native": 0,
    "errors": 0,
    "machine": 0,
    "config": 0,
    "counters": 0,
    "snapshot": 0,
    "store": 1,
    "transport": 1,
    "transfer": 1,
    "data": 2,
    "weights": 2,
    "engines": 4,
    "objects": 4,
    "rollout": 4,
    "serve": 4,
    "sync": 4,
    "loops": 5,
    "cli": 4,
    "integrations": 4,
    "testing": 4,
}
MAY_IMPORT = {  # third parties, at module level, by level
    0: set(),
    1: {"numpy"},
    2: {"numpy", "torch"},
    3: {"numpy", "torch"},
    4: {"numpy", "ray"},
    5: {"numpy", "ray"},
}
MAY_ONLY_IMPORT = {
    "cli": set(),
    "integrations": {"numpy", "ray", "torch"},
    "engines": {"numpy", "ray", "torch"},
    "rollout": {"numpy", "ray", "torch"},
    "serve": {"numpy", "ray", "torch", "fastapi", "pydantic", "starlette"},
    "sync": {"numpy", "ray", "torch"},
    "testing": {"pytest"},
}  # whatever their level
ENGINES = {"vllm", "sglang"}  # each may be imported by the package of its own name
STANDARD = set(__import__("sys").stdlib_module_names)


def imports(tree: ast.Module, *, everywhere: bool):
    nodes = ast.walk(tree) if everywhere else tree.body
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 400, "a module is one noun"
    asserts = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Assert)]
    assert not asserts, f"assert at lines {asserts}"
    assert ast.get_docstring(tree), "every module says what it is"
    if path.parent == PACKAGE and path.name == "__init__.py":
        return
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    level = LEVELS[part]
    for name in imports(tree, everywhere=True):
        if name.startswith("mooncake_ray."):
            other = name.split(".")[1]
            assert LEVELS[other] <= level, f"{part} (level {level}) imports {other} (level {LEVELS[other]})"
    for name in imports(tree, everywhere=False):
        top = name.split(".")[0]
        allowed = MAY_ONLY_IMPORT.get(part, MAY_IMPORT[level]) | ({path.parent.name} & ENGINES)
        assert top in STANDARD | {"mooncake_ray"} | allowed, f"{part} (level {level}) must not import {top} at module level"
