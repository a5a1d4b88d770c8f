"""The parts of the bench of the endpoint that measure nothing, and its readers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from serve_site import Site

from bench import report, serve, sink
from mooncake_ray.weights.snapshot import SnapshotStore
from mooncake_ray.weights.source import StateDictSource

ROOT = Path(__file__).parents[2]


def test_plan():
    assert serve.plan() == [serve.Step("200MB", 64, 7)]
    assert serve.plan(quick=True) == [serve.Step("20MB", 64, 2)]
    assert serve.plan(runs=3)[0].rounds == 3
    with pytest.raises(ValueError, match="sizes"):
        serve.plan(["1GiB"])


@pytest.mark.parametrize(("nginx", "mine", "ok"), [(100.0, 81.0, True), (100.0, 79.0, False), (None, 79.0, None)])
def test_targets(nginx, mine, ok):
    found = [report.summarize("serve", "64-readers", s, [r], unit="bytes/s") for s, r in (("nginx", nginx), ("serve", mine)) if r]
    (target,) = serve.targets(found)
    assert target.ok is ok and list(report.json_lines(found)) and list(report.tables(found, serve.BASELINES))


def test_readers_follow_to_the_data_port_and_get_all(tmp_path):
    store = SnapshotStore(tmp_path, fsync=False)
    store.save(1, StateDictSource({"w": torch.zeros(100_000)}))
    site = Site(tmp_path)
    try:
        url = f"{site.url}/v1/versions/latest/files/model.safetensors"
        with site.desk.volume(1) as volume:
            nbytes = volume.model.nbytes
        assert sink.read(url) == nbytes
        with subprocess.Popen(
            [sys.executable, "-m", "bench.sink", url, "5"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            assert process.stdout.readline() == "ready\n"
            out, _ = process.communicate("\n", timeout=60)
        said = json.loads(out)
        assert (said["bytes"], said["readers"]) == (5 * nbytes, 5) and said["began"] < said["ended"]
        with pytest.raises(RuntimeError, match="404"):
            sink.read(url.replace("latest", "9"))
    finally:
        site.close()
