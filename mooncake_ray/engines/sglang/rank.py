"""`Rank`: the `EngineAdapter` of a rank of an SGLang server, in the scheduler's own process.

Two threads share it. The group's thread asks for an update; the scheduler's own thread writes, when a message of the update reaches it between
two steps. Rank 0 also controls the server, over HTTP, as anybody could; the others only do their part of what it asks for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from mooncake_ray.engines.base import PauseMode, UpdateInfo
from mooncake_ray.engines.handover import Handover
from mooncake_ray.engines.served import Served
from mooncake_ray.engines.sglang.server import Keep, Server
from mooncake_ray.errors import ConfigError, EnginePoisonedError, MooncakeRayError, WeightSyncError
from mooncake_ray.weights.shard import Shard

__all__ = ["Rank", "Ranks", "Settings"]

logger = logging.getLogger("mooncake_ray")

_GRACE_S = 10.0  # what a call takes beside what it waits for
_FLUSH_S = 5.0


@dataclass(frozen=True)
class Settings:
    """Plain values, for a message."""

    pause: str = "keep"
    """Whatever the group asks for is done so; see `PauseMode`."""
    keep: str = "retract"
    """See `Keep`."""
    flush: bool = True
    """Forget keys and values that older weights made. With `in_place` it cannot be done while requests run; then it is left, and said so."""
    exchange: bool = True
    """Make a version ready in memory of its own, and put that in the place of what was served: a shorter pause, for twice the memory. Only for
    weights on a CPU."""
    timeout_s: float = 60.0
    """Until requests are paused; until all ranks have taken an update over."""

    def __post_init__(self) -> None:
        if self.pause not in ("abort", "wait", "keep") or self.keep not in ("retract", "in_place"):
            raise ConfigError(f"pause is abort, wait or keep, and keep is retract or in_place; got {self.pause!r} and {self.keep!r}")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive, got {self.timeout_s}")

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Settings:
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True)
class Ranks:
    """This rank among those that share the model's tensors."""

    rank: int
    world: int
    least: Callable[[list[int]], list[int]]
    """In the scheduler's own thread, by all ranks: the least that any of them has said, for each number."""


