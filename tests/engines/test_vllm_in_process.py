"""vLLM without a server: an `LLM` that a trainer drives as vLLM has it, and an `AsyncLLM` in a Ray actor."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import ray
from places import HERE, ROOT, python_of
from training import Training, made, save

import mooncake_ray
from mooncake_ray.engines.vllm import VLLMEngine

TOKENS = 4
PATHS = os.pathsep.join([str(HERE), str(ROOT)])


@pytest.mark.parametrize("kind", ["module", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("listed", "reloaded"))])
def test_llm_and_trainer_in_one_process(cluster, tmp_path, kind):
    done = subprocess.run(
        [python_of("vllm"), str(HERE / "vllm_llm_program.py"), cluster, str(tmp_path), kind],
        env={**os.environ, "PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["agree"] == [True] * 9
    assert told["said"] == ["0", "1", "2"] and told["version"] == 2
    assert told["modes"][0] == "p2p"


def test_async_llm_in_an_actor(cluster, tmp_path):
    """Its workers are processes: vLLM has no Ray executor on CPUs."""
    from vllm_actor import Held

    save(made("dense"), tmp_path)
    group = mooncake_ray.WeightSyncGroup("actor")
    training = Training.remote("dense")
    ray.get(training.join.remote(group))
    environment = {"py_executable": python_of("vllm"), "env_vars": {"PYTHONPATH": PATHS, **Held.environment}}
    name = "vllm-actor"
    held = ray.remote(Held).options(name=name, runtime_env=environment, num_cpus=0, max_concurrency=16).remote(str(tmp_path))
    try:
        ray.get(held.ready.remote(), timeout=600)
        engine = VLLMEngine(actor=name)
        engine.attach(group, "held")
        for mode in ("p2p", "delta"):
            ray.get(training.step.remote(0.2))
            version = group.sync(mode=mode).version
            assert engine.weight_version == str(version)
            for prompt, expected in ray.get(training.clear.remote(3, TOKENS)):
                assert ray.get(held.generate.remote(prompt, TOKENS)) == expected
        assert len(engine.checksums()) > 10
    finally:
        ray.kill(held)
        group.shutdown()
        ray.kill(training)


def test_the_backend_is_registered_wherever_vllm_is_imported(cluster):
    said = subprocess.run(
        [
            python_of("vllm"),
            "-c",
            "from vllm.plugins import load_general_plugins; load_general_plugins(); load_general_plugins()\n"
            "from vllm.distributed.weight_transfer.factory import *\n"
            "print(WeightTransferEngineFactory._registry['mooncake_ray'](), WeightTransferTrainerFactory._registry['mooncake_ray']())",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout
    assert "MooncakeWeightTransferEngine" in said and "MooncakeTrainerWeightTransferEngine" in said
    assert sys.executable != python_of("vllm")
