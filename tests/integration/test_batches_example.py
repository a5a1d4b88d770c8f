"""Runs the example of batches as a user would."""

from __future__ import annotations

import re
import subprocess
import sys

from conftest import ROOT, environment


def test_the_driver_holds_no_batch():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "batches.py")], env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "bytes of the batch that the driver read: 0" in done.stdout
    tokens = [int(n) for n in re.findall(r"64 rows, (\d+) tokens", done.stdout)]
    assert len(tokens) == 2 and abs(tokens[0] - tokens[1]) < 1200, "balanced by tokens"
