"""vLLM in `bench.engine_update`: its server, and a trainer that knows each of its ways to new weights.

vLLM's own ways on a CPU are its `reload_weights`: from a checkpoint, from tensors in a request, and from a broadcast, as its users' worker
extensions do it. Whatever can be done before the pause is (saving, pickling).
"""

from __future__ import annotations

import base64
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path

import mooncake_ray
from bench.engines import model
from bench.engines.model import STEP_S, Updated
from bench.engines.process import free_port
from bench.engines.vllm_server import VLLMServer
from bench.engines.vllm_worker import gloo
from mooncake_ray.engines.http import JSONClient
from mooncake_ray.engines.vllm import VLLMEngine

__all__ = ["Trainer", "attach", "serve"]

_ROOT = Path(__file__).parents[2]


class Trainer(model.Trainer):
    def connect(self, url: str) -> None:
        self.client, port = JSONClient(url), free_port()
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


def serve(python: str, checkpoint: Path, log: Path) -> VLLMServer:
    extension = ("--worker-extension-cls", "bench.engines.vllm_worker.Native")
    return VLLMServer(python, checkpoint, log, more=extension, environment={"PYTHONPATH": str(_ROOT)})


def attach(server: VLLMServer, group: mooncake_ray.WeightSyncGroup, address: str) -> None:
    VLLMEngine(server.url).attach(group, "vllm", address=address)
