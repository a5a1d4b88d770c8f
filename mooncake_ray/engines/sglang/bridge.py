"""`Bridge`: an SGLang `Engine` in this process answers the routes that updates need, as a server of its own would."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Awaitable
from concurrent.futures import TimeoutError as FutureTimeoutError
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mooncake_ray.errors import ConfigError

__all__ = ["Bridge"]

_LONGEST_S = 600.0
_TOLD = ("tp_size", "pp_size", "dp_size", "weight_cache_mode", "custom_weight_loader")
_ROUTES = {
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
}
"""Methods of SGLang's `TokenizerManager`, and what they take."""


class _Loop:
    """An event loop that runs in a thread of its own, for code that would run it itself, in whichever thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        threading.Thread(target=loop.run_forever, name="mooncake_ray.loop", daemon=True).start()

    def run_until_complete(self, awaitable: Awaitable[Any], timeout_s: float | None = None) -> Any:
        async def awaited() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result(timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class Bridge:
    """Lives as long as the engine, whose own methods may be called from any thread from now on: its event loop gets a thread."""

    def __init__(self, engine: Any) -> None:
        """Raises ConfigError: that is no `sglang.Engine`."""
        if not all(hasattr(engine, name) for name in ("tokenizer_manager", "server_args", "loop")):
            raise ConfigError(f"an sglang.Engine is wanted, got {type(engine).__name__}")
        self._engine = engine
        if not isinstance(engine.loop, _Loop):
            engine.loop = _Loop(engine.loop)
        self.token = secrets.token_urlsafe(32)
        self._web = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._web.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._web.server_port}"
        threading.Thread(target=self._web.serve_forever, name="mooncake_ray.bridge", daemon=True).start()

    def close(self) -> None:
        """The engine cannot be updated by a group any more."""
        self._web.shutdown()
        self._web.server_close()

    def _answer(self, route: str, query: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        import msgspec
        from sglang.srt.managers import io_struct

        manager, loop = self._engine.tokenizer_manager, self._engine.loop
        if route == "server_info":
            arguments = self._engine.server_args
            return 200, {name: getattr(arguments, name, None) for name in _TOLD}
        if route == "model_info":
            return 200, {"weight_version": self._engine.get_model_info()["weight_version"]}
        if route == "flush_cache":
            done = loop.run_until_complete(manager.flush_cache(timeout_s=float(query.partition("=")[2] or 0)), _LONGEST_S)
            return (200 if done.success else 400), {"success": done.success, "message": done.message}
        if route == "weights_checker":
            success, message, ranks, _ = loop.run_until_complete(
                manager.check_weights(io_struct.CheckWeightsReqInput(**body), None), _LONGEST_S
            )
            return (200 if success else 400), {"success": success, "message": message, "ranks": msgspec.to_builtins(ranks)}
        if route not in _ROUTES:
            return 404, {"message": f"there is no {route}"}
        wanted = getattr(io_struct, _ROUTES[route])(**body)
        said = loop.run_until_complete(getattr(manager, route)(wanted), _LONGEST_S)
        success, message = said[:2] if isinstance(said, tuple) else (True, "")
        return (200 if success else 400), {"success": success, "message": message}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        bridge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                given = self.headers.get("Authorization", "")
                if not secrets.compare_digest(given.encode(), f"Bearer {bridge.token}".encode()):
                    self._say(401, {"message": "only who has the bridge's token"})
                    return
                try:
                    route, _, query = self.path.strip("/").partition("?")
                    self._say(*bridge._answer(route, query, json.loads(self.rfile.read(length) or b"{}")))
                except (FutureTimeoutError, TypeError, ValueError, RuntimeError) as e:
                    self._say(400, {"success": False, "message": f"{type(e).__name__}: {e}"})

            do_GET = do_POST

            def _say(self, status: int, what: dict[str, Any]) -> None:
                text = json.dumps(what).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: Any) -> None:
                """Nobody reads it."""

        return Handler
