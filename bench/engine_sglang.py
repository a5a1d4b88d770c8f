"""SGLang in `bench.engine_update`: a server, a trainer of a model of about 100 M parameters, and each way from one to the other."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

import mooncake_ray
from bench.engine_model import STEP_S, Trainer, Updated, timed
from mooncake_ray.engines.sglang import native
from mooncake_ray.engines.sglang.server import Server

__all__ = ["subjects"]


@ray.remote(num_cpus=0)
class SGLangTrainer(Trainer):
    def disk(self, url: str, version: int, folder: str) -> Updated:
        from safetensors.torch import save_file

        def update() -> float:
            save_file(self.tensors, Path(folder) / "model.safetensors", {"format": "pt"})
            return native.from_disk(Server(url), folder, native.Way(version))

        return _timed(update)

    def tensor(self, url: str, version: int) -> Updated:
        return _timed(lambda: native.from_tensor(Server(url), 1, self.tensors.items(), native.Way(version)))

    def distributed(self, url: str, version: int) -> Updated:
        return _timed(lambda: native.from_distributed(Server(url), 1, list(self.tensors.items()), native.Way(version), "127.0.0.1"))


def _timed(update: Callable[[], float]) -> Updated:
    begin = time.perf_counter()
    paused = update()
    return time.perf_counter() - begin, paused


@contextmanager
def subjects(python: str, folder: Path, address: str) -> Iterator[dict[str, Callable[[], Updated]]]:
    """Each brings the engine to weights that it has not had, and can be called again and again.

    Args:
        python: that has SGLang, and this package.
        folder: for checkpoints and logs.
        address: of the Ray cluster that this process is connected to, with the pool installed.
    """
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "engines"))
    from sglang_server import Server as Process

    model = folder / "model"
    trainer = SGLangTrainer.remote()
    group = mooncake_ray.WeightSyncGroup("bench-sglang")
    ray.get([trainer.save.remote(str(model)), trainer.join.remote(group)])
    server = Process(python, model, folder / "sglang.log")
    version = 0

    def own(name: str, *arguments: str) -> Updated:
        nonlocal version
        version += 1
        ray.get(trainer.step.remote())
        return ray.get(getattr(trainer, name).remote(server.url, version, *arguments), timeout=STEP_S)

    def ours(mode: str) -> Updated:
        if mode == "delta":  # wants the engine at a version that the group knows
            group.sync(mode="p2p", timeout_s=STEP_S)
        return timed(group, mode, lambda: ray.get(trainer.step.remote()))

    try:
        server.ready()
        server.engine.attach(group, "sglang", address=address)
        group.sync()
        yield {
            "pool": lambda: ours("p2p"),
            "pool-delta": lambda: ours("delta"),
            "disk": lambda: own("disk", str(model)),
            "tensor": lambda: own("tensor"),
            "distributed": lambda: own("distributed"),
        }
    finally:
        server.kill()
        group.shutdown()
        ray.kill(trainer)
