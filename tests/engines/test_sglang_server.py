"""A real SGLang server in a group: every mode, with one rank and with two, and what becomes of it when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from places import ROOT, python_of
from training import Training, made, save
from waiting import eventually

import mooncake_ray
from bench.engines.sglang_server import SGLangServer
from mooncake_ray.engines.sglang import SGLangEngine
from mooncake_ray.errors import ConfigError, MooncakeRayError, PlanError, SyncAbortedError, SyncTimeoutError, WeightSyncError

TOKENS, MARGIN = 6, 0.12  # SGLang computes in bfloat16 by torch's own operations, in another order than transformers
ONCE = pytest.mark.parametrize("live", ["dense"], indirect=True)  # what is the same for all models
MOE_IS_SLOW = pytest.mark.parametrize("live", ["dense", pytest.param("moe", marks=pytest.mark.slow)], indirect=True)


@dataclass
class Live:
    kind: str
    tp: int
    server: SGLangServer
    group: mooncake_ray.WeightSyncGroup
    training: object
    address: str

    @property
    def engine(self) -> SGLangEngine:
        return self.server.engine

    def start(self, folder: Path, name: str) -> SGLangServer:
        return SGLangServer(python_of("sglang"), folder, ROOT / "build" / f"sglang-{self.kind}-{name}.log", tp=self.tp)

    def attach(self, **more) -> None:
        self.engine.attach(self.group, "sglang", address=self.address, **more)
        if (version := self.group.status().version) >= 0:
            self.group.wait_for(version)

    def agrees(self, version: int | str) -> None:
        """It computes what transformers does with the trainer's weights, and says which version that is."""
        assert self.engine.weight_version == str(version)
        for prompt, expected in ray.get(self.training.clear.remote(3, TOKENS, MARGIN)):
            assert self.server.generate(prompt, TOKENS) == expected, self.server.said()

    def sums(self, folder: Path) -> list[dict[str, str]]:
        """Of what SGLang itself makes of the trainer's weights, from the disk. Has the weights loaded that it should have already, of which its
        group then knows nothing."""
        before = self.engine.weight_version
        ray.get(self.training.save.remote(str(folder)))
        self.engine.update_from_disk(str(folder), int(before))
        sums = self.engine.checksums()
        self.group.sync(mode="p2p")
        return sums


@pytest.fixture(scope="module", params=["dense", "moe"])
def live(request, cluster, tmp_path_factory):
    kind, tp = request.param, 2 if request.param == "moe" else 1
    python_of("sglang")
    folder = tmp_path_factory.mktemp(kind)
    save(made(kind), folder)
    group = mooncake_ray.WeightSyncGroup(f"sglang-{kind}", liveness_s=30.0)
    training = Training.remote(kind)
    live = Live(kind, tp, None, group, training, cluster)
    live.server = live.start(folder, "first")
    try:
        ray.get(training.join.remote(group))
        live.server.ready()
        live.attach()
        yield live
    finally:
        live.server.kill()
        group.shutdown()
        ray.kill(training)


def test_before_the_first_sync_it_serves_what_it_loaded(live):
    live.agrees("default")


@pytest.mark.parametrize("mode", ["p2p", "delta", "nccl", "auto"])
def test_modes(live, mode, tmp_path):
    before = live.group.status().version
    ray.get(live.training.step.remote(0.2))
    report = live.group.sync(mode=mode)
    assert report.version == before + 1 and report.engines == ["sglang"] and not report.lost and not report.fallbacks
    assert mode in (report.mode, "auto")
    live.agrees(report.version)
    sums = live.engine.checksums()
    assert len(sums) == live.tp and sums == live.sums(tmp_path)


