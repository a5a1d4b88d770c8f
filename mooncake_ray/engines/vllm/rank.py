"""`VLLMRank`: one worker of a vLLM engine as an `EngineAdapter`.

The group's threads bring a version here and make it ready while vLLM computes. Taking it over is work for the worker's own thread, which vLLM
has do it between two steps. The worker that leads asks its engine for that, and for the pause; if it cannot, whoever holds the engine does (see
`MooncakeTrainerWeightTransferEngine.send_weights`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from mooncake_ray.engines.base import PauseMode, UpdateInfo
from mooncake_ray.engines.handover import Handover
from mooncake_ray.engines.in_place import InPlace
from mooncake_ray.engines.vllm.control import Control
from mooncake_ray.errors import StaleVersionError, WeightSyncError
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.shard import Shard

__all__ = ["Renewing", "VLLMRank"]


logger = logging.getLogger("mooncake_ray")

_GRACE_S = 10.0  # what an answer takes beside what it waits for


class Renewing(Protocol):
    """What makes an engine's weights of a shard's, see `Renewal`."""

    def prepare(self) -> None: ...

    def apply(self) -> None: ...

    def forget(self) -> None: ...


class VLLMRank:
    """Calls of an update come from the group's thread; `handover` is taken by the worker's."""

    name: ClassVar[str] = "vllm"

    def __init__(
        self, raw: Shard, renewal: Renewing, control: Control | None, *, alone: bool, keep_prefixes: bool, timeout_s: float
    ) -> None:
        """
        Args:
            alone: the engine has no other worker: it goes on as soon as this one has a version.
            control: of the worker that leads; None for the others, and where another process holds the engine and has it take over.
            keep_prefixes: keys and values that old weights made may be used with new ones.
            timeout_s: of each call to the engine.
        """
        self._raw, self._renewal, self._control = raw, renewal, control
        self._alone, self._keep_prefixes, self._timeout_s = alone, keep_prefixes, timeout_s
        self.is_paused = False
        self._placement = Placement.of(self.name, raw.fragments())
        self._update: InPlace | None = None
        self._applied = self._session = False
        self._version: int | None = None
        self._last = -1
        self._poison = ""
        self.handover = Handover()

    def shard(self) -> Shard:
        return self._raw

    @property
    def weight_version(self) -> int | None:
        """Also None when an update was given up: what is served is the version before, but this rank has no copy of it any more."""
        return self._version

    @property
    def poisoned(self) -> str:
        return self._poison

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """vLLM has done it already."""

    def pause(self, mode: PauseMode = "keep", *, timeout_s: float = 60.0) -> None:
        if self._control is not None:
            self._control.pause(mode, timeout_s)
        self.is_paused = True

    def resume(self) -> None:
        """All ranks have the version: it becomes visible."""
        if self._update is not None and self._applied:
            raise WeightSyncError("an update has begun to write: finish it or abort it first")
        self._go_on()
        self._renewal.forget()

    def _go_on(self) -> None:
        if self._control is not None and self.is_paused:
            if not self._keep_prefixes:
                self._control.forget_prefixes(self._timeout_s)
            self._end_session(self._version)
            self._control.resume(self._timeout_s)
        self.is_paused = False

    def start_weight_update(self) -> None:
        if self._update is not None:
            raise WeightSyncError("an update is open already")
        self._update, self._applied = InPlace(self._placement, self._raw.buffers()), False
        if self._control is not None and not self._session:
            try:
                self._control.start(self._timeout_s)
            except WeightSyncError:  # one that was open when this worker joined is in the way
                self._control.finish(None, self._timeout_s)
                self._control.start(self._timeout_s)
            self._session = True

    def prepare_weights(self, update_info: UpdateInfo) -> None:
        update = self._open()
        update.write(update_info)
        self._renewal.prepare()

    def update_weights(self, update_info: UpdateInfo) -> None:
        """Takes over what `prepare_weights` has made."""
        update = self._open()
        if self._poison and not update.complete:
            raise WeightSyncError(f"the engine is poisoned, and only {len(update.whole)} of {len(self._placement)} fragments are new")
        if self._control is None:
            self.handover.give(self._apply, self._timeout_s)
            return
        done = self.handover.leave(self._apply)
        try:
            self._control.update({"timeout_s": self._timeout_s}, self._timeout_s + _GRACE_S)
        finally:
            self.handover.withdraw()
        if done.cancelled():
            raise WeightSyncError("vLLM has updated its weights without this worker")
        done.result(0)

    def finish_weight_update(self, weight_version: int) -> None:
        update = self._open()
        if not self._applied:
            raise WeightSyncError("the new weights were not taken over")
        if weight_version < self._last:
            raise StaleVersionError(f"version {weight_version} comes after version {self._last}")
        if self._version is None and not update.complete:
            raise WeightSyncError(
                f"only {len(update.whole)} of {len(self._placement)} fragments are new, and there is no version that they change"
            )
        self._update, self._poison = None, ""
        self._version = self._last = weight_version
        if self._alone:
            self._go_on()

    def abort_weight_update(self) -> None:
        update, self._update = self._update, None
        self.handover.withdraw()
        self._renewal.forget()
        if update is not None and update.written:
            self._version = None
        if update is not None and self._applied:
            self._poison = "an update was given up after the engine had begun to take it over"
        try:
            self._end_session(None)
        except WeightSyncError as e:
            logger.warning("mooncake_ray: vLLM's update session stays open: %s", e)

    def _end_session(self, version: int | None) -> None:
        if self._control is not None and self._session:
            self._session = False
            self._control.finish(version, self._timeout_s)

    def _apply(self) -> None:
        self._applied = True
        self._renewal.apply()

    def _open(self) -> InPlace:
        if self._update is None:
            raise WeightSyncError("no update is open: start_weight_update comes first")
        return self._update
