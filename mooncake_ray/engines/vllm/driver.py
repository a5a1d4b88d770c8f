"""`VLLMEngine`: a vLLM server, or an actor that holds one, for whoever wants it in a `WeightSyncGroup`."""

from __future__ import annotations

import time
from collections.abc import Collection

import ray

from mooncake_ray.engines.base import PauseMode
from mooncake_ray.engines.vllm.control import control
from mooncake_ray.errors import ConfigError
from mooncake_ray.sync.group import WeightSyncGroup

__all__ = ["VLLMEngine"]

_GRACE_S = 30.0  # what an answer takes beside what it waits for


class VLLMEngine:
    """A handle. Any number of them may be made of an engine; from any thread. vLLM runs with `--weight-transfer-config '{"backend":
    "mooncake_ray"}'`; a server also with VLLM_SERVER_DEV_MODE=1 in its environment.

    engine = VLLMEngine("http://127.0.0.1:8000")
    engine.attach(group, "engine-0")        # once, and again after the server was started again
    group.sync()                            # from then on this is all

    Every call raises WeightSyncError when the engine refuses or is gone, and SyncTimeoutError when it does not answer in time.
    """

    def __init__(self, url: str = "", *, key: str = "", actor: str = "", namespace: str = "", timeout_s: float = 60.0) -> None:
        """
        Args:
            url: Of a server; `key` is a bearer token.
            actor: Instead: the name of a Ray actor with the methods of `AsyncLLM`; `namespace`, if that is not this job's.
            timeout_s: Seconds, of each call that has no other.

        Raises:
            ConfigError: It is neither or both, or there is no such actor.
        """
        if actor and not namespace:
            namespace = ray.get_runtime_context().namespace  # workers have namespaces of their own
        self._where = {k: v for k, v in (("url", url), ("key", key), ("actor", actor), ("namespace", namespace)) if v}
        found = control(self._where)
        if found is None:
            raise ConfigError("a vLLM engine is named by its url, or by its actor")
        self._control, self._timeout_s = found, timeout_s

    def attach(
        self,
        group: WeightSyncGroup | str,
        name: str,
        *,
        address: str = "",
        keep_prefixes: bool = False,
        ignore: Collection[str] = (),
        update_timeout_s: float = 60.0,
        timeout_s: float = 300.0,
    ) -> None:
        """Makes the engine's workers the ranks of the engine `name` in the group, whose trainers must be there or come. Returns when they have
        joined; the group brings them to its version by itself. Called where Ray is connected.

        Args:
            address: Of the Ray cluster, as the engine's host reaches it; by default of the one this process is in.
            keep_prefixes: Keys and values that old weights made may be used with new ones. By default cached prefixes are forgotten at each
                update, and requests that it has frozen compute theirs anew.
            ignore: Parameters that the model's loader leaves as they are.
            update_timeout_s: Seconds, of each step of an update within the engine.

        Raises:
            ValueError: There is no such group.
            SyncTimeoutError: Not done in time.
            WeightSyncError: The engine has another backend, or its workers cannot join: trainers have other tensors than the model, say.
        """
        end = time.monotonic() + timeout_s
        group = WeightSyncGroup.find(group) if isinstance(group, str) else group
        group.metas(timeout_s=timeout_s)  # or workers would wait for trainers, and generate nothing meanwhile
        info = {
            "group": group.name,
            "engine": name,
            "address": address or ray.get_runtime_context().gcs_address,
            "control": self._where,
            "keep_prefixes": keep_prefixes,
            "ignore": list(ignore),
            "update_timeout_s": update_timeout_s,
            "timeout_s": max(1.0, end - time.monotonic()),
        }
        self._control.init(info, max(1.0, end - time.monotonic()) + _GRACE_S)

    def pause(self, mode: PauseMode = "keep", *, timeout_s: float | None = None) -> None:
        """For a driver's own purposes; updates by the group pause for themselves. Modes are vLLM's."""
        self._control.pause(mode, self._timeout_s if timeout_s is None else timeout_s)

    def resume(self) -> None:
        self._control.resume(self._timeout_s)

    @property
    def weight_version(self) -> str:
        """As vLLM reports it: "default" before the first sync."""
        return self._control.version(self._timeout_s)

    def checksums(self) -> dict[str, str]:
        """SHA-256 of every parameter, see `Control.checksums`."""
        return self._control.checksums(self._timeout_s)
