"""The loaders of a real vLLM, where there is one: `MOONCAKE_VLLM_PYTHON` names a Python that has it, and torch for CPUs."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("MOONCAKE_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")
SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
DEEPSEEK = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_shared_experts": 1}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(not PYTHON, reason="there is no vLLM")]


def model(kind: str):
    import transformers as t

    moe = SIZES | {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "max_position_embeddings": 128}
    if kind == "qwen3":  # fewer heads of keys and values than ranks, tied embeddings
        return t.Qwen3ForCausalLM(t.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True))
    if kind == "qwen3-moe":
        return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**moe, num_key_value_heads=2, head_dim=32, num_experts=4))
    more = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    return t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**moe, **DEEPSEEK, **more, topk_method="noaux_tc"))


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


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe", "qwen3-moe ep", "deepseek", "deepseek ep"])
def test_real_loaders(kind, tmp_path):
    kind, _, ep = kind.partition(" ")
    save(kind, tmp_path)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    program = str(Path(__file__).parent / "vllm_loader_program.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_DIST_IDENT": f"mooncake-{port}"}
    ranks = [
        subprocess.Popen([PYTHON, program, str(tmp_path), str(rank), "2", str(port), *([ep] if ep else [])], env=environment, **pipes)
        for rank in range(2)
        for pipes in [{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}]
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=500)
            assert rank.returncode == 0, f"{out}\n{err[-3000:]}"
            traced, table, parameters = map(int, out.split()[-3:])
            assert traced == table >= parameters
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
