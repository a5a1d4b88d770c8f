"""`Settings`: how an endpoint serves. Checked when made, so that a mistake is an error in the driver and not in a replica."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from mooncake_ray.errors import ConfigError
from mooncake_ray.weights.snapshot import SnapshotStore

__all__ = ["Settings"]

_ALL = 1 << 62


@dataclass(frozen=True)
class Settings:
    """The same for all replicas. May be pickled."""

    store: str
    """Directory of a `SnapshotStore` or of a `DeltaLog`, which all replicas' nodes see."""
    group: str | None = None
    """Name of a `WeightSyncGroup` whose versions may be stored. A further process holds the model, as one more engine of the group."""
    store_every: int | None = None
    """Every so many of the group's versions are stored without being asked for; None: none are."""
    keeper: str = "endpoint"
    """What that engine is called in the group."""
    files: str | None = None
    """Directory with config.json, tokenizer files and the like, given out with every version that has none of its own of that name. Names are
    letters, digits, '.', '_' and '-'; other files are left out."""
    publish_token: str | None = field(default=None, repr=False)
    """Who brings it may publish and store versions; None: nobody may."""
    read_token: str | None = field(default=None, repr=False)
    """Who brings it (or the other one) may read; None: everybody may."""
    keep: int | None = None
    """So many of the newest versions stay, besides those that are pinned or being read; the others are deleted. None: nothing is deleted here,
    but by whoever else writes versions."""
    host: str | None = None
    """What clients reach a replica's data port by; None: the node's address in Ray."""
    listen: str | None = None
    """Address that the data port listens on; None: what `host` says, if that is one of this machine's, else the node's address in Ray."""
    port: int = 0
    """Of the data port; 0: any free one. One replica a node if it is not."""
    max_transfers: int = 64
    """That a replica's data port makes at the same time."""
    max_waiting: int = 256
    """Requests that wait for one of those to end. Further ones are told to come again."""
    wait_s: float = 30.0
    """How long one waits, before it is told so, too."""
    idle_s: float = 30.0
    """How long a reader may take nothing before its transfer is given up, and how long an idle connection stays open."""
    link_s: float = 900.0
    """How long an address of the data port is good for."""
    linger_s: float = 30.0
    """How long a version stays after it was last asked for, though nothing pins it: between two requests of one reader."""
    max_lease_s: float = 24 * 3600.0
    """The longest that a pin lasts without being renewed."""
    max_poll_s: float = 60.0
    """The longest that a request waits for a version."""
    max_stream_s: float = 3600.0
    """The longest that a stream of events lasts."""
    max_upload_bytes: int = 1 << 40
    max_ref_bytes: int = 1 << 30
    """Of tensors that a replica keeps in the pool for readers in the cluster; it evicts those that were not asked for longest."""

    def __post_init__(self) -> None:
        for name in ("keep", "store_every", "max_transfers", "max_upload_bytes", "max_ref_bytes"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("wait_s", "idle_s", "link_s", "linger_s", "max_lease_s", "max_poll_s", "max_stream_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting must not be negative, got {self.max_waiting}")
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port must be from 0 to 65535, got {self.port}")
        if self.store_every is not None and self.group is None:
            raise ConfigError(f"store_every is {self.store_every}, and no group is named whose versions could be stored")
        if self.files is not None and not Path(self.files).is_dir():
            raise ConfigError(f"files: there is no directory {self.files}")
        for name in ("publish_token", "read_token"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty; None means none")

    def snapshots(self) -> SnapshotStore:
        """The versions, of which only those stay that are to be kept."""
        return SnapshotStore(self.store, keep=self.keep or _ALL)
