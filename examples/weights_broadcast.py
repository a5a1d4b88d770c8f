"""A trainer and two engines: after each step the trainer's weights are broadcast, and engines say which version made which token.

python examples/weights_broadcast.py
"""

from __future__ import annotations

import ray
import torch

import mooncake_ray as mr
from mooncake_ray.engines.torch_module import TorchModuleEngine
from mooncake_ray.weights.source import ModuleSource

VOCABULARY, WIDTH = 64, 32


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY))


@ray.remote
class Trainer:
    def __init__(self, group: mr.WeightSyncGroup) -> None:
        self.model = model(0)
        self.member = group.trainer(ModuleSource(self.model), rank=0, world=1)

    def step(self) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(torch.randn_like(p))

    def tokens(self, prompt: list[int]) -> tuple[int, ...]:
        return TorchModuleEngine(self.model).generate(prompt, 8).tokens


@ray.remote
class Engine:
    def __init__(self, group: mr.WeightSyncGroup, name: str) -> None:
        self.engine = TorchModuleEngine(model(1))
        self.member = group.engine(self.engine, name)

    def generate(self, prompt: list[int]):
        return self.engine.generate(prompt, 8)


def main() -> None:
    mr.install()
    ray.init(num_cpus=4, include_dashboard=False)
    group = mr.WeightSyncGroup("broadcast", mode="nccl")  # NCCL between GPUs, Gloo between CPUs
    trainer = Trainer.remote(group)
    engines = [Engine.remote(group, f"engine-{n}") for n in range(2)]
    ray.get([actor.__ray_ready__.remote() for actor in (trainer, *engines)])
    for _ in range(3):
        ray.get(trainer.step.remote())
        report = group.sync()
        expected = ray.get(trainer.tokens.remote([1, 2, 3]))
        made = ray.get([engine.generate.remote([1, 2, 3]) for engine in engines])
        versions = {span.version for answer in made for span in answer.weight_versions}
        print(f"version {report.version} by {report.mode}, paused {report.pause_s * 1e3:.1f} ms: tokens of versions {versions}")
        print(f"the trainer's tokens: {all(answer.tokens == expected for answer in made)}")
    group.shutdown()


if __name__ == "__main__":
    main()
