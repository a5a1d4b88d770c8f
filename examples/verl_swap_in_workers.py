"""The workers of `verl_swap_in.py`, as users of verl write them; and how plain Ray gets weights from one to another.

Nothing here knows of the pool.
"""

from __future__ import annotations

import asyncio
import hashlib
from types import SimpleNamespace

import ray
import torch
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig

RESPONSE = 1792


@CheckpointEngineRegistry.register("ray_put")
class RayPut(CheckpointEngine):
    """What plain Ray has for weights: the first trainer puts them, and every rollout worker gets them."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master, self.box = is_master, None

    def prepare(self):
        if self.is_master and self.box is None:
            self.box = ray.remote(Box).options(num_cpus=0).remote()
        return {"box": self.box}

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        box = metadata[0]["box"]
        return {"box": [box] * actor_wg_world_size}, {"box": [box] * rollout_world_size}

    def init_process_group(self, box):
        self.box = box

    async def send_weights(self, weights, global_steps=None):
        weights = dict(weights)  # all ranks take part in making them whole
        if self.is_master:
            await self.box.fill.remote(global_steps, [ray.put(weights)])

    async def receive_weights(self, global_steps=None):
        [ref] = await self.box.look.remote(global_steps)
        for item in (await ref).items():
            yield item

    def finalize(self):
        pass


class Box:
    """Where the refs of the newest version are."""

    def __init__(self) -> None:
        self.filled, self.version, self.refs = asyncio.Condition(), None, []

    async def fill(self, version, refs) -> None:
        async with self.filled:
            self.version, self.refs = version, refs
            self.filled.notify_all()

    async def look(self, version):
        async with self.filled:
            await self.filled.wait_for(lambda: self.version == version)
            return self.refs


class Trainer(Worker):
    """Trains a bag of embeddings, in place of a model."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        import_external_libs(config.custom_backend_module or None)
        kwargs = config.engine_kwargs.get(config.backend, {})
        bucket_size = config.update_weights_bucket_megabytes << 20
        self.checkpoint_engine = CheckpointEngineRegistry.new(config.backend, is_master=self.rank == 0, bucket_size=bucket_size, **kwargs)
        draw = torch.Generator().manual_seed(0)
        self.weights = {f"layers.{n}.weight": torch.randn(1024, 2048, generator=draw).bfloat16() for n in range(8)}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def log_probs(self, data: DataProto) -> DataProto:
        mask = data.batch["attention_mask"]
        values = torch.where(mask == 1, -(data.batch["input_ids"] % 97).float() / 97, 0.0)
        return DataProto.from_dict({"old_log_probs": values}, meta_info={"metrics": {"tokens": 0}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update(self, loss: float) -> None:
        for tensor in self.weights.values():
            tensor.mul_(1 - loss / 100)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps=None, mode="auto"):
        return await self.checkpoint_engine.send_weights(iter(self.weights.items()), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args, **kwargs):
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Server:
    """In place of an inference engine."""

    def __init__(self) -> None:
        self.weights = {}
        self.replica_rank, self.is_leader_rank = 0, True

    async def update_weights(self, weights, global_steps=None, **_) -> None:
        from verl.workers.rollout.utils import ensure_async_iterator

        async for name, tensor in ensure_async_iterator(weights):
            self.weights[name] = tensor.clone()


class Rollout(CheckpointEngineWorker):
    """verl's own worker beside an inference engine, and the engine's one method."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__(SimpleNamespace(name="example", checkpoint_engine=config), SimpleNamespace(), Server())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, data: DataProto) -> DataProto:
        prompts, step = data.batch["prompts"], data.meta_info["step"]
        draw = torch.Generator().manual_seed(step)
        lengths = torch.randint(8, RESPONSE, (len(data), 1), generator=draw)
        mask = (torch.arange(RESPONSE) < lengths).long()
        tokens = torch.randint(0, 32_000, (len(data), RESPONSE), generator=draw) * mask
        mask = torch.cat([torch.ones_like(prompts), mask], 1)
        return DataProto.from_dict({"input_ids": torch.cat([prompts, tokens], 1), "attention_mask": mask})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digest(self) -> str:
        """Of all weights that it has."""
        out = hashlib.sha256()
        for name, tensor in sorted(self.server_adapter.weights.items()):
            out.update(name.encode() + tensor.view(torch.uint8).numpy().tobytes())
        return out.hexdigest()
