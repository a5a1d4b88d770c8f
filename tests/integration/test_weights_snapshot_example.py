"""Runs the example of snapshots as a user would."""

from __future__ import annotations

import re
import subprocess
import sys

from conftest import ROOT, environment


def test_a_restart_in_another_layout():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "weights_snapshot.py")], env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "kept: [2, 3]" in done.stdout
    assert "as if trained in this layout: True" in done.stdout
    sizes = [int(n) for n in re.findall(r"tp\d wrote (\d+) bytes", done.stdout)]
    assert len(sizes) == 12 and max(sizes) < 1.2 * min(sizes), "each rank writes its share"
