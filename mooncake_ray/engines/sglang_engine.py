"""`SGLangEngine`: a server of SGLang, as drivers use it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mooncake_ray.engines.answers import Answers
from mooncake_ray.engines.base import PauseMode
from mooncake_ray.engines.sglang_rank import Settings
from mooncake_ray.engines.sglang_server import Keep, Server

if TYPE_CHECKING:
    from mooncake_ray.sync.group import WeightSyncGroup

__all__ = ["SGLangEngine"]


class SGLangEngine:
    """A handle. Any number of them may be made of a server; one thread at a time each.

    engine = SGLangEngine("http://127.0.0.1:30000")
    engine.attach(group, "engine-0")        # once, and again after the server was started again
    group.sync()                            # from then on this is all
    """

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 60.0) -> None:
        """
        Args:
            url: of a server that was started with `--custom-weight-loader mooncake_ray.engines.sglang.load`.
            timeout_s: of each call that has no other.

        Raises:
            ConfigError: that is no URL.
        """
        self.server = Server(url.rstrip("/"), api_key)
        self._timeout_s = timeout_s

    def attach(
        self,
        group: WeightSyncGroup | str,
        name: str,
        *,
        address: str = "",
        pause: PauseMode = "keep",
        keep: Keep = "retract",
        flush: bool = True,
        update_timeout_s: float = 60.0,
        timeout_s: float = 300.0,
    ) -> None:
        """Makes the server's ranks those of the engine `name` in the group, whose trainers must be there or come. Returns when they have
        joined; the group brings them to its version by itself. Generation goes on, but for the moment in which weights are looked at.

        Args:
            address: of the Ray cluster as the server's host reaches it; by default of the one this process is in.
            pause, keep, flush: how updates are taken over; see `sglang_rank.Settings`.
            update_timeout_s: of the steps of an update within the server.

        Raises:
            ConfigError: the server was not started as it must be, or has no Ray cluster at that address.
            PlanError: trainers have other tensors than the model, or its loader changes what it loads.
            SyncTimeoutError: not done in time.
            WeightSyncError: the server is not there, or refuses.
        """
        settings = Settings(pause, keep, flush, update_timeout_s)
        end = time.monotonic() + timeout_s
        ranks = self.server.ranks
        joining = {
            "group": group if isinstance(group, str) else group.name,
            "engine": name,
            "address": address or _cluster(),
            "timeout_s": timeout_s,
        }
        with Answers((self.server.host, self.server.port)) as answers:
            message = {
                "do": "attach",
                "joining": joining,
                "settings": dataclasses.asdict(settings),
                "url": self.server.url,
                "api_key": self.server.api_key,
                "answer": dataclasses.asdict(answers.address),
            }
            self._tell(message, ranks)
            answers.wait("ready", ranks, timeout_s=end - time.monotonic())
            self._tell({"do": "learn", "timeout_s": self._timeout_s}, ranks)
            answers.wait("joined", ranks, timeout_s=end - time.monotonic())

    def detach(self) -> None:
        """The ranks leave their group; the server serves on what it has."""
        self._tell({"do": "detach"}, self.server.ranks)

    def _tell(self, message: Mapping[str, Any], ranks: int) -> None:
        self.server.begin(timeout_s=self._timeout_s)
        try:
            self.server.tell(message, ranks, timeout_s=self._timeout_s)
        finally:
            self.server.end(timeout_s=self._timeout_s)

    def pause(self, mode: PauseMode = "keep", *, keep: Keep = "retract", timeout_s: float | None = None) -> None:
        """For a driver's own purposes; updates by the group pause for themselves. New requests wait, in all modes. See `Rank.pause`."""
        left = self._timeout_s if timeout_s is None else timeout_s
        if mode == "wait":
            self.server.begin(timeout_s=left)
            self.server.end(timeout_s=left)
        self.server.pause("abort" if mode == "abort" else keep, timeout_s=left)

    def resume(self) -> None:
        self.server.resume(timeout_s=self._timeout_s)

    def flush(self, *, wait_s: float = 0.0) -> None:
        """Forgets keys and values that other weights made.

        Raises:
            WeightSyncError: requests are running, and have been for `wait_s` seconds.
        """
        self.server.flush(wait_s=wait_s, timeout_s=wait_s + self._timeout_s)

    @property
    def weight_version(self) -> str:
        """What the server says that it serves. SGLang's versions are strings."""
        return str(self.server.call("model_info", timeout_s=self._timeout_s)["weight_version"])

    def checksums(self) -> list[dict[str, str]]:
        """For each rank, by SGLang's own names of parameters: to compare with another server's of the same layout."""
        said = self.server.call("weights_checker", {"action": "checksum"}, timeout_s=self._timeout_s)
        return [dict(rank["checksums"]) for rank in said["ranks"]]


def _cluster() -> str:
    import ray

    return ray.get_runtime_context().gcs_address
