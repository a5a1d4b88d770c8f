"""verl's queue between rollouter and trainer, its own and ours, as its rollouter and its trainer call it.

(`verl.experimental.fully_async_policy.detach_utils` needs packages that are not here: its `RolloutSample` is one of the same fields.)
"""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import ray
import torch
from omegaconf import OmegaConf
from verl import DataProto

RESPONSES, SIZE = 4, 3
MODULE = "verl.experimental.fully_async_policy.message_queue"


@dataclass
class RolloutSample:
    full_batch: Any
    sample_id: str
    epoch: int
    rollout_status: dict[str, Any]


def sample(number):
    """As padded as verl's are."""
    lengths = torch.arange(1, RESPONSES + 1) * 500
    mask = (torch.arange(4096) < lengths[:, None]).long()
    batch = DataProto.from_dict(
        {"responses": (torch.arange(4096) + number) * mask, "response_mask": mask, "rollout_log_probs": -mask.float() * number},
        {"uid": np.array([f"uid_{number}"] * RESPONSES, dtype=object), "min_global_steps": np.full(RESPONSES, number)},
        meta_info={"timing": {"generate": number / 2}},
    )
    return RolloutSample(batch, f"sample_{number}", number % 2, {"queue_size": number})


def same(a, b):
    x, y = a.full_batch, b.full_batch
    names = set(x.batch.keys())
    tensors = names == set(y.batch.keys()) and all(torch.equal(x.batch[name], y.batch[name]) for name in names)
    arrays = [{name: array.tolist() for name, array in batch.non_tensor_batch.items()} for batch in (x, y)]
    rest = all(getattr(a, name) == getattr(b, name) for name in ("sample_id", "epoch", "rollout_status"))
    return tensors and arrays[0] == arrays[1] and rest and x.meta_info == y.meta_info and type(x) is type(y)


class Rollouter:
    """As verl's: an actor with an event loop, and a client of its own."""

    def __init__(self, client):
        self.client = client

    async def put(self, number):
        return await self.client.put_sample(sample=None if number is None else ray.cloudpickle.dumps(sample(number)))

    async def statistics(self):
        return await self.client.get_statistics()


@pytest.fixture(params=["verl", "mooncake_ray"])
def client(request, pool, pool_ray):
    from mooncake_ray.integrations.verl_message_queue import register

    module = importlib.import_module(MODULE)
    register(module)
    settings = {"actor_rollout_ref": {"rollout": {"n": RESPONSES}}, "async_training": {"require_batches": 1}}
    if request.param != "verl":
        settings["async_training"]["message_queue"] = request.param
    queue = module.MessageQueue.remote(OmegaConf.create(settings), SIZE)
    assert isinstance(queue, ray.actor.ActorHandle) == (request.param == "verl")
    yield module.MessageQueueClient(queue)
    if request.param == "verl":
        ray.kill(queue)
    else:
        queue.buffer.shutdown()


def test_it_is_verls(client):
    rollouter = ray.remote(num_cpus=0)(Rollouter).remote(client)

    def put(number):
        return ray.get(rollouter.put.remote(number))

    assert [put(n) for n in range(SIZE)] == [True] * SIZE and client.get_queue_size_sync() == SIZE
    assert put(SIZE) is False, "one was dropped"
    statistics = ray.get(rollouter.statistics.remote())
    assert statistics == {"queue_size": 3, "total_produced": 4, "total_consumed": 0, "dropped_samples": 1, "max_queue_size": 3}

    async def trainer():
        got = [await client.get_sample() for _ in range(2)]
        assert [left for _, left in got] == [2, 1]
        assert all(same(ray.cloudpickle.loads(data), sample(n)) for (data, _), n in zip(got, (1, 2), strict=True))
        waiting = asyncio.create_task(client.get_sample())
        data, _ = await waiting
        assert same(ray.cloudpickle.loads(data), sample(3))
        waiting = asyncio.create_task(client.get_sample())
        await asyncio.sleep(0)
        assert await asyncio.to_thread(put, 4)
        data, left = await waiting
        assert left == 0 and same(ray.cloudpickle.loads(data), sample(4))
        await asyncio.to_thread(put, 5)
        await client.clear_queue()
        assert await client.get_queue_size() == 0
        await asyncio.to_thread(put, None)
        assert (await client.get_sample())[0] is None
        assert (await client.get_memory_usage())["queue_samples"] == 0

    asyncio.run(trainer())
    ray.kill(rollouter)


def test_a_setting_that_is_not_there():
    from mooncake_ray.integrations.verl_message_queue import register

    module = importlib.import_module(MODULE)
    register(module)
    with pytest.raises(ValueError, match="must be verl or mooncake_ray, got 'redis'"):
        module.MessageQueue.remote(OmegaConf.create({"async_training": {"message_queue": "redis"}}), 1)
