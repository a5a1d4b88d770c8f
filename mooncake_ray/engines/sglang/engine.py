"""`SGLangEngine`: a server of SGLang, as drivers use it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mooncake_ray.engines.answers import Answers, near
from mooncake_ray.engines.base import PauseMode
from mooncake_ray.engines.sglang import native
from mooncake_ray.engines.sglang.bridge import Bridge
from mooncake_ray.engines.sglang.rank import Settings
from mooncake_ray.engines.sglang.server import Keep, Server
from mooncake_ray.weights.meta import ParamMeta

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
        self.server = Server.at(url, api_key)
        self._timeout_s = timeout_s
        self._bridge: Bridge | None = None

    @classmethod
    def over(cls, engine: Any, *, timeout_s: float = 60.0) -> SGLangEngine:
        """Of an `sglang.Engine` in this process, made with `custom_weight_loader=["mooncake_ray.engines.sglang.load"]`. From now on its methods
        may be called from any thread. A group's updates need this process to live.

        Raises:
            ConfigError: that is none.
        """
        bridge = Bridge(engine)
        out = cls(bridge.url, api_key=bridge.token, timeout_s=timeout_s)
        out._bridge = bridge
        return out

    def attach(
        self,
        group: WeightSyncGroup | str,
        name: str,
        *,
        address: str = "",
        pause: PauseMode = "keep",
        keep: Keep = "retract",
        flush: bool = True,
        exchange: bool = True,
        update_timeout_s: float = 60.0,
        timeout_s: float = 300.0,
    ) -> None:
        """Makes the server's ranks those of the engine `name` in the group, whose trainers must be there or come. Returns when they have
        joined; the group brings them to its version by itself. Generation goes on, but for the moment in which weights are looked at.

        Args:
            address: of the Ray cluster as the server's host reaches it; by default of the one this process is in.
            pause, keep, flush, exchange: how updates are taken over; see `rank.Settings`.
            update_timeout_s: of the steps of an update within the server.

        Raises:
            ConfigError: the server was not started as it must be, or has no Ray cluster at that address.
            PlanError: trainers have other tensors than the model, or its loader changes what it loads.
            SyncTimeoutError: not done in time.
            WeightSyncError: the server is not there, or refuses.
        """
        settings = Settings(pause, keep, flush, exchange, update_timeout_s)
        end = time.monotonic() + timeout_s
        ranks = self.server.ranks()
        joining = {
            "group": group if isinstance(group, str) else group.name,
            "engine": name,
            "address": address or _cluster(),
            "timeout_s": timeout_s * 0.8,  # the ranks give up first, and say why
        }
        with Answers(self.server.client.address) as answers:
            message = {
                "do": "attach",
                "joining": joining,
                "settings": dataclasses.asdict(settings),
                "url": self.server.url,
                "api_key": self.server.client.key,
                "answer": dataclasses.asdict(answers.address),
            }
            self._tell(message, ranks)
            answers.wait("ready", ranks, timeout_s=end - time.monotonic())
            self._tell({"do": "learn", "timeout_s": self._timeout_s}, ranks)
            answers.wait("joined", ranks, timeout_s=end - time.monotonic())

    def detach(self) -> None:
        """The ranks leave their group; the server serves on what it has."""
        self._tell({"do": "detach"}, self.server.ranks())

    # SGLang's own ways, for where there is no group

    def check(self, metas: Iterable[ParamMeta], *, timeout_s: float = 120.0) -> None:
        """Whether the model is loaded whole by tensors of these names and shapes: SGLang itself leaves out names that it does not know, and says
        nothing. Nothing is written.

        Raises:
            PlanError: it is not; which parameters stay as they are.
        """
        ranks = self.server.ranks()
        plain = [[m.name, m.dtype, list(m.shape)] for m in metas]
        with Answers(self.server.client.address) as answers:
            self._tell({"do": "check", "metas": plain, "answer": dataclasses.asdict(answers.address)}, ranks)
            answers.wait("checked", ranks, timeout_s=timeout_s)

    def update_from_tensor(self, named: Mapping[str, torch.Tensor], version: int, *, check: bool = True, **way: Any) -> float:
        """Sends whole tensors, under the names of the model's checkpoints, in requests. Returns for how many seconds it was paused.

        Args:
            check: see `check`; False for some of a model's tensors.
            way: see `native.Way`.

        Raises:
            PlanError: they are not all of the model. Nothing is written.
            WeightSyncError: the server refused. If something is written, it stays paused until an update is whole.
        """
        if check:
            self.check(_metas(named))
        return native.from_tensor(self.server, self._foreign(), named.items(), native.Way(version, **way))

    def update_from_distributed(
        self, named: Mapping[str, torch.Tensor], version: int, *, check: bool = True, host: str = "", **way: Any
    ) -> float:
        """As `update_from_tensor`, by a broadcast over Gloo from this process, whose address is `host` (by default found out)."""
        if check:
            self.check(_metas(named))
        host = host or near(self.server.client.address)
        return native.from_distributed(self.server, self._foreign(), list(named.items()), native.Way(version, **way), host)

    def update_from_disk(self, path: str, version: int, **way: Any) -> float:
        """Has the server read a checkpoint in a directory of its own host. Returns for how many seconds it was paused."""
        self._foreign()
        return native.from_disk(self.server, path, native.Way(version, **way))

    def _foreign(self) -> int:
        """Its group, if it has one, is not to take what comes for the version that it knows. Returns how many ranks there are."""
        info = self.server.info()
        if info.can_be_told:
            self._tell({"do": "forget"}, info.ranks)
        return info.ranks

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


def _metas(named: Mapping[str, torch.Tensor]) -> list[ParamMeta]:
    return [ParamMeta(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in named.items()]


def _cluster() -> str:
    import ray

    return ray.get_runtime_context().gcs_address
