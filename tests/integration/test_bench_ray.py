"""`mooncake-ray bench-link --ray`: one command on one node of a cluster measures what lies between it and another."""

from __future__ import annotations

import json
import sys

import pytest

COMMAND = [sys.executable, "-c", "from mooncake_ray.cli.main import main; raise SystemExit(main())", "bench-link", "--ray", "--max", "256K"]


def test_between_two_nodes(cluster_of):
    nodes = cluster_of(2)
    done = nodes.run(0, [*COMMAND, "--json"], timeout_s=240)
    found = json.loads(done.stdout)
    there = nodes.hosts[1]
    assert found["peer"].startswith(f"{there.address}:") and len(found["node"]) == 56
    rows = [r for r in found["results"] if r["transport"] == "tcp"]
    assert [r["nbytes"] for r in rows] == [4096, 65536, 262144], done.stderr
    for r in rows:
        assert not r["error"] and r["runs"] >= 5
        assert 0 < r["p50_s"] <= r["p99_s"] and r["bytes_per_s"] == pytest.approx(r["nbytes"] / r["p50_s"])
    for nics in (found["peer_nics"], rows[0]["nics"]):  # with its speed where the device says one
        assert len(nics) == 1 and nics[0].startswith("eth0")
    (shm,) = [r for r in found["results"] if r["transport"] == "shm"]
    assert "another network namespace" in shm["error"], "two hosts"

    text = nodes.run(1, [*COMMAND, nodes.hosts[0].address, "--transport", "tcp"], timeout_s=240).stdout
    assert text.startswith(f"from {nodes.hosts[0].address}:") and "TRANSPORT" in text and "256 KiB" in text

    wrong = nodes.run(0, [*COMMAND, "10.9.8.7"], timeout_s=240, check=False)
    assert wrong.returncode == 1 and not wrong.stdout
    assert "0 nodes are meant by '10.9.8.7'" in wrong.stderr and there.address in wrong.stderr
