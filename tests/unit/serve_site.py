"""An endpoint in this process, without Ray: the application in a thread, over a desk that can be replaced like a replica."""

from __future__ import annotations

import asyncio
import threading

import uvicorn

from mooncake_ray.serve.app import build_app
from mooncake_ray.serve.desk import Desk
from mooncake_ray.serve.settings import Settings


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
