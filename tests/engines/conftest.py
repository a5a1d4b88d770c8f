"""One Ray cluster for all tests of engines, which are real ones: programs of their own, in environments of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from places import HERE, ROOT


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
