"""A real vLLM server in a group: every mode, with one worker and with two, and what becomes of it when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from places import ROOT, python_of
from training import Training, made, save

import mooncake_ray
from bench.engines.vllm_server import VLLMServer
from mooncake_ray.engines.http import HTTPStatusError, JSONClient
from mooncake_ray.engines.vllm import VLLMEngine
from mooncake_ray.errors import ConfigError, MooncakeRayError, SyncAbortedError, WeightSyncError

TOKENS = 4
ONCE = pytest.mark.parametrize("live", ["dense"], indirect=True)  # what is the same for all models
MOE_IS_SLOW = pytest.mark.parametrize("live", ["dense", pytest.param("moe", marks=pytest.mark.slow)], indirect=True)


@dataclass
class Live:
    kind: str
    folder: Path
    server: VLLMServer
    engine: VLLMEngine
    group: mooncake_ray.WeightSyncGroup
    training: object
    tp: int

    def restart(self, folder: Path) -> None:
        """A new server, which knows nothing of the one before, serving what is in the folder."""
        self.server = VLLMServer(python_of("vllm"), folder, self.server.log.with_suffix(".again.log"), tp=self.tp).ready()
        self.engine = VLLMEngine(self.server.url)

    def attach(self) -> None:
        self.engine.attach(self.group, "vllm")

    def agrees(self, version: int | str) -> None:
        """It computes what transformers does with the trainer's weights, and says which version that is."""
        for prompt, expected in ray.get(self.training.clear.remote(3, TOKENS)):
            assert self.server.generate(prompt, TOKENS) == expected, self.server.said()
        assert self.engine.weight_version == str(version)


@pytest.fixture(scope="module", params=["dense", "moe"])
def live(request, cluster, tmp_path_factory):
    python = python_of("vllm")
    kind, tp = request.param, 2 if request.param == "moe" else 1
    folder = tmp_path_factory.mktemp(kind)
    save(made(kind), folder)
    server = VLLMServer(python, folder, ROOT / "build" / f"vllm-{kind}.log", tp=tp)
    group = mooncake_ray.WeightSyncGroup(f"vllm-{kind}", liveness_s=30.0)
    training = Training.remote(kind)
    ray.get(training.join.remote(group))
    live = Live(kind, folder, server, VLLMEngine(server.url), group, training, tp)
    try:
        server.ready()
        live.attach()
        yield live
    finally:
        live.server.stop()
        group.shutdown()
        ray.kill(training)


def test_before_the_first_sync_it_serves_what_it_loaded(live):
    live.agrees("default")


@pytest.mark.parametrize("mode", ["p2p", "delta", "nccl", "auto"])
def test_modes(live, mode):
    before = live.group.status().version
    ray.get(live.training.step.remote(1.0))
    new = ray.get(live.training.clear.remote(8, TOKENS))
    assert [live.server.generate(prompt, TOKENS) for prompt, _ in new] != [expected for _, expected in new], (
        "nothing is to be seen of a step"
    )
    report = live.group.sync(mode=mode)
    assert report.version == before + 1 and report.engines == ["vllm"] and not report.lost and not report.fallbacks
    assert mode in (report.mode, "auto")
    live.agrees(report.version)


@ONCE
def test_requests_that_run_go_on_and_nothing_old_is_used_for_new_ones(live):
    before = live.group.sync().version
    ray.get(live.training.step.remote(0.2))
    prompt = list(range(1, 101))  # three blocks of the prefix cache
    old = live.server.generate(prompt, 8)
    ended = []
    running = threading.Thread(target=lambda: ended.append(live.server.spans([5, 6, 7], 200)))
    running.start()
    version = live.group.sync(mode="p2p").version
    running.join(120)
    first, *more = ended[0]
    assert first[:2] == (str(before), 0) or first == (str(version), 0, 200)
    assert [at for _, at, _ in more] == [to for _, _, to in ended[0][:-1]] and ended[0][-1][2] == 200
    assert {v for v, _, _ in ended[0]} <= {str(before), str(version)} and len(ended[0]) <= 2
    assert len(old) == 8  # its prefix was cached
    assert live.server.generate(prompt, 8) == live.server.complete(prompt, 8, cache_salt="another")["token_ids"]
    live.agrees(version)


@ONCE
def test_the_example(live):
    """Also: a server goes from one cluster to another."""
    command = [sys.executable, str(ROOT / "examples" / "vllm_live_update.py"), str(live.folder), live.server.url]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:] + live.server.said()
    assert done.stdout.count("; version ") == 3 and done.stdout.count(" of version ") >= 3
    live.attach()
    live.agrees(live.group.sync().version)


@ONCE
def test_pause_and_resume(live):
    live.engine.pause("keep")
    ended = []
    waiting = threading.Thread(target=lambda: ended.append(live.server.generate([5, 6, 7], 4)))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive() and not ended
    live.engine.resume()
    waiting.join(60)
    assert len(ended[0]) == 4


@MOE_IS_SLOW
def test_errors_say_what_is_wrong(live):
    with pytest.raises(ConfigError, match="http://host:port"):
        VLLMEngine("localhost")
    with pytest.raises(ConfigError, match="no actor 'nobody'"):
        VLLMEngine(actor="nobody")
    with pytest.raises(WeightSyncError, match="Connection refused"):
        _ = VLLMEngine("http://127.0.0.1:9").weight_version
    with pytest.raises(ValueError, match="nobody"):
        live.engine.attach("nobody", "vllm")
    server = JSONClient(live.server.url)
    for info, why in (
        ({"colour": "blue"}, "unexpected keyword argument 'colour'"),
        ({"group": "nobody", "timeout_s": 1.0}, "no group 'nobody'"),
    ):
        with pytest.raises(HTTPStatusError, match=why):
            server.post("init_weight_transfer_engine", {"init_info": info}, timeout_s=60)
    live.attach()
    live.agrees(live.group.sync().version)


def test_killed_in_an_update_it_comes_back_with_the_current_version(live, tmp_path):
    """In the middle of staging, or of taking over. What it then serves is what an engine that never was updated loads from the disk."""
    ray.get(live.training.step.remote(0.2))
    version = live.group.sync(mode="delta").version
    live.agrees(version)
    sums = live.engine.checksums()
    probes = [list(range(n, n + 20)) for n in range(0, 400, 20)]
    answers = [live.server.generate(probe, 8) for probe in probes]
    ray.get(live.training.save.remote(str(tmp_path / "now")))

    stopped, phase = ("Worker", "staging") if live.kind == "dense" else ("api_server", "committing")
    ray.get(live.training.nudge.remote(50))
    live.server.signal(signal.SIGSTOP, stopped)
    under_way = live.group.async_sync(mode="p2p", timeout_s=120)
    end = time.monotonic() + 60
    while (now := live.group.status().update) is None or now.phase != phase:
        assert time.monotonic() < end, live.group.status()
        time.sleep(0.01)
    live.server.kill()
    with pytest.raises(MooncakeRayError, match="no engine is left") as raised:
        ray.get(under_way)
    assert isinstance(getattr(raised.value, "cause", raised.value), SyncAbortedError)
    assert live.group.versions() == {}

    live.restart(tmp_path / "now")
    assert live.engine.checksums() == sums, "what was synced is not what is on the disk"
    assert [live.server.generate(probe, 8) for probe in probes] == answers
    live.attach()
    current = live.group.sync().version
    assert current > version
    live.agrees(current)
