"""An endpoint in this process, without Ray: the application in a thread, over a desk that can be replaced like a replica; and what it serves."""

from __future__ import annotations

import asyncio
import errno
import threading
from contextlib import contextmanager

import torch
import uvicorn
from disk_models import filled

from mooncake_ray.serve.app import build_app
from mooncake_ray.serve.desk import Desk
from mooncake_ray.serve.settings import Settings
from mooncake_ray.serve.spans import FileSpan, Held
from mooncake_ray.weights.snapshot import SnapshotStore
from mooncake_ray.weights.source import StateDictSource

TENSORS = {
    "embed.weight": filled((300, 64), torch.bfloat16, 1),
    "layers.0.w": filled((64, 64), torch.float32, 2),
    "layers.1.w": filled((64, 48), torch.float8_e4m3fn, 3),
    "scale": filled((), torch.float32, 4),
}
CONFIG = {"config.json": '{"a": 1}'}


class Site:
    def __init__(self, store, **settings) -> None:
        self.settings = Settings(str(store), **settings)
        self.desk = Desk(self.settings)
        self.app = build_app(self.desk)
        self._server = uvicorn.Server(
            uvicorn.Config(self.app, "127.0.0.1", 0, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        )
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._up.wait(60)

    async def _run(self) -> None:
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.001)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self._up.set()
        await serving

    def restart(self) -> None:
        """As when Serve starts a replica anew: transfers are cut off, and addresses that were given are good no more."""
        self.desk.close()
        self.desk = self.app.state.desk = Desk(self.settings)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.desk.close()


@contextmanager
def sites(directory):
    """Gives a function that makes endpoints over a store with version 3, each of other settings; they end with the block."""
    made = []

    def make(shards=None, **settings):
        store = SnapshotStore(directory, fsync=False)
        if 3 not in store.versions():
            store.save(3, shards or StateDictSource(TENSORS), extra={"files": CONFIG})
        made.append(Site(store.directory, **settings))
        return made[-1]

    try:
        yield make
    finally:
        for site in made:
            site.close()


def halves():
    """Two ranks, which cut across rows: nothing can be sent from where it lies."""
    out = {}
    for rank in range(2):
        held, boxes = {}, {}
        for name, t in TENSORS.items():
            if t.dim() == 2:
                width = t.shape[1] // 2
                held[name] = t[:, rank * width : (rank + 1) * width].clone()
                boxes[name] = (tuple(t.shape), (0, rank * width))
            else:
                held[name] = t
        out[f"r{rank}"] = StateDictSource(held, boxes)
    return out


def data_of(spans):
    """The bytes of a content's spans."""
    out = b""
    for span in spans:
        if isinstance(span, Held):
            out += span.data
        elif isinstance(span, FileSpan):
            with open(span.path, "rb") as file:
                file.seek(span.offset)
                piece = file.read(span.nbytes)
            assert len(piece) == span.nbytes
            out += piece
        else:
            piece = b"".join(bytes(part) for part in span.parts())
            assert len(piece) == span.nbytes
            out += piece
    return out


def full_disk(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")
