"""A program that loses a node again and again. Prints what it got as JSON. Usage: python lineage_program.py pool|plain"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import tempfile

import ray
import torch
from conftest import until
from ray.cluster_utils import Cluster

import mooncake_ray

N = 1 << 18
SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 6,
    "object_timeout_milliseconds": 200,
}
ON_SECOND = {"second": 0.1}


def batch(value):
    return {"t": torch.full((N,), float(value)), "n": value}


def first(got):
    return [float(got["t"][0]), float(got["t"][-1]), got["n"]]


@ray.remote(num_cpus=0, resources={"head": 0.1})
class Counter:
    def __init__(self):
        self.counts = {}

    def add(self, name):
        self.counts[name] = self.counts.get(name, 0) + 1

    def read(self):
        return self.counts


@ray.remote(num_cpus=0, resources=ON_SECOND)
def make(counter, name, value):
    ray.get(counter.add.remote(name))
    return batch(value)


@ray.remote(num_cpus=0, resources=ON_SECOND)
def add(counter, name, *batches):
    ray.get(counter.add.remote(name))
    return batch(sum(b["n"] for b in batches) + float(sum(b["t"][5] for b in batches)) / 1000)


@ray.remote(num_cpus=0, resources=ON_SECOND, num_returns=2)
def two(counter, name):
    ray.get(counter.add.remote(name))
    return batch(1), batch(2)


@ray.remote(num_cpus=0, resources=ON_SECOND)
def stream(counter, name, count):
    ray.get(counter.add.remote(name))
    for i in range(count):
        yield batch(i)


@ray.remote(num_cpus=0, resources=ON_SECOND)
def put(value):
    return [ray.put(batch(value))]


@ray.remote(num_cpus=0, resources=ON_SECOND, max_restarts=-1, max_task_retries=-1)
class Actor:
    def make(self, counter, name, value):
        ray.get(counter.add.remote(name))
        return batch(value)


class Nodes:
    """A node that stays, with the driver, and one that does not."""

    def __init__(self):
        self.directory = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: there are sockets in it
        head = {"num_cpus": 2, "resources": {"head": 1.0}, "temp_dir": self.directory, "_system_config": SOON, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.second = self._add()

    def _add(self):
        return self.cluster.add_node(num_cpus=2, resources={"second": 1.0}, object_store_memory=150 << 20)

    def lose(self):
        """Another node takes the place of the second, which had what is on it and nothing else."""
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.second = self._add()
        self.cluster.wait_for_nodes()


def finished(*refs):
    """Waits for results without fetching them to this node."""
    ray.wait(list(refs), num_returns=len(refs), fetch_local=False)


def kind(call, *args):
    try:
        return {"no error, but": first(call(*args))}
    except ray.exceptions.RayError as error:
        return [k.__name__ for k in type(error).__mro__ if k.__module__.startswith("ray")]


def program(nodes):
    counter = Counter.remote()
    held = ray.put(batch(100))

    unknown = add.remote(counter, "unknown", make.remote(counter, "behind the unknown", 8))  # functions of which nothing is known yet
    finished(unknown)
    single = make.remote(counter, "single", 1)
    behind = [make.remote(counter, f"behind {i}", 10 + i) for i in range(2)]
    chain = add.remote(counter, "chain", *behind)
    arguments = add.remote(counter, "arguments", batch(1000), held)
    pair = two.remote(counter, "two")
    items = list(stream.remote(counter, "stream", 3))
    once = make.options(max_retries=0).remote(counter, "once", 5)
    actor = Actor.remote()
    by_actor = actor.make.remote(counter, "actor", 6)
    finished(single, chain, arguments, *pair, *items, once, by_actor)
    inner = ray.get(put.remote(7))[0]
    del behind
    gc.collect()
    yield "before", ray.get(counter.read.remote())

    nodes.lose()
    yield "single", first(ray.get(single))
    yield "unknown", first(ray.get(unknown))
    yield "chain", first(ray.get(chain))
    yield "arguments", first(ray.get(arguments))
    yield "pair", [first(ray.get(ref)) for ref in reversed(pair)]
    yield "stream", [first(ray.get(ref)) for ref in items]
    yield "once", kind(ray.get, once)
    yield "by actor", first(ray.get(by_actor))
    yield "put of a task", kind(ray.get, inner)
    yield "after", ray.get(counter.read.remote())

    again = add.remote(counter, "again", chain, single, pair[0])
    finished(again)
    nodes.lose()
    yield "again", first(ray.get(again))
    yield "at last", ray.get(counter.read.remote())


def main():
    routed = sys.argv[1] == "pool"
    nodes = Nodes()
    env = {"env_vars": {"PYTHONPATH": ":".join(sys.path)}}
    if routed:
        mooncake_ray.install(capacity_bytes=128 << 20, prefault_bytes=16 << 20)
    ray.init(address=nodes.cluster.address, log_to_driver=False, runtime_env=env)
    results = dict(program(nodes))
    gc.collect()
    if routed:
        stats = mooncake_ray.stats()
        results["routed"] = stats["routed"] > 0 and stats["adopted"] > 0
        # Ray 2.60 itself never stops counting a ref inside a put that a task on a lost node has read: here the token in `held`.
        until(lambda: mooncake_ray.pool_stats()["objects"] <= 1, "a pool that is empty but for one object")
    print(json.dumps(results))
    ray.shutdown()
    nodes.cluster.shutdown()
    shutil.rmtree(nodes.directory, ignore_errors=True)


if __name__ == "__main__":
    main()
