"""Only what changed travels: an engine that is three steps behind gets them as one patch.

python examples/weights_delta.py
"""

from __future__ import annotations

import ray
import torch

import mooncake_ray as mr
from mooncake_ray.engines.torch_module import TorchModuleEngine
from mooncake_ray.weights.source import ModuleSource

WIDTH, CHANGED = 1024, 0.01


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(4)))


@ray.remote
class Trainer:
    def __init__(self, group: mr.WeightSyncGroup) -> None:
        self.model = model()
        self.member = group.trainer(ModuleSource(self.model), rank=0, world=1)

    def step(self) -> None:
        """As with small learning rates in bfloat16: few elements change, and these by their last bit."""
        for p in self.model.parameters():
            bits = p.data.view(torch.int16)
            bits += (torch.rand(p.shape) < CHANGED).to(torch.int16)

    def weights(self) -> list[torch.Tensor]:
        return [p.data for p in self.model.parameters()]


@ray.remote
class Engine:
    def __init__(self, group: mr.WeightSyncGroup) -> None:
        self.engine = TorchModuleEngine(model())
        self.member = group.engine(self.engine, "engine")

    def same(self, weights: list[torch.Tensor]) -> bool:
        return all(
            torch.equal(p.data.view(torch.int16), w.view(torch.int16))
            for p, w in zip(self.engine.module.parameters(), weights, strict=True)
        )


def main() -> None:
    mr.install()
    ray.init(num_cpus=4, include_dashboard=False)
    group = mr.WeightSyncGroup("delta", mode="delta")
    trainer, engine = Trainer.remote(group), Engine.remote(group)
    ray.get([trainer.__ray_ready__.remote(), engine.__ray_ready__.remote()])
    full = group.sync().nbytes  # there is nothing to start from: all of it
    for steps in (1, 1, 3):
        for _ in range(steps):
            ray.get(trainer.step.remote())
            version = group.publish()
        report = group.sync()
        same = ray.get(engine.same.remote(trainer.weights.remote()))
        print(f"version {version}: {report.nbytes} of {full} bytes by {report.mode} for {steps} steps, bit for bit: {same}")
    group.shutdown()


if __name__ == "__main__":
    main()
