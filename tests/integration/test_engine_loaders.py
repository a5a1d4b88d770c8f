"""The loaders of real engines, where there are any: `MOONCAKE_VLLM_PYTHON` and `MOONCAKE_SGLANG_PYTHON` name a Python that has the engine, and
torch for CPUs. `make test-engines` sees to them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PYTHONS = {
    name: os.environ.get(f"MOONCAKE_{name.upper()}_PYTHON") or (sys.executable if importlib.util.find_spec(name) else "")
    for name in ("vllm", "sglang")
}
STAND_INS = {"sglang": [str(ROOT / "tests" / "engines" / "stubs_sglang")]}  # for kernels that there are none of for CPUs
SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
DEEPSEEK = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_shared_experts": 1}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def model(kind: str):
    import transformers as t

    moe = SIZES | {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "max_position_embeddings": 128}
    if kind == "qwen3":  # fewer heads of keys and values than ranks, tied embeddings
        return t.Qwen3ForCausalLM(t.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True))
    if kind == "qwen3-moe":
        return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**moe, num_key_value_heads=2, head_dim=32, num_experts=4))
    more = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    return t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**moe, **DEEPSEEK, **more))


def save(kind: str, folder: Path) -> None:
    """A checkpoint as they are published: a tensor for each expert."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    module = model(kind)
    out = {}
    for name, tensor in module.state_dict().items():
        tensor = tensor.to(torch.float32 if "e_score" in name else torch.bfloat16)
        if name == "lm_head.weight" and module.config.tie_word_embeddings:
            continue
        if ".experts." not in name or tensor.dim() < 3:
            out[name] = tensor.clone()
            continue
        at, _, leaf = name.rpartition(".")
        for e, expert in enumerate(tensor):
            parts = [expert] if leaf == "down_proj" else expert.chunk(2)
            names = ["down_proj"] if leaf == "down_proj" else ["gate_proj", "up_proj"]
            out |= {f"{at}.{e}.{n}.weight": p.clone() for n, p in zip(names, parts, strict=True)}
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    module.config.architectures = [type(module).__name__]
    module.config.save_pretrained(folder)
    if kind == "deepseek":  # as the published model has them, and engines ask for them
        path = folder / "config.json"
        config = json.loads(path.read_text()) | {
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "rope_theta": 1e4,
        }
        del config["rope_parameters"]
        scaling = {
            "factor": 4,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        }
        path.write_text(json.dumps(config | {"rope_scaling": scaling | {"type": "yarn", "rope_type": "yarn"}}))


SLOW = ("qwen3", "qwen3-moe", "deepseek ep")  # each starts several processes that import an engine


@pytest.mark.parametrize("engine", PYTHONS)
@pytest.mark.parametrize("kind", ["qwen3-moe ep", "deepseek", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_real_loaders(engine, kind, tmp_path):
    if not PYTHONS[engine]:
        pytest.skip(f"there is no {engine}")
    kind, _, ep = kind.partition(" ")
    save(kind, tmp_path)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    program = str(Path(__file__).parent / f"{engine}_loader_program.py")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *STAND_INS.get(engine, ()), os.environ.get("PYTHONPATH")])),
        "VLLM_DIST_IDENT": f"mooncake-{port}",
    }
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            command = [PYTHONS[engine], program, str(tmp_path), str(rank), "2", str(port), *([ep] if ep else [])]
            with log.open("w") as out:
                ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
        for rank, log in zip(ranks, logs, strict=True):
            status = rank.wait(timeout=500)
            said = log.read_text()
            assert status == 0, said[-3000:]
            traced, table, parameters = map(int, re.findall(r"^(\d+) (\d+) (\d+)$", said, re.MULTILINE)[-1])
            assert traced == table >= parameters
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
