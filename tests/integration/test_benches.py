"""The benches that compare the pool with Ray, small: they run, check what comes back, and say it in the agreed form. Judges no speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cluster import unavailable

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


PEERS = {"ray-verl", "ray-lists", "mooncake", "transferqueue", "pickle5"}
MAY_BE_MISSING = {"mooncake", "transferqueue"}  # what requirements-bench.txt has, and namespaces that not every system gives


def run(name):
    """The lines of a quick run, and what it said besides."""
    command = [sys.executable, "-m", "bench", name, "--quick", "--json", "--runs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(line.keys() >= {"bench", "case", "subject", "value", "unit", "runs"} for line in lines)
    assert all(line["bench"] == name and line["value"] > 0 and line["runs"] == 1 for line in lines)
    return {(line["case"], line["subject"], line["unit"]) for line in lines}, done.stderr


def lines_of(cases):
    return {(case, subject, unit) for case, (unit, subjects) in cases.items() for subject in subjects}


RAYS = {"ray", "ray-zero-copy", "pool"}
SPILLERS = {"ray", "ray-numpy", "store", "pool"}
PARTS = {f"bytes/{rows}": ("bytes", {"pool", "needed", "whole"}) for rows in ("slice", "scattered")}
PARTS |= {f"time/{rows}": ("s", {"pool", "whole"}) for rows in ("slice", "scattered")}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("actor_pipeline", {"time": ("s", RAYS), "peak-memory": ("bytes", RAYS)}),
        ("spill", {case: ("bytes/s", SPILLERS) for case in ("put", "get", "putget")}),
        ("partial", PARTS),
        ("driver", {"end-to-end": ("s", {"verl", "pool"}), "driver-bytes": ("bytes", {"verl", "pool"})}),
    ],
)
def test_lines_of_json(name, cases):
    found, _ = run(name)
    assert found == lines_of(cases)


PULLS = {"mooncake", "floor", "ray", "tcp"}


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(unavailable()), reason=f"no namespaces here: {unavailable()}")
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        (
            "pull",
            {f"{link}/{size}": ("bytes/s", PULLS) for link in ("shaped", "unshaped") for size in ("1MiB", "64MiB")}
            | {"latency/64KiB": ("s", PULLS)},
        ),
        ("fanout", {"64MiB": ("s", {"one", "all", "ray"})}),
    ],
)
def test_between_nodes(name, cases):
    found, said = run(name)
    missing = {peer for peer in ("mooncake",) if f"{peer}: not run: " in said}
    assert found == {line for line in lines_of(cases) if line[1] not in missing}


@pytest.mark.timeout(600)
def test_plans():
    found, said = run("plan")
    cases = {
        "time": ("s", {"pool", "upstream"}),
        "load": ("x", {"pool", "upstream", "model"}),
        "bytes": ("bytes", {"pool", "upstream", "model"}),
    }
    missing = {"upstream"} if "upstream: not run: " in said else set()
    assert found == {line for line in lines_of({f"{what}/k2-32x8-32x2": c for what, c in cases.items()}) if line[1] not in missing}


@pytest.mark.timeout(600)
def test_patches():
    forms = {"pool", "pool-plain", "pool-apart", "xor-zstd", "coo", "dense"}
    cases = {"encode/unchanged": ("bytes/s", forms | {"memory-read"})}
    for changed in ("0.5%", "2%", "5%"):
        cases |= {f"bytes-per-changed/{changed}": ("bytes", forms), f"apply/{changed}": ("bytes/s", forms)}
        cases[f"encode/{changed}"] = ("bytes/s", forms | {"memory-read"})
    assert run("delta")[0] == lines_of(cases)


@pytest.mark.timeout(600)
def test_batches():
    """Every subject in every case of its. A peer that cannot run is said to be left out."""
    found, said = run("batch")
    missing = {peer for peer in PEERS if f"{peer}: not run: " in said}
    assert missing <= MAY_BE_MISSING, said
    cases = {"stored/S64": ("bytes", PEERS | {"pool", "ideal"})}
    cases |= {f"{op}/S64": ("s", PEERS | {"pool", "pool-padded", "fastest-peer"}) for op in ("put", "get", "putget")}
    cases |= {"putget-lists/S64": ("s", PEERS - {"ray-verl"} | {"pool", "pool-lists", "fastest-peer"})}
    assert found == {line for line in lines_of(cases) if line[1] not in missing}


@pytest.mark.timeout(600)
def test_endpoint():
    found, said = run("serve")
    missing = {"nginx"} if "nginx: not run: " in said else set()
    assert found == {line for line in lines_of({"64-readers": ("bytes/s", {"nginx", "serve"})}) if line[1] not in missing}
