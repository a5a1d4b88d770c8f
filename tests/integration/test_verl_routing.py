"""verl's own single controller with unmodified workers: what it gives on plain Ray, it gives with the pool, through which the bytes went."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import environment

pytest.importorskip("codetiming", reason="verl's workers need it")
from mooncake_ray.testing import Allowed

pytestmark = pytest.mark.slow  # two Rays, and verl is imported in a dozen processes
HERE = Path(__file__).parent


@pytest.fixture
def leaks_allowed() -> Allowed:
    return Allowed(processes=("*",))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What the program got, by mode. The two run at once."""
    at = tmp_path_factory.mktemp("verl")
    programs = {
        mode: subprocess.Popen(
            [sys.executable, str(HERE / "verl_program.py"), mode, str(at / mode)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for mode in ("plain", "pool")
    }
    for program in programs.values():
        said, _ = program.communicate(timeout=300)
        assert program.returncode == 0, said
    return {mode: torch.load(at / mode, weights_only=False) for mode in programs}


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def test_results_are_those_of_plain_ray(outcomes):
    plain, pool = outcomes["plain"], dict(outcomes["pool"])
    pool.pop("routed")
    assert plain.keys() == pool.keys() and len(plain) >= 12
    assert not [name for name in plain if not equal(plain[name], pool[name])]
    assert plain["colocated"]["same processes"]


def test_a_worker_that_died_is_rays_error(outcomes):
    assert outcomes["pool"]["died"] == outcomes["plain"]["died"] != "nothing"


def test_bytes_go_through_the_pool(outcomes):
    routed = outcomes["pool"]["routed"]
    assert 0 < routed["driver sent"] < routed["nbytes"] / 4, "without padding, and in as many bytes as the numbers need"
    assert not routed["fallbacks"] and all(copied > 0 for copied in routed["workers"])


def test_the_driver_hands_on_what_it_never_had(outcomes):
    """Results of calls that do not block go from worker to worker."""
    assert outcomes["pool"]["routed"]["driver passed on"] == 0
