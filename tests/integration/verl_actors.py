"""verl's own worker classes with a model that anybody can work out, and a server that keeps what it is given."""

from __future__ import annotations

import os

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_external_libs


def model(seed: int, layers: int = 4) -> dict[str, torch.Tensor]:
    """Some small tensors, one larger than a bucket, an empty one, one without dimensions, and several dtypes."""
    draw = torch.Generator().manual_seed(seed)

    def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    out = {"embed.weight": of(257, 640), "scale": of(dtype=torch.float32), "empty": of(0, 4)}
    for n in range(layers):
        out[f"layers.{n}.up"] = of(130, 33)
        out[f"layers.{n}.norm"] = of(33, dtype=torch.float32)
        out[f"layers.{n}.ids"] = torch.randint(0, 1000, (7,), generator=draw)
        out[f"layers.{n}.flags"] = torch.randint(0, 2, (5,), generator=draw).bool()
    return out


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(x.dtype == b[n].dtype and x.shape == b[n].shape and torch.equal(x, b[n]) for n, x in a.items())


class Trainer(Worker):
    """What verl's actor worker does about a checkpoint engine, with a state dict in place of a training engine."""

    def __init__(self, config) -> None:
        super().__init__()
        import_external_libs(config.custom_backend_module or None)
        kwargs = config.engine_kwargs.get(config.backend, {})
        bucket_size = config.update_weights_bucket_megabytes << 20
        self.checkpoint_engine = CheckpointEngineRegistry.new(config.backend, is_master=self.rank == 0, bucket_size=bucket_size, **kwargs)
        self.weights, self.trap = {}, None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, seed: int) -> int:
        self.weights = model(seed)
        return seed

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def die_at(self, name: str) -> None:
        """Has the process end when that tensor is to be sent. "": never."""
        self.trap = name

    def named(self):
        for name, tensor in self.weights.items():
            if name == self.trap:
                os._exit(1)
            yield name, tensor.clone()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto"):
        return await self.checkpoint_engine.send_weights(self.named(), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args, **kwargs):
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Server:
    """In place of a rollout's server adapter: it keeps the tensors."""

    def __init__(self) -> None:
        self.has: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self.replica_rank, self.is_leader_rank = 0, True

    async def update_weights(self, weights, global_steps: int | None = None, wire_format: str = "named_tensors", **_) -> None:
        from verl.workers.rollout.utils import ensure_async_iterator

        assert wire_format == "named_tensors"
        async for name, tensor in ensure_async_iterator(weights):
            self.has[name] = tensor.clone()
            tensor.zero_() if tensor.numel() else None  # what it is given is its own
        self.version = global_steps


class Rollout(CheckpointEngineWorker):
    """verl's own, whose server can be looked at."""

    def __init__(self, rollout_config, model_config, *args, **kwargs) -> None:
        super().__init__(rollout_config, model_config, Server(), *args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_at_first_fetch(self) -> None:
        """Has the process end when its first bucket comes, before it has anything of the new version."""
        self.checkpoint_engine._receiver.fetch = lambda bucket: os._exit(1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def held(self) -> tuple[int | None, dict[str, torch.Tensor]]:
        return self.server_adapter.version, self.server_adapter.has
