"""Tests that need an RDMA device. Without one they are skipped, or fail where it is said that there must be one (`MOONCAKE_RDMA_REQUIRED=1`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("conformance", "unit")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from mooncake_ray.config import Config
    from mooncake_ray.transport import get_transport

    why = get_transport("verbs").unavailable(Config())
    if why and os.environ.get("MOONCAKE_RDMA_REQUIRED") == "1":
        pytest.exit(f"MOONCAKE_RDMA_REQUIRED=1, and {why}", returncode=1)
    for item in items:
        if why and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=why))
