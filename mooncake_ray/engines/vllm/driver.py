"""`VLLMEngine`: a vLLM server, or an actor that holds one, for whoever wants it in a `WeightSyncGroup`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from mooncake_ray.engines.base import PauseMode
from mooncake_ray.engines.vllm.control import Control, control
from mooncake_ray.errors import ConfigError

__all__ = ["VLLMEngine"]


_GRACE_S = 30.0  # what an answer takes beside what it waits for


class VLLMEngine:
    """A handle; keeps nothing alive. vLLM runs with `--weight-transfer-config '{"backend": "mooncake_ray"}'`; a server also with
    VLLM_SERVER_DEV_MODE=1 in its environment.

        engine = VLLMEngine(url="http://127.0.0.1:8000")
        engine.attach(group="policy", engine="vllm-0", address=ray_address)
        WeightSyncGroup("policy").sync()                 # and at every later step: the engine takes part by itself

    Thread-safe. Every call has a deadline of `timeout_s` seconds, and raises SyncTimeoutError when it is over, or WeightSyncError when the
    engine refuses or is gone.
    """

    def __init__(self, *, url: str = "", key: str = "", actor: str = "", namespace: str = "") -> None:
        """Either `url` (and `key`, a bearer token), or the name of a Ray actor with the methods of `AsyncLLM` (and its namespace, if that is not
        this job's). Raises ConfigError."""
        if actor and not namespace:
            namespace = ray.get_runtime_context().namespace  # workers have namespaces of their own
        self._where: Mapping[str, str] = {k: v for k, v in (("url", url), ("key", key), ("actor", actor), ("namespace", namespace)) if v}
        found = control(self._where)
        if found is None:
            raise ConfigError("a vLLM engine is named by its url, or by its actor")
        self._control: Control = found

    def attach(
        self,
        group: str = "default",
        engine: str = "vllm",
        *,
        address: str = "auto",
        keep_prefixes: bool = False,
        timeout_s: float = 120.0,
        **more: Any,
    ) -> None:
        """Has every worker join a group, whose trainers must join too meanwhile. Again is allowed; needed after a restart of the server.

        Args:
            group, engine: Names: of the group, and of this engine in it.
            address: Of the Ray cluster, as workers reach it.
            keep_prefixes: Keys and values that old weights made may be used with new ones; by default requests that are frozen in a pause
                compute theirs anew, and cached prefixes are forgotten.
            more: Other fields of `worker.InitInfo`.
        """
        info = {"group": group, "engine": engine, "address": address, "keep_prefixes": keep_prefixes, "timeout_s": timeout_s}
        self._control.init(info | {"control": dict(self._where)} | more, timeout_s + _GRACE_S)

    def pause(self, mode: PauseMode = "keep", *, timeout_s: float = 60.0) -> None:
        """Modes have vLLM's names."""
        self._control.pause(mode, timeout_s)

    def resume(self, *, timeout_s: float = 60.0) -> None:
        self._control.resume(timeout_s)

    def weight_version(self, *, timeout_s: float = 60.0) -> str:
        """As vLLM reports it: "default" before the first sync."""
        return self._control.version(timeout_s)

    def checksums(self, *, timeout_s: float = 300.0) -> dict[str, str]:
        """SHA-256 of every parameter, see `Control.checksums`."""
        return self._control.checksums(timeout_s)
