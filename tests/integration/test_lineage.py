"""What a lost node had made is made again, as plain Ray does: one program, run with the pool and without."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import HERE, environment

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def run(mode: str) -> dict:
    command = [sys.executable, str(HERE / "lineage_program.py"), mode]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return next(json.loads(line) for line in reversed(done.stdout.splitlines()) if line.startswith('{"before"'))


def test_lost_objects_are_reconstructed():
    expected, got = run("plain"), run("pool")
    assert got.pop("routed")
    assert got == expected
