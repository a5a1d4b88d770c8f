"""A Ray cluster of its own, with a group in it. Says its address; when its input ends, all of it is killed."""

from __future__ import annotations

import os
import sys

import psutil
import ray
from training import Training

import mooncake_ray


def main(kind: str) -> None:
    mooncake_ray.install(capacity_bytes=256 << 20, prefault_bytes=16 << 20)
    path = os.pathsep.join(p for p in sys.path if p)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    group = mooncake_ray.WeightSyncGroup("elsewhere")
    training = Training.remote(kind)
    ray.get(training.join.remote(group))
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
