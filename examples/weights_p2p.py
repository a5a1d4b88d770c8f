"""Trainers with TP2 x PP2, an engine with TP4: each engine rank reads what it wants from those that have it. Nobody gathers anything.

python examples/weights_p2p.py
"""

from __future__ import annotations

import ray
import torch

import mooncake_ray as mr
from mooncake_ray.engines.torch_module import TorchModuleEngine
from mooncake_ray.weights.source import StateDictSource

LAYERS, WIDTH = 4, 256
SHAPES = {f"model.layers.{n}.mlp.{name}_proj.weight": (WIDTH, WIDTH) for n in range(LAYERS) for name in ("up", "down")}


def whole(name: str, step: int) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(hash((name, step)) % 2**31))


class Part:
    """A rank's part: some layers, `up` cut by rows, `down` by columns."""

    def __init__(self, layers: range, rank: int, tp: int) -> None:
        n = WIDTH // tp
        self.cut = {name: (int("down" in name), rank * n, n) for name in SHAPES if int(name.split(".")[2]) in layers}
        self.tensors = {name: torch.zeros(SHAPES[name]).narrow(*cut).clone() for name, cut in self.cut.items()}
        boxes = {name: (SHAPES[name], (0, at) if dim else (at, 0)) for name, (dim, at, _) in self.cut.items()}
        self.shard = StateDictSource(self.tensors, boxes)

    def is_of(self, step: int) -> bool:
        return all(torch.equal(t, whole(name, step).narrow(*self.cut[name])) for name, t in self.tensors.items())


@ray.remote(num_cpus=0)
class Trainer:
    def __init__(self, group: mr.WeightSyncGroup, stage: int, tp_rank: int) -> None:
        self.part = Part(range(stage * 2, stage * 2 + 2), tp_rank, 2)
        self.member = group.trainer(self.part.shard, stage * 2 + tp_rank, 4)

    def step(self, number: int) -> None:
        for name, tensor in self.part.tensors.items():
            tensor.copy_(whole(name, number).narrow(*self.part.cut[name]))


@ray.remote(num_cpus=0)
class Engine:
    def __init__(self, group: mr.WeightSyncGroup, rank: int) -> None:
        self.part = Part(range(LAYERS), rank, 4)
        self.engine = TorchModuleEngine(torch.nn.Module(), shard=self.part.shard)
        self.member = group.engine(self.engine, "engine", rank, 4)

    def has(self, step: int) -> bool:
        return self.part.is_of(step)


def main() -> None:
    mr.install()
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": {"PYTHONHASHSEED": "0"}})
    group = mr.WeightSyncGroup("p2p", mode="p2p")
    trainers = [Trainer.remote(group, stage, rank) for stage in range(2) for rank in range(2)]
    engines = [Engine.remote(group, rank) for rank in range(4)]
    ray.get([actor.__ray_ready__.remote() for actor in (*trainers, *engines)])
    size = sum(torch.Size(shape).numel() * 4 for shape in SHAPES.values())
    for step in range(3):
        ray.get([trainer.step.remote(step) for trainer in trainers])
        report = group.sync()
        right = all(ray.get([engine.has.remote(step) for engine in engines]))
        print(f"version {report.version}: moved {report.nbytes / size:.2f} of the model's bytes, bit for bit: {right}")
    group.shutdown()


if __name__ == "__main__":
    main()
