"""What pauses a vLLM engine and has its workers take new weights: over HTTP, or by the actor that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import ray

from mooncake_ray.engines.base import PauseMode
from mooncake_ray.engines.http import JSONClient
from mooncake_ray.errors import ConfigError, SyncTimeoutError, WeightSyncError

__all__ = ["ActorControl", "Control", "HTTPControl", "control"]


class Control(Protocol):
    """One vLLM engine, all of its workers. Every call has a deadline of `timeout_s` seconds. Thread-safe.

    Raises:
        SyncTimeoutError: it was not done in time.
        WeightSyncError: the engine refused, or is gone.
    """

    def init(self, init_info: Mapping[str, Any], timeout_s: float) -> None: ...

    def pause(self, mode: PauseMode, timeout_s: float) -> None: ...

    def resume(self, timeout_s: float) -> None: ...

    def update(self, update_info: Mapping[str, Any], timeout_s: float) -> None:
        """One whole update: start, update, finish. Gives it no version."""
        ...

    def forget_prefixes(self, timeout_s: float) -> None:
        """Nothing that is computed from now on reads keys and values that other weights made: what was cached is dropped, and requests that
        are frozen compute theirs anew."""
        ...

    def set_version(self, version: int, timeout_s: float) -> None: ...

    def version(self, timeout_s: float) -> str: ...

    def checksums(self, timeout_s: float) -> dict[str, str]:
        """SHA-256 of every parameter that workers hold, in hex, by rank and name. On CPUs vLLM repacks weights of linear layers, and the
        parameters are empty then."""
        ...


@dataclass(frozen=True)
class HTTPControl:
    """A vLLM server, which was started with VLLM_SERVER_DEV_MODE=1: without it there are no such routes."""

    client: JSONClient

    def _post(self, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, Any] | None = None, *, timeout_s: float) -> Any:
        return self.client.post(path, body, query=query, timeout_s=timeout_s)

    def init(self, init_info: Mapping[str, Any], timeout_s: float) -> None:
        self._post("init_weight_transfer_engine", {"init_info": dict(init_info)}, timeout_s=timeout_s)

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        self._post("pause", query={"mode": mode, "clear_cache": "false"}, timeout_s=timeout_s)

    def resume(self, timeout_s: float) -> None:
        self._post("resume", timeout_s=timeout_s)

    def update(self, update_info: Mapping[str, Any], timeout_s: float) -> None:
        self._post("start_weight_update", timeout_s=timeout_s)
        self._post("update_weights", {"update_info": dict(update_info)}, timeout_s=timeout_s)
        self._post("finish_weight_update", timeout_s=timeout_s)

    def forget_prefixes(self, timeout_s: float) -> None:
        self._post("reset_prefix_cache", query={"reset_running_requests": "true"}, timeout_s=timeout_s)

    def set_version(self, version: int, timeout_s: float) -> None:
        self._post("update_weight_version", {"new_version": str(version)}, timeout_s=timeout_s)

    def version(self, timeout_s: float) -> str:
        return self.client.get("weight_info", timeout_s=timeout_s)["weight_version"]

    def checksums(self, timeout_s: float) -> dict[str, str]:
        return self._post("weight_checker", {"action": "checksum"}, timeout_s=timeout_s)["checksums"]


@dataclass(frozen=True)
class ActorControl:
    """A Ray actor that has the methods of vLLM's `AsyncLLM`, under the same names: what vLLM's own Ray client asks for. Requests are plain
    objects with the fields of vLLM's, so that who controls it need not have vLLM."""

    handle: Any

    def _call(self, method: str, *arguments: Any, timeout_s: float, **named: Any) -> Any:
        try:
            return ray.get(getattr(self.handle, method).remote(*arguments, **named), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise SyncTimeoutError(f"vLLM's actor has not answered {method!r} within {timeout_s:g} s") from None
        except AttributeError as e:
            raise WeightSyncError(f"vLLM's actor has no method {method!r}: {e}") from None
        except ray.exceptions.RayError as e:
            raise WeightSyncError(f"vLLM's actor: {method}: {e}") from None

    def init(self, init_info: Mapping[str, Any], timeout_s: float) -> None:
        self._call("init_weight_transfer_engine", SimpleNamespace(init_info=dict(init_info)), timeout_s=timeout_s)

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        self._call("pause_generation", mode=mode, clear_cache=False, timeout_s=timeout_s)

    def resume(self, timeout_s: float) -> None:
        self._call("resume_generation", timeout_s=timeout_s)

    def update(self, update_info: Mapping[str, Any], timeout_s: float) -> None:
        self._call("start_weight_update", timeout_s=timeout_s)
        self._call("update_weights", SimpleNamespace(update_info=dict(update_info)), timeout_s=timeout_s)
        self._call("finish_weight_update", timeout_s=timeout_s)

    def forget_prefixes(self, timeout_s: float) -> None:
        self._call("reset_prefix_cache", reset_running_requests=True, timeout_s=timeout_s)

    def set_version(self, version: int, timeout_s: float) -> None:
        self._call("update_weight_version", str(version), timeout_s=timeout_s)

    def version(self, timeout_s: float) -> str:
        return self._call("get_weight_version", timeout_s=timeout_s)

    def checksums(self, timeout_s: float) -> dict[str, str]:
        out: dict[str, str] = {}
        for of_worker in self._call("compute_weight_checksums", timeout_s=timeout_s):
            out |= of_worker
        return out


def control(where: Mapping[str, str]) -> Control | None:
    """By plain values: {"url": ..., "key": ...} or {"actor": name, "namespace": ...}; None for none of them.

    Raises:
        ConfigError: something else is there, or there is no such actor.
    """
    if not where:
        return None
    match dict(where):
        case {"url": url, **more} if more.keys() <= {"key"}:
            return HTTPControl(JSONClient(url, more.get("key", "")))
        case {"actor": name, **more} if more.keys() <= {"namespace"}:
            try:
                return ActorControl(ray.get_actor(name, namespace=more.get("namespace")))
            except ValueError as e:
                raise ConfigError(f"there is no actor {name!r} that holds vLLM: {e}") from None
    raise ConfigError(f"vLLM is controlled by url (and key), or by actor (and namespace), got {', '.join(where)}")
