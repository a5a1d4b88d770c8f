"""`Desk`: what a replica has open, for whatever answers requests."""

from __future__ import annotations

from mooncake_ray.serve.settings import Settings
from mooncake_ray.weights.snapshot import SnapshotStore

__all__ = ["Desk"]


class Desk:
    """One of a replica. Thread-safe. Ends with `close`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store = SnapshotStore(settings.store, keep=settings.keep)

    def close(self) -> None:
        pass
