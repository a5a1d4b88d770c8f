"""Actors that train and serve a tiny model in parts. What the whole of it is, for each version, everybody can work out."""

from __future__ import annotations

import ray
import torch

HIDDEN, INNER, VOCAB, LAYERS = 16, 24, 48, 3


def model(seed: int) -> dict[str, torch.Tensor]:
    """The whole of it, as nobody holds it."""
    draw = torch.Generator().manual_seed(seed)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(torch.bfloat16)

    out = {"model.embed_tokens.weight": of(VOCAB, HIDDEN), "model.norm.weight": of(HIDDEN), "lm_head.weight": of(VOCAB, HIDDEN)}
    for n in range(LAYERS):
        at = f"model.layers.{n}."
        out[at + "mlp.up_proj.weight"] = of(INNER, HIDDEN)
        out[at + "mlp.down_proj.weight"] = of(HIDDEN, INNER)
        out[at + "input_layernorm.weight"] = of(HIDDEN)
    return out


def cut(whole: dict[str, torch.Tensor], rank: int, world: int):
    """One rank's part, and for each tensor of it the shape of the whole and where it begins in that."""
    parts, boxes = {}, {}
    for name, tensor in whole.items():
        dim = 1 if "down_proj" in name else 0 if "up_proj" in name or "embed" in name or "lm_head" in name else None
        lo = [0] * tensor.dim()
        if dim is not None:
            n = tensor.shape[dim] // world
            tensor, lo[dim] = tensor.narrow(dim, rank * n, n), rank * n
        parts[name], boxes[name] = tensor.clone(), (tuple(whole[name].shape), tuple(lo))
    return parts, boxes


class _Rank:
    def __init__(self, group, name: str, rank: int, tp: int) -> None:
        import mooncake_ray
        from mooncake_ray.weights.source import StateDictSource

        mooncake_ray.install()
        self.rank, self.tp = rank, tp
        self.parts, boxes = cut(model(-1), rank, tp)
        self.shard = StateDictSource(self.parts, boxes)
        self.member = self.join(group, name)

    def ready(self) -> bool:
        return True

    def no_trap(self) -> None:
        """Undoes the ones below."""
        for name in [name for name in vars(self.member) if name.startswith("do_")]:
            delattr(self.member, name)

    def die_at(self, step: str, after: bool = False) -> None:
        """Has the process end when it is told to do that step: before it, or when it is done and nobody knows yet."""
        import os

        do = getattr(self.member, f"do_{step}")

        def dying(command):
            if after:
                do(command)
            os._exit(1)

        setattr(self.member, f"do_{step}", dying)

    def kill_at(self, step: str, group) -> None:
        """Has the group's coordinator killed when this one is told to do that step."""
        self._once_at(step, lambda: ray.kill(group._handle, no_restart=False))

    def kill_other_at(self, step: str, actor) -> None:
        """Has another member killed when this one is told to do that step."""
        self._once_at(step, lambda: ray.kill(actor))

    def _once_at(self, step: str, before) -> None:
        do = getattr(self.member, f"do_{step}")

        def first(command):
            setattr(self.member, f"do_{step}", do)
            before()
            return do(command)

        setattr(self.member, f"do_{step}", first)

    def fail_at(self, step: str, times: int = 1) -> None:
        """Has it fail at that step so many times."""
        do = getattr(self.member, f"do_{step}")
        left = [times]

        def failing(command):
            if left[0]:
                left[0] -= 1
                raise RuntimeError(f"{step} was to fail")
            return do(command)

        setattr(self.member, f"do_{step}", failing)


@ray.remote(num_cpus=0)
class TrainerRank(_Rank):
    def join(self, group, name):
        return group.trainer(self.shard, self.rank, self.tp)

    def publish(self, timeout_s: float = 60.0) -> int:
        return self.member.publish(timeout_s=timeout_s)

    def train(self, seed: int) -> None:
        """Its weights are now those of that seed."""
        for name, tensor in cut(model(seed), self.rank, self.tp)[0].items():
            self.parts[name].copy_(tensor)


@ray.remote(num_cpus=0)
class EngineRank(_Rank):
    def join(self, group, name):
        from mooncake_ray.engines.torch_module import TorchModuleEngine

        self.engine = TorchModuleEngine(torch.nn.Module(), shard=self.shard)
        return group.engine(self.engine, name, self.rank, self.tp)

    def has(self, seed: int) -> bool:
        """Whether it serves the weights of that seed, all of them and no others."""
        want = cut(model(seed), self.rank, self.tp)[0]
        with self.engine.serving():
            return all(torch.equal(want[name].view(torch.int16), self.parts[name].view(torch.int16)) for name in want)
