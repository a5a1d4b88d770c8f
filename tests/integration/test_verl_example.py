"""Runs the example of verl as a user would."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import ROOT, environment

pytest.importorskip("codetiming", reason="verl's workers need it")
from mooncake_ray.testing import Allowed

PROGRAM = [sys.executable, str(ROOT / "examples" / "verl_swap_in.py")]


@pytest.fixture
def leaks_allowed() -> Allowed:
    return Allowed(deadline_s=30.0, processes=("*",))


def said(*arguments: str) -> str:
    done = subprocess.run([*PROGRAM, *arguments], env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_with_the_pool():
    out = json.loads(said("--store", "pool", "--steps", "2").splitlines()[-1])
    assert len(out["outcome"]) == 2 and out["outcome"][0] != out["outcome"][1]
    assert out["to_the_pool"] > 2 * 8 * 1024 * 2048 * 2, "the weights of two steps, and batches"


@pytest.mark.slow
def test_the_same_as_on_plain_ray():
    lines = said("--steps", "2").splitlines()
    assert lines[-1] == "the same results" and lines[0].startswith("ray") and lines[1].startswith("pool")
