"""One Ray cluster for all tests of engines, which are real ones: programs of their own, in environments of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))


def python_of(engine: str) -> str:
    """The Python that has it; skips where nobody has said which."""
    found = os.environ.get(f"MOONCAKE_{engine.upper()}_PYTHON", "")
    if not found:
        pytest.skip(f"MOONCAKE_{engine.upper()}_PYTHON names no Python with {engine}: `make test-engines` installs one")
    return found


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Ray with the pool installed. Gives its address, for processes that Ray has not started."""
    import ray

    import mooncake_ray

    mooncake_ray.install(capacity_bytes=1 << 30, prefault_bytes=64 << 20)
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=300 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}},
    )
    mooncake_ray.pool_stats()
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    mooncake_ray.uninstall()


@pytest.fixture
def no_leaks() -> None:
    """Trainers, engines and what these have published outlive a test, and engines that are killed leave memory of their own behind."""
