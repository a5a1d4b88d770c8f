"""SGLang in `bench.engine_update`: its server, and a trainer that knows each of its ways to new weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import mooncake_ray
from bench.engines import model
from bench.engines.model import Updated
from bench.engines.sglang_server import SGLangServer
from mooncake_ray.engines.sglang import native
from mooncake_ray.engines.sglang.server import Server

__all__ = ["Trainer", "attach", "serve"]


class Trainer(model.Trainer):
    def connect(self, url: str) -> None:
        self.server, self.version = Server.at(url), 0

    def disk(self, folder: str) -> Updated:
        from safetensors.torch import save_file

        def update(way: native.Way) -> float:
            save_file(self.tensors, Path(folder) / "model.safetensors", {"format": "pt"})
            return native.from_disk(self.server, folder, way)

        return self._timed(update)

    def tensor(self) -> Updated:
        return self._timed(lambda way: native.from_tensor(self.server, 1, self.tensors.items(), way))

    def distributed(self) -> Updated:
        return self._timed(lambda way: native.from_distributed(self.server, 1, list(self.tensors.items()), way, "127.0.0.1"))

    def _timed(self, update: Callable[[native.Way], float]) -> Updated:
        self.version += 1
        begin = time.perf_counter()
        paused = update(native.Way(self.version))
        return time.perf_counter() - begin, paused


def serve(python: str, checkpoint: Path, log: Path) -> SGLangServer:
    return SGLangServer(python, checkpoint, log)


def attach(server: SGLangServer, group: mooncake_ray.WeightSyncGroup, address: str) -> None:
    server.engine.attach(group, "sglang", address=address)
