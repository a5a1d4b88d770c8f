"""Runs the examples of syncing weights as a user would."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from conftest import ROOT, environment


def run(name: str) -> str:
    program = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_broadcast():
    out = run("weights_broadcast")
    assert re.findall(r"version (\d) by nccl, .*: tokens of versions {(\d)}", out) == [(v, v) for v in "012"]
    assert re.findall("the trainer's tokens: (.*)", out) == ["True"] * 3


def test_p2p_with_another_layout():
    out = run("weights_p2p")
    assert re.findall(r"moved ([\d.]+) of the model's bytes, bit for bit: (.*)", out) == [("1.00", "True")] * 3


@pytest.mark.slow
def test_delta():
    found = re.findall(r"version \d: (\d+) of (\d+) bytes by delta for (\d) steps, bit for bit: (.*)", run("weights_delta"))
    assert [(steps, same) for _, _, steps, same in found] == [("1", "True"), ("1", "True"), ("3", "True")]
    assert all(int(patch) < 0.02 * int(full) * int(steps) for patch, full, steps, _ in found), "about a byte for each element that changed"
