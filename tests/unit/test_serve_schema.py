"""Requests made up from the endpoint's own schema: every answer is one that the schema has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from serve_site import Site

from mooncake_ray.weights.delta_log import DeltaLog
from mooncake_ray.weights.snapshot import SnapshotStore
from mooncake_ray.weights.source import StateDictSource

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")


def run(site, examples, folder, *arguments):
    """Its own process, as it is run by people. Its caches are in the folder."""
    command = [SCHEMATHESIS, "run", f"{site.url}/openapi.json", "--max-examples", str(examples), "--request-timeout", "60", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-2000:]
    operations = sum(len(path) for path in site.app.openapi()["paths"].values())
    assert re.search(rf"Tested: {operations}\b", done.stdout), done.stdout[-3000:]


def check(tmp_path, examples, tokens):
    model = {"w": torch.randn(8, 8), "b": torch.randn(3).bfloat16()}
    if tokens:
        log = DeltaLog(tmp_path / "store", fsync=False)
        for version in range(3):
            model["w"][version] += 1
            log.append(version, StateDictSource(model))
        # The log is another one's to write: what is stored must be refused or stored, and in no case break it.
    else:
        store = SnapshotStore(tmp_path / "store", fsync=False)
        store.save(3, StateDictSource(model), extra={"files": {"config.json": "{}"}})
    site = Site(tmp_path / "store", **tokens, max_poll_s=0.02, max_stream_s=0.02)
    try:
        run(site, examples, tmp_path, *(("-H", "Authorization: Bearer secret") if tokens else ()))
    finally:
        site.close()


@pytest.mark.parametrize("tokens", [{}, {"read_token": "eye", "publish_token": "secret"}], ids=["open", "with tokens"])
def test_every_answer_is_in_the_schema(tmp_path, tokens):
    check(tmp_path, 5, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [{}, {"read_token": "eye", "publish_token": "secret"}], ids=["open", "with tokens"])
def test_every_answer_is_in_the_schema_at_length(tmp_path, tokens):
    check(tmp_path, 200, tokens)


def test_the_schema_asks_for_tokens_where_the_endpoint_does(tmp_path):
    for settings, asks in (({}, False), ({"read_token": "eye"}, True)):
        site = Site(tmp_path / "store", **settings)
        try:
            paths = site.app.openapi()["paths"]
            assert ("security" in paths["/v1/versions"]["get"]) == asks
            assert "security" in paths["/v1/versions/{version}"]["put"]
            assert "security" not in paths["/v1/health"]["get"]
        finally:
            site.close()
