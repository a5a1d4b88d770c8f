"""`Trainer`: a model of about 100 M parameters, for `bench.engine_update`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

import mooncake_ray

__all__ = ["CHANGED", "MODEL", "STEP_S", "Trainer", "Updated", "python_of"]

MODEL = {
    "vocab_size": 40_000,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
CHANGED = 0.02
"""Of the elements, by one step: by their last bit, as small steps change bfloat16."""
STEP_S = 300.0

Updated = tuple[float, float]
"""Seconds: from when the trainer's weights are new until the engine serves them, and of these how long requests were paused."""

_ROOT = Path(__file__).parents[2]


class Trainer:
    """Of an actor. Subclasses know an engine's own ways to new weights."""

    def __init__(self) -> None:
        import transformers

        mooncake_ray.install()
        torch.manual_seed(1)
        self.module = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**MODEL)).to(torch.bfloat16)
        self.tensors = {n: t.detach() for n, t in self.module.state_dict().items() if n != "lm_head.weight"}
        self.draw = torch.Generator().manual_seed(2)

    def save(self, folder: str) -> int:
        """All of it. Returns how many parameters it has."""
        self.module.save_pretrained(folder)
        return sum(t.numel() for t in self.tensors.values())

    def join(self, group: mooncake_ray.WeightSyncGroup) -> None:
        from mooncake_ray.weights.layouts.checkpoint import checkpoint_names
        from mooncake_ray.weights.source import ModuleSource

        self.member = group.trainer(ModuleSource(self.module, checkpoint_names(self.module.config)), 0, 1)

    def step(self) -> None:
        for tensor in self.tensors.values():
            flips = torch.rand(tensor.shape, generator=self.draw) < CHANGED
            tensor.view(torch.int16).bitwise_xor_(flips.to(torch.int16))


def python_of(engine: str) -> str:
    """The Python that has an engine; installs one (minutes, gigabytes) where there is none."""
    if found := os.environ.get(f"MOONCAKE_{engine.upper()}_PYTHON"):
        return found
    folder = _ROOT / "build" / "engines" / engine
    if not (folder / ".ready").exists():
        subprocess.run(["make", f"build/engines/{engine}/.ready"], cwd=_ROOT, check=True, stdout=2)
    return str(folder / "bin" / "python")
