"""`Server`: the routes of an SGLang server that an update of weights needs."""

from __future__ import annotations

import base64
import json
import logging
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mooncake_ray.engines.http import JSONClient
from mooncake_ray.errors import ConfigError, WeightSyncError

__all__ = ["LOADER", "Info", "Keep", "Server", "packed"]

logger = logging.getLogger("mooncake_ray")

Keep = Literal["retract", "in_place"]
"""What becomes of running requests in SGLang's own words. `retract`: they go back to the queue, and what they have is computed again with the
new weights. `in_place`: they go on with keys and values that the old weights made, and the cache cannot be flushed while there are some."""

LOADER = "mooncake_ray.engines.sglang.load"
"""What the server was started with, as its `--custom-weight-loader`."""

_OPEN_ALREADY = "already open"


@dataclass(frozen=True)
class Info:
    """How a server was started."""

    ranks: int
    """That share the model's tensors."""
    can_be_told: bool
    """Whether our loader is named."""


@dataclass(frozen=True)
class Server:
    """Thread-safe."""

    client: JSONClient

    @classmethod
    def at(cls, url: str, api_key: str = "") -> Server:
        """
        Args:
            url: "http://127.0.0.1:30000".
            api_key: of an administrator, if the server was started with one.

        Raises:
            ConfigError: that is no URL.
        """
        return cls(JSONClient(url, api_key))

    @property
    def url(self) -> str:
        return self.client.url

    def call(self, route: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        """Posts, or gets if there is no body. Returns what the server says, {} if that is not JSON.

        Raises:
            SyncTimeoutError: no answer within `timeout_s` seconds. What was asked may be done all the same.
            WeightSyncError: the server is not there, or refuses; what it says.
        """
        client = self.client
        said = client.get(route, timeout_s=timeout_s) if body is None else client.post(route, body, timeout_s=timeout_s)
        if not isinstance(said, dict):
            return {}
        if said.get("success") is False:
            raise WeightSyncError(f"{self.url}/{route}: {said.get('message') or said}")
        return said

    def pause(self, mode: Literal["abort"] | Keep, *, timeout_s: float) -> None:
        """Returns when no request computes, or will."""
        self.call("pause_generation", {"mode": mode}, timeout_s=timeout_s)

    def resume(self, *, timeout_s: float) -> None:
        self.call("continue_generation", {"torch_empty_cache": False}, timeout_s=timeout_s)

    def begin(self, *, timeout_s: float) -> None:
        """Opens the session that updates need. One that is open already was left by somebody who is gone: nobody closes those."""
        try:
            self.call("begin_weight_update", {"selector": "target"}, timeout_s=timeout_s)
        except WeightSyncError as e:
            if _OPEN_ALREADY not in str(e):
                raise
            logger.warning("mooncake_ray: %s: an update that somebody has left open is ended", self.url)
            self.end(timeout_s=timeout_s)
            self.call("begin_weight_update", {"selector": "target"}, timeout_s=timeout_s)

    def end(self, *, timeout_s: float) -> None:
        self.call("end_weight_update", {}, timeout_s=timeout_s)

    def tell(self, message: Mapping[str, Any], ranks: int, *, timeout_s: float, version: str | None = None, flush: bool = False) -> None:
        """Has `mooncake_ray.engines.sglang.load` called with a message in each rank's own thread. Needs a session. That it is called is all
        that the answer says.

        Args:
            version: That is served from then on, whatever the message came to.
            flush: Forget then keys and values that other weights made.

        Raises:
            WeightSyncError: also if only the flush was refused.
        """
        text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        body = {
            "serialized_named_tensors": [packed([("mooncake_ray", text)])] * ranks,
            "load_format": LOADER,
            "flush_cache": flush,
            "weight_version": version,
            "selector": "target",
        }
        self.call("update_weights_from_tensor", body, timeout_s=timeout_s)

    def set_version(self, version: str, *, timeout_s: float) -> None:
        """Tokens that are made from now on are said to be of that version."""
        self.call("update_weight_version", {"new_version": version, "abort_all_requests": False}, timeout_s=timeout_s)

    def flush(self, *, wait_s: float, timeout_s: float) -> None:
        """Forgets keys and values that other weights made. Raises WeightSyncError if requests are running all of `wait_s` seconds."""
        self.call(f"flush_cache?timeout={wait_s:g}", {}, timeout_s=timeout_s)

    def info(self) -> Info:
        """Raises ConfigError: its weights are not such as can be updated in place."""
        said = self.call("server_info", timeout_s=30.0)
        if (pipeline := said.get("pp_size", 1)) != 1 or (data := said.get("dp_size", 1)) != 1:
            raise ConfigError(f"{self.url}: pp_size is {pipeline} and dp_size {data}; weights are updated in place with 1 of each only")
        if (cache := said.get("weight_cache_mode", "off")) not in ("off", None):
            raise ConfigError(f"{self.url}: weight_cache_mode is {cache}: weights that engines share are not updated")
        return Info(int(said.get("tp_size", 1)), LOADER in (said.get("custom_weight_loader") or ()))

    def ranks(self) -> int:
        """Of a server that can be told.

        Raises:
            ConfigError: it was started without our loader. It would not refuse to call it, but end.
        """
        info = self.info()
        if not info.can_be_told:
            raise ConfigError(f"{self.url} was not started with --custom-weight-loader {LOADER}")
        return info.ranks


def packed(named: Any) -> str:
    """As the server unpacks it: a plain pickle, which needs no memory that both processes share, nor SGLang on this side."""
    return base64.b64encode(pickle.dumps(named, protocol=pickle.HIGHEST_PROTOCOL)).decode()
