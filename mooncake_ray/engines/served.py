"""`Served`: which version an engine's rank has, in place, and whether it may be served."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mooncake_ray.engines.base import UpdateInfo
from mooncake_ray.engines.beside import Beside
from mooncake_ray.engines.in_place import InPlace
from mooncake_ray.errors import StaleVersionError, WeightSyncError
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.shard import Shard, fitting

__all__ = ["Served"]


class Served:
    """What `EngineAdapter` says of updates, but for the pause and for who writes: these are the engine's. Not thread-safe.

    Attributes:
        version: None before the first update, and while it is poisoned.
        poisoned: Why it must not be served; "" if it may.
    """

    def __init__(self, name: str, shard: Shard, module: torch.nn.Module | None = None, version: int | None = None) -> None:
        """
        Args:
            version: of what is there now.
            module: whose weights the shard is of, if they may change places with others; see `Beside`.

        Raises:
            PlanError: the shard's fragments do not fit its buffers.
        """
        self.shard = shard
        self.version = version
        self.poisoned = ""
        self.placement = Placement.of(name, shard.fragments())
        self._last = -1 if version is None else version
        self._update: InPlace | None = None
        self._beside = None if module is None else Beside(module, self.placement, shard)
        self._prepared: tuple[UpdateInfo, InPlace] | None = None
        fitting(self.placement, shard.buffers())

    @property
    def is_open(self) -> bool:
        return self._update is not None

    @property
    def has_written(self) -> bool:
        """Whether the update that is open may have."""
        return self._update is not None and self._update.written

    def open(self) -> None:
        """Raises as `EngineAdapter.start_weight_update`."""
        if self._update is not None:
            raise WeightSyncError("an update is open already")
        self._update = InPlace(self.placement, self.shard.buffers())
        self._prepared = None

    def prepare(self, update_info: UpdateInfo) -> None:
        """Makes it ready beside what is served, if it can be. Raises as `check`, or what reading the pieces raises."""
        self.check(update_info)
        if self._beside is None or (self.poisoned and "apply" in update_info):  # what is there now is no base
            return
        if (made := self._beside.prepare(update_info)) is not None:
            self._prepared = update_info, made

    def check(self, update_info: UpdateInfo) -> None:
        """Raises as `InPlace.check`."""
        self._need().check(update_info)

    def look_again(self) -> None:
        """In the thread that is going to write: the engine may have put other memory in the place of its weights since the update was opened.

        Raises:
            PlanError: one is gone, or lies otherwise in its memory.
        """
        update = self._need()
        if self._beside is not None and self._prepared is not None and not self._beside.fits():
            self._prepared = None
        buffers = self.shard.buffers()
        if not update.written and update.addresses != {name: tensor.data_ptr() for name, tensor in buffers.items()}:
            self._update = InPlace(self.placement, buffers)

    def write(self, update_info: UpdateInfo) -> None:
        """Raises as `EngineAdapter.update_weights`."""
        update = self._need()
        if self._beside is not None and self._prepared is not None and self._prepared[0] is update_info:
            self._update, self._prepared = self._prepared[1], None
            self._beside.exchange()
            return
        try:
            update.write(update_info)
        except BaseException as e:
            if update.written:
                self.fail(e)
            raise

    def check_version(self, version: int) -> None:
        """Whether an update may make it that. Raises as `EngineAdapter.finish_weight_update`."""
        if isinstance(version, bool) or not isinstance(version, int):
            raise WeightSyncError(f"a version is an integer, got {version!r}")
        if version < (oldest := self._last + (not self.poisoned)):
            raise StaleVersionError(f"version {version} comes after version {self._last}; the next is {oldest}")

    def finish(self, version: int, derive: Callable[[], None] | None = None) -> None:
        """`derive`: makes what is derived from weights, if some were written. Raises as `EngineAdapter.finish_weight_update`, and what `derive`
        does, which poisons."""
        update = self._need()
        self.check_version(version)
        if self.poisoned and not update.complete:
            written = f"{len(update.whole)} of {len(self.placement)} fragments"
            raise WeightSyncError(f"the engine is poisoned, and only {written} are written anew")
        if update.written and derive is not None:
            try:
                derive()
            except BaseException as e:
                self.fail(e)
                raise
        self._update, self._prepared, self.poisoned = None, None, ""
        self.version = self._last = version

    def abort(self) -> None:
        """Ends an update, which poisons if it has written. Nothing happens if none is open."""
        if self.has_written:
            self.fail("it was aborted")
        self._update = self._prepared = None

    def forget(self) -> None:
        """Somebody else has written other weights: they are whole, and of no version that is known here."""
        self.version = None

    def fail(self, why: object) -> None:
        """Ends an update that is no whole one, here or with another rank."""
        reason = f"{type(why).__name__}: {why}" if isinstance(why, BaseException) else why
        self.poisoned = f"an update failed after it had begun to write: {reason}"
        self.version = self._update = None

    def _need(self) -> InPlace:
        if self._update is None:
            raise WeightSyncError("no update is open: start_weight_update comes first")
        return self._update
