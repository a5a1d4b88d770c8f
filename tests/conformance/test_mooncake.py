"""The transport through Mooncake's engine: its cases run in a network namespace of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)  # a whole suite, a minute where nothing else runs
@pytest.mark.skipif(not importlib.util.find_spec("mooncake"), reason="mooncake-transfer-engine is not installed")
def test_mooncake():
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("mooncake_cases.py"))],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
