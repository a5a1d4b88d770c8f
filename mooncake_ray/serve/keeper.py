"""`Keeper`: an engine of a `WeightSyncGroup` that serves nobody, and stores versions that the group is brought to."""

from __future__ import annotations

import logging
import threading

import torch

import mooncake_ray
from mooncake_ray.engines.torch_module import TorchModuleEngine
from mooncake_ray.errors import ConfigError, MooncakeRayError, SnapshotNotFoundError, StaleVersionError
from mooncake_ray.serve.settings import Settings
from mooncake_ray.sync.group import WeightSyncGroup
from mooncake_ray.weights.source import StateDictSource

__all__ = ["Keeper"]

logger = logging.getLogger("mooncake_ray")

_LOOK_EVERY_S, _AGAIN_S = 0.1, 10.0  # the latter after what a full disk, say, has ended
_JOIN_S = 60.0


class Keeper:
    """Holds the whole model in this process's memory, and is brought to each version as any other engine. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            ValueError: there is no group of that name.
            SyncTimeoutError: its trainers have not joined in time.
        """
        if settings.group is None:
            raise ConfigError("no group is named whose versions could be stored")
        mooncake_ray.install()
        self._store = settings.snapshots()
        group = WeightSyncGroup.find(settings.group)
        metas = group.metas(timeout_s=_JOIN_S)
        self._shard = StateDictSource({m.name: torch.zeros(m.shape, dtype=getattr(torch, m.dtype)) for m in metas})
        self._engine = TorchModuleEngine(torch.nn.Module(), shard=self._shard)
        self._member = group.engine(self._engine, settings.keeper, timeout_s=_JOIN_S)
        self._saving = threading.Lock()
        self._every, self._end = settings.store_every, threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="mooncake_ray.serve-keeper", daemon=True)
        if self._every is not None:
            self._watcher.start()

    @property
    def version(self) -> int | None:
        """That it holds; None before the first, and while an update that failed is repaired."""
        return self._engine.weight_version

    def store(self, version: int | None = None) -> int:
        """Stores the version that the group is at, which must be this one if one is named. Engines are brought to no other meanwhile.

        Raises:
            SnapshotNotFoundError: the group is at another version, or at none yet.
            StaleVersionError: it is stored already, or a newer one is.
        """
        with self._saving, self._engine.serving() as held:
            if held is None or version not in (None, held):
                raise SnapshotNotFoundError(f"the group is at version {held}, not at {'any' if version is None else version}")
            self._store.save(held, self._shard)
            return held

    def close(self) -> None:
        """Leaves the group."""
        self._end.set()
        if self._watcher.is_alive():
            self._watcher.join()
        self._member.close()

    def _watch(self) -> None:
        """Stores every so many versions by itself."""
        last, pause = self._store.latest(), _LOOK_EVERY_S
        while not self._end.wait(pause):
            pause = _LOOK_EVERY_S
            held = self.version
            if held is None or (last is not None and held < last + self._every):
                continue
            try:
                last = self.store()
            except (StaleVersionError, SnapshotNotFoundError):
                last = max(held, last or 0)
            except (MooncakeRayError, OSError) as e:
                pause = _AGAIN_S
                logger.warning("mooncake_ray: version %s cannot be stored in %s: %s", held, self._store.directory, e)
