"""The storms, for a few seconds: that they blow at all, and that what they find wrong is said. `make stress` is the real thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def stress(*arguments: str) -> dict:
    env = {name: value for name, value in os.environ.items() if name != "RAY_RUNTIME_ENV_HOOK" and not name.startswith("MOONCAKE_RAY")}
    done = subprocess.run(
        [sys.executable, "-m", "stress", *arguments],
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("more", [(), ("--broker-kills",)], ids=["clients", "and brokers"])
def test_a_storm_over_the_store(more):
    outcome = stress("store", "--seconds", "6", "--seed", "1", *more)
    assert outcome["ok"]
    assert outcome["kills"] >= 20


def test_a_storm_over_ray():
    assert stress("ray", "--seconds", "6", "--seed", "1")["ok"]


def test_a_short_soak():
    outcome = stress("soak", "--seconds", "8", "--seed", "1")
    assert outcome["ok"]
    assert outcome["fallbacks"] == 0
