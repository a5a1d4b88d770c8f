"""vLLM in `bench.engine_update`: a server, a trainer, and each way from one to the other.

vLLM's own ways on a CPU are its `reload_weights`: from a checkpoint, from tensors in a request, and from a broadcast, as its users' worker
extensions do it. Whatever can be done before the pause is (saving, pickling).
"""

from __future__ import annotations

import base64
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

import mooncake_ray
from bench.engine_model import STEP_S, Trainer, Updated, timed
from bench.engine_vllm_worker import gloo
from mooncake_ray.engines.http import JSONClient
from mooncake_ray.engines.vllm import VLLMEngine

__all__ = ["subjects"]

_ROOT = Path(__file__).parents[1]


@ray.remote(num_cpus=0, max_concurrency=2)
class VLLMTrainer(Trainer):
    def connect(self, url: str, port: int) -> None:
        self.client = JSONClient(url)
        joining = threading.Thread(target=self._rpc, args=("join", "127.0.0.1", port))
        joining.start()
        self.group = gloo("127.0.0.1", port, 0)
        joining.join()

    def _rpc(self, method: str, *arguments: object, **named: object) -> None:
        body = {"method": method, "args": list(arguments), "kwargs": named}
        self.client.post("collective_rpc", body, timeout_s=STEP_S)

    def _paused(self, update: Callable[[], None]) -> float:
        begin = time.perf_counter()
        self.client.post("pause", query={"mode": "keep"}, timeout_s=STEP_S)
        update()
        self.client.post("reset_prefix_cache", query={"reset_running_requests": "true"}, timeout_s=STEP_S)
        self.client.post("resume", timeout_s=STEP_S)
        return time.perf_counter() - begin

    def disk(self, folder: str) -> Updated:
        from safetensors.torch import save_file

        begin = time.perf_counter()
        save_file(self.tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        paused = self._paused(lambda: self._rpc("reload_weights", weights_path=folder))
        return time.perf_counter() - begin, paused

    def tensor(self) -> Updated:
        begin = time.perf_counter()
        pickled = base64.b64encode(pickle.dumps(list(self.tensors.items()))).decode()
        paused = self._paused(lambda: self._rpc("take_tensors", pickled))
        return time.perf_counter() - begin, paused

    def distributed(self) -> Updated:
        def update() -> None:
            shapes = [list(t.shape) for t in self.tensors.values()]
            taking = threading.Thread(target=self._rpc, args=("take_broadcast", list(self.tensors), shapes))
            taking.start()
            for tensor in self.tensors.values():
                self.group.broadcast(tensor, 0).wait()
            taking.join()

        begin = time.perf_counter()
        paused = self._paused(update)
        return time.perf_counter() - begin, paused


@contextmanager
def subjects(python: str, folder: Path, address: str) -> Iterator[dict[str, Callable[[], Updated]]]:
    """Each brings the engine to weights that it has not had, and can be called again and again.

    Args:
        python: that has vLLM, and this package.
        folder: for checkpoints and logs.
        address: of the Ray cluster that this process is connected to, with the pool installed.
    """
    sys.path.append(str(_ROOT / "tests" / "engines"))
    from vllm_server import Server, free_port

    model = folder / "model"
    trainer = VLLMTrainer.remote()
    group = mooncake_ray.WeightSyncGroup("bench-vllm")
    ray.get([trainer.save.remote(str(model)), trainer.join.remote(group)])
    extension = ["--worker-extension-cls", "bench.engine_vllm_worker.Native"]
    server = Server(python, model, folder / "vllm.log", more=extension, environment={"PYTHONPATH": str(_ROOT)})

    def own(name: str, *arguments: str) -> Updated:
        ray.get(trainer.step.remote())
        return ray.get(getattr(trainer, name).remote(*arguments), timeout=STEP_S)

    def ours(mode: str) -> Updated:
        return timed(group, mode, lambda: ray.get(trainer.step.remote()))

    try:
        server.ready()
        ray.get(trainer.connect.remote(server.url, free_port()))
        VLLMEngine(server.url).attach(group, "vllm", address=address)
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
