"""Runs the example of the endpoint as a user would."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT, environment


@pytest.mark.slow
def test_what_was_trained_is_served_and_writes():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "serve_endpoint.py")], env=environment(), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "served: [20, 40]" in done.stdout and "served: [40, 60]" in done.stdout
    assert "version 60 writes: the quick brown fox jumps over the lazy dog" in done.stdout
    assert "fetched again by the client: version 60" in done.stdout
