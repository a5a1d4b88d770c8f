"""`Joining`: how a process of an inference engine, which Ray need not have started, becomes a rank of an engine in a `WeightSyncGroup`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import ray

from mooncake_ray.errors import ConfigError, SyncTimeoutError
from mooncake_ray.sync.group import WeightSyncGroup
from mooncake_ray.weights.meta import ParamMeta

if TYPE_CHECKING:
    from mooncake_ray.engines.base import EngineAdapter
    from mooncake_ray.sync.engine import Engine

__all__ = ["Joining"]

_AGAIN_S = 0.2


@dataclass(frozen=True)
class Joining:
    """Plain values, so that they can be sent to an engine as JSON."""

    group: str = "default"
    engine: str = "engine"
    """Its name in the group."""
    address: str = "auto"
    """Of the Ray cluster, for processes that Ray has not started: "host:6379"."""
    timeout_s: float = 120.0
    """Until the group is there, its trainers have joined, and this rank has."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Joining:
        """Raises ConfigError for what it does not know, or what is of another type."""
        known = {f.name: type(f.default) for f in fields(cls)}
        if strange := sorted(set(values) - set(known)):
            raise ConfigError(f"{', '.join(strange)}: an engine joins a group by {', '.join(known)}")
        for name, value in values.items():
            if not isinstance(value, (int, float) if known[name] is float else known[name]) or isinstance(value, bool):
                raise ConfigError(f"{name} is a {known[name].__name__}, got {value!r}")
        return cls(**values)

    def join(self, rank: int, world: int, adapter: Callable[[Sequence[ParamMeta]], EngineAdapter]) -> Engine:
        """Connects this process to Ray if it is not, and joins. Threads of this process then stage versions; the adapter takes them over.

        Args:
            adapter: makes it; gets the tensors of the model, whole, as trainers have them.

        Raises:
            SyncTimeoutError: not done in time.
            ConfigError: there is no Ray cluster at that address, or this process is connected to another.
            What `adapter` raises.
        """
        end = time.monotonic() + self.timeout_s
        if ray.is_initialized():
            here = ray.get_runtime_context().gcs_address
            if self.address not in ("auto", here):
                raise ConfigError(f"this process is connected to the Ray cluster at {here}, and cannot be to that at {self.address}")
        else:
            try:
                ray.init(address=self.address, log_to_driver=False, configure_logging=False)
            except ConnectionError as e:
                raise ConfigError(f"no Ray cluster at {self.address!r}: {e}") from None
        group = self._found(end)
        made = adapter(group.metas(timeout_s=max(1.0, end - time.monotonic())))
        return group.engine(made, self.engine, rank, world, timeout_s=max(1.0, end - time.monotonic()))

    def _found(self, end: float) -> WeightSyncGroup:
        while True:
            try:
                return WeightSyncGroup.find(self.group)
            except ValueError as e:
                if time.monotonic() > end:
                    raise SyncTimeoutError(f"there is no group {self.group!r} after {self.timeout_s:g} s: {e}") from None
                time.sleep(_AGAIN_S)
