"""What an SGLang server of several ranks does with the routes of an update, as far as is known of the real one: without a model."""

from __future__ import annotations

import base64
import json
import pickle
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mooncake_ray.engines.handover import Handover
from mooncake_ray.engines.sglang.rank import Rank, Ranks, Settings
from mooncake_ray.engines.sglang.server import LOADER, Server
from mooncake_ray.errors import SyncTimeoutError
from mooncake_ray.weights.shard import Shard


class FakeServer:
    """Ranks are threads; each has a `Rank`."""

    def __init__(self, shards: Sequence[Shard], post_load: Callable[[], None] = lambda: None, **settings: Any) -> None:
        self.version, self.paused, self.session, self.running = "default", "", False, False
        self.calls: list[str] = []
        self.flushed = 0
        self.refuse: dict[str, int] = {}
        self._web = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._web.daemon_threads = True
        threading.Thread(target=self._web.serve_forever, args=(0.01,), daemon=True).start()
        self.server = Server.at(f"http://127.0.0.1:{self._web.server_port}", "secret")
        self._barrier, self._said = threading.Barrier(len(shards)), [[0]] * len(shards)
        self.handovers = [Handover() for _ in shards]
        self.ranks = [
            Rank(
                shard,
                Ranks(n, len(shards), lambda said, n=n: self._least(n, said)),
                self.handovers[n],
                self.server,
                Settings(**({"timeout_s": 2.0} | settings)),
                post_load,
            )
            for n, shard in enumerate(shards)
        ]

    def close(self) -> None:
        self._web.shutdown()
        self._web.server_close()

    def _least(self, n: int, said: list[int]) -> list[int]:
        self._said[n] = said
        self._barrier.wait(10)
        out = [min(column) for column in zip(*self._said, strict=True)]
        self._barrier.wait(10)
        return out

    def _load(self, n: int, message: dict[str, Any]) -> None:
        """As the scheduler's `load` does a commit."""
        try:
            self.handovers[n].take(message["timeout_s"])
        except SyncTimeoutError:
            self._least(n, [0, 0, 0])

    def _answer(self, route: str, body: dict[str, Any]) -> tuple[int, str]:
        if status := self.refuse.get(route):
            return status, "refused"
        match route:
            case "pause_generation":
                self.paused = body["mode"]
            case "continue_generation":
                self.paused = ""
            case "begin_weight_update" if self.session:
                return 400, "a weight-update session is already open; call end_weight_update() first"
            case "begin_weight_update":
                self.session = True
            case "end_weight_update" | "update_weights_from_tensor" if not self.session:
                return 400, "must run between begin_weight_update() and end_weight_update()"
            case "end_weight_update":
                self.session = False
            case "update_weights_from_tensor":
                payloads = body["serialized_named_tensors"]
                if body["load_format"] != LOADER or len(payloads) != len(self.ranks):
                    raise AssertionError("a real server would have ended itself")
                threads = []
                for n, payload in enumerate(payloads):
                    ((_, text),) = pickle.loads(base64.b64decode(payload))
                    threads.append(threading.Thread(target=self._load, args=(n, json.loads(text.numpy().tobytes()))))
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                self.version = body["weight_version"] or self.version
                if body["flush_cache"]:
                    self.flushed += 1
                    if self.running:
                        return 400, "Weights were updated, but the cache was not flushed because requests are still running or queued."
            case "update_weight_version":
                self.version = body["new_version"]
            case "flush_cache" if self.running:
                return 400, "requests are running"
        return 200, "ok"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
                route = self.path.strip("/").partition("?")[0]
                if self.command == "POST":
                    fake.calls.append(route)
                status, message = fake._answer(route, body) if self.headers["Authorization"] == "Bearer secret" else (401, "who?")
                said = json.dumps({"success": status == 200, "message": message, "weight_version": fake.version}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            do_GET = do_POST

            def log_message(self, *args: Any) -> None:
                pass

        return Handler
