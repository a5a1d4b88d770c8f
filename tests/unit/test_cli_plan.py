"""`mooncake-ray plan` as a program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).with_name("mooncake-ray"))
LAYOUTS = ("qwen3-0.6b", "tp=2,dp=4", "tp=2,dp=2")


def run(*args: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([COMMAND, "plan", *args], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_what_would_move():
    out = run(*LAYOUTS, "--ranks-per-host", "2").stdout
    assert "model     1.1 GiB in 310 tensors" in out
    assert "trainers  8 ranks on 4 hosts send 1.1 GiB" in out and "engines   4 ranks on 2 hosts want 2.2 GiB" in out
    for link in ("trainer-0  engine-0", "trainer-3  engine-1", "engine-0   engine-1"):
        assert link in out
    assert "publish" in out and "training waits" in out and "engines pause" in out


def test_as_json():
    found = json.loads(run(*LAYOUTS, "--json", "--ranks-per-host", "2", "--nic-gbit", "8", "--nics", "1").stdout)
    total = 596_049_920 * 2
    assert found["model_bytes"] == found["sent"]["bytes"] == sum(link["read_bytes"] for link in found["links"]) == total
    assert found["sent"]["max"] <= 1.02 * found["sent"]["mean"]
    assert found["relayed_bytes"] == sum(link["relayed_bytes"] for link in found["links"])
    # A gigabyte a second, and either engine's host has all of the model to get through it.
    assert found["seconds"]["floor_s"] == pytest.approx(total / 1e9, rel=0.01)
    assert found["seconds"]["floor_s"] <= found["seconds"]["move_s"] <= 1.1 * found["seconds"]["floor_s"]


def test_colocated_ranks_read_in_their_host():
    found = json.loads(run("qwen3-0.6b", "dp=4", "dp=4", "--colocate", "--ranks-per-host", "2", "--json").stdout)
    assert all(link["from"] == link["to"] or link["relayed_bytes"] for link in found["links"])


def test_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    run(*LAYOUTS, "--png", str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "there is no directory" in run(*LAYOUTS, "--png", str(tmp_path / "no" / "plan.png"), status=1).stderr


def test_models_are_listed():
    out = run("--models").stdout
    assert "kimi-k2            1026.4 B    69975      61" in out


def test_a_config_of_a_file(tmp_path):
    config = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "num_attention_heads": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert json.loads(run(str(tmp_path), "tp=2", "tp=4", "--json", "--dtype", "float32").stdout)["model_bytes"] == 4 * 7248


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("gpt-9", "tp=1", "tp=1"), "there is no model 'gpt-9'"),
        (("qwen3-8b", "tp=x", "tp=1"), "'tp=x' is not a layout"),
        (("qwen3-8b", "tp=1", "tp=1", "--ranks-per-host", "0"), "--ranks-per-host must be at least 1, got 0"),
        (("qwen3-8b", "tp=1", "tp=1", "--nic-gbit", "0"), "--nic-gbit must be"),
        (("qwen3-8b", "tp=1", "tp=1", "--bucket", "1"), "--bucket at least 1 KiB"),
        (("qwen3-8b", "tp=1", "tp=1", "--nics", "-1"), "--nics must not be negative"),
        (("qwen3-8b", "tp=1", "tp=1", "--dtype", "int5"), "dtype 'int5' is none of"),
    ],
)
def test_wrong_use_is_one_line(args, said):
    done = run(*args, status=1)
    assert said in done.stderr and len(done.stderr.splitlines()) == 1 and not done.stdout