@ONCE
@pytest.mark.parametrize(("keep", "flush"), [("retract", True), ("in_place", False)])
def test_requests_that_run_go_on_and_say_which_version_made_which_token(live, keep, flush):
    live.attach(keep=keep, flush=flush)
    before = live.group.sync().version
    ray.get(live.training.step.remote(0.2))
    ended = []
    running = threading.Thread(target=lambda: ended.append(live.server.complete([5, 6, 7], 240, stream=False)))
    running.start()
    eventually(lambda: _running(live))
    version = live.group.sync(mode="p2p").version
    running.join(120)
    spans = ended[0]["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [str(before), str(version)]
    assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"] > 0 and spans[1]["end"] == 240 == len(ended[0]["output_ids"])
    live.agrees(version)
    live.attach()


@ONCE
def test_what_older_weights_have_cached_is_not_used(live):
    live.group.sync()
    prompt = list(range(1, 101))
    live.server.generate(prompt, 4)
    assert live.server.complete(prompt, 4)["meta_info"]["cached_tokens"] > 0
    ray.get(live.training.step.remote(0.2))
    live.group.sync()
    assert live.server.complete(prompt, 4)["meta_info"]["cached_tokens"] == 0


@ONCE
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause_modes(live, mode):
    """For an update by the group, and by hand."""
    live.attach(pause=mode)
    begin = live.group.status().version
    ended = []
    running = threading.Thread(target=lambda: ended.append(live.server.complete([5, 6, 7], 200)))
    running.start()
    eventually(lambda: _running(live))
    ray.get(live.training.step.remote(0.2))
    assert live.group.sync(mode="p2p").version == begin + 1
    running.join(120)
    meta = ended[0]["meta_info"]
    assert meta["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
    live.engine.pause(mode)
    waiting = threading.Thread(target=lambda: ended.append(live.server.complete([5, 6, 7], 4)))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive() and len(ended) == 1
    live.engine.resume()
    waiting.join(60)
    assert len(ended[1]["output_ids"]) == 4
    live.agrees(begin + 1)
    live.attach()


@ONCE
def test_an_update_that_somebody_left_open_is_no_obstacle(live):
    live.engine.server.begin(timeout_s=30)
    ray.get(live.training.step.remote(0.2))
    live.agrees(live.group.sync().version)


@MOE_IS_SLOW
def test_messages_that_make_no_sense_change_nothing(live):
    sums, version = live.engine.checksums(), live.engine.weight_version
    for message in ({"do": "dance"}, {}, {"do": "commit", "timeout_s": 0.2}, {"do": "attach"}, {"do": "learn", "timeout_s": 0.1}, [1]):
        live.engine._tell(message, live.tp)
    assert live.server.answers("health") and live.engine.checksums() == sums and live.engine.weight_version == version
    ray.get(live.training.step.remote(0.2))
    live.agrees(live.group.sync().version)


@MOE_IS_SLOW
def test_errors_say_what_is_wrong(live):
    with pytest.raises(ConfigError, match="http://host:port"):
        SGLangEngine("localhost")
    with pytest.raises(WeightSyncError, match="Connection refused"):
        _ = SGLangEngine("http://127.0.0.1:9").weight_version
    with pytest.raises(ConfigError, match="keep is retract or in_place"):
        live.engine.attach(live.group, "sglang", keep="perhaps")
    with pytest.raises(SyncTimeoutError, match="no group 'nobody'"):
        live.engine.attach("nobody", "sglang", address=live.address, timeout_s=5)
    live.attach()
    live.agrees(live.group.sync().version)


@ONCE
def test_a_group_with_another_model_is_refused(live):
    other = mooncake_ray.WeightSyncGroup(f"other-{live.kind}")
    stranger = Training.remote("moe" if live.kind == "dense" else "dense")
    try:
        ray.get(stranger.join.remote(other))
        sums = live.engine.checksums()
        with pytest.raises(PlanError, match=r"layers\.0\.mlp"):
            live.engine.attach(other, "sglang", address=live.address)
        assert live.engine.checksums() == sums
    finally:
        other.shutdown()
        ray.kill(stranger)
    live.attach()
    live.agrees(live.group.sync().version)


def test_sglangs_own_ways(live, tmp_path):
    from safetensors.torch import load_file

    live.engine.detach()
    eventually(lambda: not live.group.versions())
    ray.get(live.training.step.remote(0.2))
    ray.get(live.training.save.remote(str(tmp_path)))
    named = load_file(tmp_path / "model.safetensors")
    live.engine.update_from_disk(str(tmp_path), 100)
    sums = live.engine.checksums()
    live.agrees(100)
    ways = [
        lambda version, **way: live.engine.update_from_tensor(named, version, **way),
        lambda version, **way: live.engine.update_from_distributed(named, version, **way),
    ]
    for n, update in enumerate(ways):
        zeros = {name: tensor.zero_() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
        live.engine.update_from_tensor(zeros, 200 + n)
        assert live.engine.checksums() != sums
        assert update(300 + n, bucket_bytes=60_000) > 0
        assert live.engine.checksums() == sums
        live.agrees(300 + n)
    wrong = {name.replace("layers.1", "layers.9"): tensor for name, tensor in named.items()}
    with pytest.raises(PlanError, match=r"layers\.[19]"):
        live.engine.update_from_tensor(wrong, 400)
    with pytest.raises(WeightSyncError, match="400"):
        live.engine.update_from_disk(str(tmp_path / "nothing"), 400)
    live.agrees(301)
    live.attach()
    live.agrees(live.group.sync().version)


def test_killed_in_an_update_it_comes_back_with_the_current_version(live, tmp_path):
    """In the middle of staging, or of taking over. What it then has is what SGLang loads from the disk."""
    ray.get(live.training.step.remote(0.2))
    version = live.group.sync().version
    live.agrees(version)
    ray.get(live.training.save.remote(str(tmp_path / "now")))
    live.server.signal(signal.SIGSTOP, "scheduler" if live.kind == "dense" else "launch_server")
    under_way = live.group.async_sync(mode="p2p", timeout_s=120)
    ready, _ = ray.wait([under_way], timeout=1.0)
    assert not ready
    live.server.kill()
    with pytest.raises(MooncakeRayError, match="no engine is left") as raised:
        ray.get(under_way)
    assert isinstance(getattr(raised.value, "cause", raised.value), SyncAbortedError)
    assert live.group.versions() == {}

    live.server = live.start(tmp_path / "now", "again").ready()
    sums = live.engine.checksums()
    live.attach()
    current = live.group.sync().version
    assert current > version
    live.agrees(current)
    assert live.engine.checksums() == sums  # nothing was trained since


@ONCE
def test_it_outlives_its_group(live):
    live.engine.detach()
    eventually(lambda: not live.group.versions())
    sums = live.engine.checksums()
    live.attach()
    live.group.wait_for(live.group.status().version)
    assert live.engine.checksums() == sums


@MOE_IS_SLOW
def test_it_outlives_its_cluster(live):
    """Ray would end the process a minute after its cluster is gone."""
    program = [sys.executable, str(Path(__file__).parent / "sglang_elsewhere.py"), live.kind]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)])}
    elsewhere = subprocess.Popen(program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        address = elsewhere.stdout.readline().strip()
        sums = live.engine.checksums()
        live.engine.attach("elsewhere", "sglang", address=address)
        elsewhere.communicate(timeout=240)
        eventually(lambda: live.server.log.read_text().count("its cluster is gone") == live.tp, 120.0)
        assert live.engine.checksums() == sums
    finally:
        elsewhere.kill()
        elsewhere.wait(30)
    live.attach()
    live.agrees(live.group.sync().version)


def _running(live: Live) -> bool:
    load = live.engine.server.call("v1/loads", timeout_s=30)
    return any(load_of.get("num_running_reqs", 0) for load_of in load["loads"])
