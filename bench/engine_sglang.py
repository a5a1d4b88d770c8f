"""SGLang in `bench.engine_update`: a server, a trainer of a model of about 100 M parameters, and each way from one to the other."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
import torch

import mooncake_ray
from mooncake_ray.engines.sglang import native
from mooncake_ray.engines.sglang.server import Server

__all__ = ["SUBJECTS", "Updated", "subjects"]

SUBJECTS = ("pool", "pool-delta", "disk", "tensor", "distributed")
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
_STEP_S = 300.0

Updated = tuple[float, float]
"""Seconds: from when the trainer's weights are new until the engine serves them, and of these how long requests were paused."""


@ray.remote(num_cpus=0)
class Trainer:
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

    def disk(self, url: str, version: int, folder: str) -> Updated:
        from safetensors.torch import save_file

        def update() -> float:
            save_file(self.tensors, Path(folder) / "model.safetensors", {"format": "pt"})
            return native.from_disk(Server(url), folder, native.Way(version))

        return _timed(update)

    def tensor(self, url: str, version: int) -> Updated:
        return _timed(lambda: native.from_tensor(Server(url), 1, self.tensors.items(), native.Way(version)))

    def distributed(self, url: str, version: int) -> Updated:
        return _timed(lambda: native.from_distributed(Server(url), 1, list(self.tensors.items()), native.Way(version), "127.0.0.1"))


def _timed(update: Callable[[], float]) -> Updated:
    begin = time.perf_counter()
    paused = update()
    return time.perf_counter() - begin, paused


@contextmanager
def subjects(python: str, folder: Path, address: str) -> Iterator[dict[str, Callable[[], Updated]]]:
    """Each brings the engine to weights that it has not had, and can be called again and again.

    Args:
        python: that has SGLang, and this package.
        folder: for checkpoints and logs; best in memory.
        address: of the Ray cluster that this process is connected to, with the pool installed.
    """
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "engines"))
    from sglang_server import Server as Process

    model = folder / "model"
    trainer = Trainer.remote()
    group = mooncake_ray.WeightSyncGroup("bench-sglang")
    ray.get([trainer.save.remote(str(model)), trainer.join.remote(group)])
    server = Process(python, model, folder / "sglang.log")
    version = 0

    def own(name: str, *arguments: str) -> Updated:
        nonlocal version
        version += 1
        ray.get(trainer.step.remote())
        return ray.get(getattr(trainer, name).remote(server.url, version, *arguments), timeout=_STEP_S)

    def ours(mode: str) -> Updated:
        if mode == "delta":  # wants the engine at a version that the group knows
            group.sync(mode="p2p", timeout_s=_STEP_S)
        ray.get(trainer.step.remote())
        begin = time.perf_counter()
        report = group.sync(mode=mode, timeout_s=_STEP_S)
        if report.mode != mode or not report.engines:
            raise RuntimeError(f"not synced by {mode}: {report}")
        return time.perf_counter() - begin, report.pause_s

    try:
        server.ready()
        server.engine.attach(group, "sglang", address=address)
        group.sync()
        yield {
            "pool": lambda: ours("p2p"),
            "pool-delta": lambda: ours("delta"),
            "disk": lambda: own("disk", str(model)),
            "tensor": lambda: own("tensor"),
            "distributed": lambda: own("distributed"),
        }
    finally:
        server.kill()
        group.shutdown()
        ray.kill(trainer)
