"""Calls verl's workers in every way, on plain Ray or with the pool, and writes down what came back.

python verl_program.py plain|pool FILE
"""

from __future__ import annotations

import sys

import ray
import torch
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, create_colocated_worker_cls
from verl_workers import Actor, batch, colocated, outcome

RANKS = 2


def start(cls, ranks: int, *args):
    made = RayClassWithInitArgs(ray.remote(cls), *args)
    return RayWorkerGroup(RayResourcePool([ranks], use_gpu=False, max_colocate_count=1), made, device_name="cpu", use_gpu=False)


def together(classes, ranks: int):
    made = create_colocated_worker_cls({name: RayClassWithInitArgs(ray.remote(cls), *args) for name, (cls, *args) in classes.items()})
    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, made, device_name="cpu", use_gpu=False).spawn(prefix_set=classes.keys())


def stats_of(group) -> list[dict]:
    """What each worker has counted, without a word of it in the worker's class."""

    def stats(self):
        import mooncake_ray

        return mooncake_ray.stats()

    return ray.get([worker.__ray_call__.remote(stats) for worker in group.workers])


def routed(group) -> dict:
    """What the pool has to do with it."""
    import mooncake_ray

    data = batch(4 * RANKS, seed=9)
    before = mooncake_ray.stats()
    group.log_probs(data)
    sent = mooncake_ray.stats()
    future = group.doubled_later(group.later(data))
    between = mooncake_ray.stats()
    chained = group.doubled_later(future)
    ray.wait(chained.futures, num_returns=RANKS, timeout=200)
    after = mooncake_ray.stats()
    return {
        "nbytes": sum(column.nbytes for column in data.batch.values()),
        "driver sent": sent["bytes_copied"] - before["bytes_copied"],
        "driver passed on": after["bytes_copied"] - between["bytes_copied"],
        "fallbacks": after["fallbacks"],
        "workers": [worker["bytes_copied"] for worker in stats_of(group)],
    }


def died(group) -> str:
    try:
        group.dying(batch(2 * RANKS))
    except ray.exceptions.RayActorError as e:
        return type(e).__name__
    return "nothing"


def main(mode: str, path: str) -> None:
    if mode == "pool":
        import mooncake_ray

        mooncake_ray.install(capacity_bytes=256 << 20, prefault_bytes=16 << 20, linger_s=1.0, spill_dir="off")
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=300 << 20)
    group, out = outcome(RANKS, start)
    if mode == "pool":
        out["routed"] = routed(group)
    out["colocated"] = colocated(RANKS, together)
    out["died"] = died(group)
    out["after"] = start(Actor, 1).log_probs(batch(3)).batch["log_probs"]
    torch.save(out, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
