"""Where things are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["HERE", "ROOT", "python_of"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def python_of(engine: str) -> str:
    """The Python that has it; skips where nobody has said which."""
    found = os.environ.get(f"MOONCAKE_{engine.upper()}_PYTHON", "")
    if not found:
        pytest.skip(f"MOONCAKE_{engine.upper()}_PYTHON names no Python with {engine}: `make test-engines` installs one")
    return found
