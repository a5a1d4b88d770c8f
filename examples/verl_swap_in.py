"""A program of verl's single controller, on plain Ray and with the pool: the same workers, the same calls, the same results.

python examples/verl_swap_in.py              # once each, and what they took
python examples/verl_swap_in.py --store pool

What the pool needs is a line for the batches (`mooncake_ray.install()`), and two of configuration for the weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import ray
import torch
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig
from verl_swap_in_workers import Rollout, Trainer

import mooncake_ray

TRAINERS, ROLLOUTS, ROWS, PROMPT = 2, 1, 64, 256


class Replica:
    """What verl's manager asks of a replica: this one has no requests to interrupt."""

    def __init__(self, workers) -> None:
        self.workers = workers

    def __getattr__(self, name):
        async def nothing(**_):
            return None

        return nothing


def group(cls, ranks: int, config: CheckpointEngineConfig) -> RayWorkerGroup:
    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(cls), config), device_name="cpu", use_gpu=False)


def run(store: str, steps: int) -> dict:
    config = CheckpointEngineConfig(backend="ray_put", custom_backend_module="verl_swap_in_workers", update_weights_bucket_megabytes=256)
    if store == "pool":
        mooncake_ray.install(capacity_bytes=256 << 20)  # the line for the batches
        config = CheckpointEngineConfig(  # and those for the weights
            backend="mooncake_ray",
            custom_backend_module="mooncake_ray.integrations.verl_checkpoint",
            update_weights_bucket_megabytes=256,
            engine_kwargs={"mooncake_ray": {"chunk_megabytes": 4}},
        )
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=512 << 20)
    trainers, rollouts = group(Trainer, TRAINERS, config), group(Rollout, ROLLOUTS, config)
    manager = CheckpointEngineManager(config, trainers, [Replica(rollouts.workers)])
    batches, weights, outcome = [], [], []
    for step in range(steps):
        begin = time.perf_counter()
        manager.update_weights(global_steps=step)
        weights.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        prompts = DataProto.from_dict({"prompts": torch.arange(ROWS * PROMPT).view(ROWS, PROMPT) % 32_000}, meta_info={"step": step})
        batch = rollouts.generate(prompts)
        batch = batch.union(trainers.log_probs(batch))
        batches.append(time.perf_counter() - begin)
        loss = float(batch.batch["old_log_probs"].double().mean())
        trainers.update(loss)
        outcome.append([loss, *rollouts.digest()])
    to_the_pool = mooncake_ray.pool_stats()["bytes_put"] if store == "pool" else 0
    ray.shutdown()
    nbytes = sum(column.nbytes for column in batch.batch.values())
    return {"weights_s": min(weights), "batches_s": min(batches), "batch": nbytes, "to_the_pool": to_the_pool, "outcome": outcome}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--store", choices=["both", "ray", "pool"], default="both")
    arguments.add_argument("--steps", type=int, default=4)
    options = arguments.parse_args()
    if options.store != "both":
        print(json.dumps(run(options.store, options.steps)))
        return
    done = {}
    for store in ("ray", "pool"):
        command = [sys.executable, __file__, "--store", store, "--steps", str(options.steps)]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        done[store] = json.loads(said.splitlines()[-1])
        each = done[store]
        print(f"{store:4}: {each['batches_s']:.3f} s for a batch of {each['batch'] >> 10} KiB, {each['weights_s']:.3f} s for the weights")
    print(f"bytes that went through the pool: {done['pool']['to_the_pool']}")
    print("the same results" if done["ray"]["outcome"] == done["pool"]["outcome"] else "DIFFERENT RESULTS")


if __name__ == "__main__":
    main()
