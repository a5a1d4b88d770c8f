"""SGLang's `Engine`, without a server, in a group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import ray
from places import ROOT, python_of
from training import Training, made, save

import mooncake_ray
from bench.engines.sglang_server import STUBS

TOKENS, MARGIN = 6, 0.12  # SGLang computes in bfloat16 by torch's own operations, in another order than transformers


class Program:
    def __init__(self, *words: str) -> None:
        (ROOT / "build").mkdir(exist_ok=True)
        self.log = ROOT / "build" / "sglang-in-process.log"
        environment = os.environ | {"PYTHONPATH": str(STUBS), "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python_of("sglang"), "-W", "ignore", str(Path(__file__).parent / "sglang_in_process.py"), *words],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def ask(self, *words):
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, self.log.read_text(errors="replace")[-4000:]
        return json.loads(line)

    def end(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(30)
            self.process.stdout.close()


@pytest.fixture
def group(cluster):
    group = mooncake_ray.WeightSyncGroup("sglang-in-process")
    yield group
    group.shutdown()


def test_updates(cluster, group, tmp_path):
    python_of("sglang")
    save(made("dense"), tmp_path / "first")
    program = Program(str(tmp_path / "first"), group.name, cluster)
    try:
        training = Training.remote("dense")
        ray.get(training.join.remote(group))
        assert program.answer() == "attached"
        for mode in ("p2p", "delta"):
            ray.get(training.step.remote(0.2))
            program.ask("start", [5, 6, 7], 200)
            version = group.sync(mode=mode).version
            spans = program.ask("end")
            assert spans[-1]["version"] == str(version) and spans[-1]["end"] == 200
            for prompt, expected in ray.get(training.clear.remote(3, TOKENS, MARGIN)):
                assert program.ask("generate", prompt, TOKENS) == expected
            said, sums = program.ask("state")
            assert said == str(version)
            ray.get(training.save.remote(str(tmp_path / mode)))
            assert program.ask("disk", str(tmp_path / mode), version) > 0
            assert program.ask("state") == [str(version), sums]
            group.sync(mode="p2p")  # which knows nothing of what came from the disk
        ray.kill(training)
    finally:
        program.end()