class Rank:
    """See `EngineAdapter` for the calls of an update. Either all ranks of the server write, or none does."""

    name: ClassVar[str] = "sglang"

    def __init__(
        self,
        shard: Shard,
        ranks: Ranks,
        handover: Handover,
        server: Server,
        settings: Settings,
        post_load: Callable[[], None],
        module: torch.nn.Module | None = None,
    ) -> None:
        """
        Args:
            handover: whose `take` the scheduler's thread calls when it gets a message.
            post_load: makes what is derived from weights, after all are written.
            module: whose weights these are.
        """
        self._weights = Served(self.name, shard, module if settings.exchange else None)
        self._ranks, self._handover, self._server, self._settings, self._post_load = ranks, handover, server, settings, post_load
        self._lock = threading.RLock()  # the weights are looked at, or written, by one thread
        self._session = self._paused = False
        self._new: list[UpdateInfo] = []
        self._before = ""

    def shard(self) -> Shard:
        return self._weights.shard

    @property
    def weight_version(self) -> int | None:
        return self._weights.version

    @property
    def poisoned(self) -> str:
        return self._weights.poisoned

    @property
    def _leads(self) -> bool:
        return self._ranks.rank == 0

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Takes other `Settings`."""
        with self._lock:
            if self._weights.is_open:
                raise WeightSyncError("an update is open")
            self._settings = Settings.parse(init_info)

    def pause(self, mode: PauseMode | None = None, *, timeout_s: float | None = None) -> None:
        """As `Settings` say. `keep` is SGLang's `retract` or `in_place`. SGLang has no way to refuse requests: new ones always wait. It has
        none to let the running ones end either: for `wait` the session is opened first, which does that, and what came in since is
        retracted."""
        if not self._leads:
            return
        left = self._settings.timeout_s if timeout_s is None else timeout_s
        mode = mode or self._settings.pause  # type: ignore[assignment]
        try:
            if mode == "wait":
                self._begin(left)
            self._server.pause(mode if mode == "abort" else self._keep, timeout_s=left)
        except BaseException:
            if not self._paused:
                with contextlib.suppress(WeightSyncError):
                    self._server.resume(timeout_s=_GRACE_S)
            raise
        self._paused = True

    @property
    def _keep(self) -> Keep:
        return self._settings.keep  # type: ignore[return-value]

    def resume(self) -> None:
        """A poisoned engine stays paused: SGLang has no other way to serve nothing.

        Raises:
            EnginePoisonedError: it is.
        """
        with self._lock:
            if self._weights.has_written:
                raise WeightSyncError("an update has begun to write: finish it or abort it first")
            if self._weights.poisoned:
                raise EnginePoisonedError(f"{self._weights.poisoned}; all weights must be written anew")
        if self._leads and self._paused:
            self._server.resume(timeout_s=self._settings.timeout_s)
            self._paused = False

    def start_weight_update(self) -> None:
        with self._lock:
            self._weights.open()
            self._new = []
        if self._leads:
            self._before = str(self._server.call("model_info", timeout_s=self._settings.timeout_s)["weight_version"])

    def prepare_weights(self, update_info: UpdateInfo) -> None:
        """Writes all of it beside what is served, if the module's weights may be exchanged."""
        with self._lock:
            self._weights.prepare(update_info)

    def update_weights(self, update_info: UpdateInfo) -> None:
        """What it brings is read and written when the update is finished: that is one request to the server, and only then it says the
        version."""
        with self._lock:
            self._weights.check(update_info)
            if self._leads and not self._paused:
                raise WeightSyncError("weights are only written while the engine is paused")
            self._new.append(update_info)

    def finish_weight_update(self, weight_version: int) -> None:
        """Has the scheduler's own thread write. Raises also SyncTimeoutError: the scheduler, or another rank, has not come to it in time."""
        with self._lock:
            self._weights.check_version(weight_version)
        left, new = self._settings.timeout_s, self._new
        if not self._leads:
            _raise(self._handover.give(lambda: self._take_over(new, weight_version), left + _GRACE_S))
            return
        self._begin(left)
        done = self._handover.leave(lambda: self._take_over(new, weight_version))
        flush = self._settings.flush and (self._settings.keep == "retract" or self._settings.pause == "abort")
        try:
            self._server.tell(
                {"do": "commit", "timeout_s": left},
                self._ranks.world,
                version=str(weight_version),
                flush=flush,
                timeout_s=left + _GRACE_S,
            )
            if not done.done():
                raise WeightSyncError("the server says that it has the weights, and has not taken them")
            _raise(done.result())
        except BaseException as e:
            self._handover.withdraw()
            if not done.done() or done.cancelled() or done.result() is not None or self._weights.version != weight_version:
                self._say_version_before()
                raise
            logger.warning("mooncake_ray: the server has the new weights, and says: %s", e)
        if self._settings.flush and not flush:
            self._flush(left)
        self._end(left)
        self.resume()  # all ranks have it: nobody need be waited for

    @property
    def is_paused(self) -> bool:
        """Of the rank that pauses the server; the others do not know."""
        return self._paused or not self._leads

    def abort_weight_update(self) -> None:
        """If nothing was written, the server goes on as it was."""
        self._handover.withdraw()
        with self._lock:
            self._weights.abort()
            self._new = []
        if self._leads:
            try:
                self._end(_GRACE_S)
                if not self._weights.poisoned:
                    self.resume()
            except WeightSyncError as e:
                logger.warning("mooncake_ray: an update is aborted, and the server does not go on: %s", e)

    def forget(self) -> None:
        """The server gets other weights in another way than by updates. The next one brings all of its own."""
        with self._lock:
            self._weights.forget()

    def _take_over(self, new: Sequence[UpdateInfo], version: int) -> Exception | None:
        """In the scheduler's own thread, by all ranks at once: looks whether it can be done, and if all say so does it. Never raises: what one
        rank would not hear of, it would wait for."""
        with self._lock:
            error: Exception | None = None
            try:
                self._weights.look_again()
                for info in new:
                    self._weights.check(info)
            except Exception as e:
                error = e
            try:
                ready, least, most = self._ranks.least([error is None, version, -version])
            except Exception as e:
                return error or e
            if not ready or least != -most:
                return error or WeightSyncError("another rank cannot take the new weights over; nothing is written")
            try:
                with torch.no_grad():
                    for info in new:
                        self._weights.write(info)
                    self._weights.finish(version, self._post_load)
            except Exception as e:
                error = e
            try:
                (written,) = self._ranks.least([error is None])
            except Exception as e:
                written, error = False, error or e
            if written:
                return None
            error = error or WeightSyncError("another rank could not write the new weights")
            if not self._weights.poisoned:
                self._weights.fail(error)
            return error

    def _say_version_before(self) -> None:
        """Nobody has been served by the one that did not come to be: the server is paused."""
        try:
            self._server.set_version(self._before, timeout_s=_GRACE_S)
        except WeightSyncError as e:
            logger.warning("mooncake_ray: the server may name a version that it has not got: %s", e)

    def _begin(self, left: float) -> None:
        if not self._session:
            self._server.begin(timeout_s=left)
            self._session = True

    def _end(self, left: float) -> None:
        if self._session:
            self._session = False
            self._server.end(timeout_s=left)

    def _flush(self, left: float) -> None:
        try:
            self._server.flush(wait_s=0.0, timeout_s=left)
        except WeightSyncError as e:
            logger.warning("mooncake_ray: the cache keeps what older weights made until it is flushed: %s", e)


def _raise(error: Exception | None) -> None:
    """As one of the weight plane."""
    if error is None:
        return
    if isinstance(error, MooncakeRayError):
        raise error
    raise WeightSyncError(f"{type(error).__name__}: {error}") from error
