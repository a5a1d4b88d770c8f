"""`MooncakeTrainerWeightTransferEngine`: the trainer's side of the backend `mooncake_ray`, as vLLM's own trainer engines are used."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar

import ray
import torch
from vllm.distributed.weight_transfer.base import ModuleSource as VLLMModuleSource
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, VLLMWeightSyncClient, WeightSource

from mooncake_ray.engines.vllm.plugin import BACKEND
from mooncake_ray.errors import ConfigError, SyncAbortedError
from mooncake_ray.sync.group import WeightSyncGroup
from mooncake_ray.weights.shard import Shard
from mooncake_ray.weights.source import ModuleSource, StateDictSource

__all__ = ["MooncakeTrainerInitInfo", "MooncakeTrainerWeightTransferEngine"]

logger = logging.getLogger("mooncake_ray")

_LOOK_S = 0.01


@dataclass
class MooncakeTrainerInitInfo(TrainerInitInfo):
    """Ray must be connected in this process."""

    backend: ClassVar[str] = BACKEND

    world: int = 1
    """Ranks of the trainers."""
    group: str = "default"
    """Begun if it is not there."""
    engine: str = "vllm"
    """The engine's name in the group."""
    mode: str = "auto"
    """How versions move: "p2p", "nccl", "delta" or "auto"."""
    ignore: list[str] = field(default_factory=list)
    """Parameters that the engine's loader leaves as they are."""
    keep_prefixes: bool = True
    """Of `worker.InitInfo`; who calls `send_weights` pauses the engine himself, and then says what becomes of its caches."""
    timeout_s: float = 300.0


class MooncakeTrainerWeightTransferEngine(TrainerWeightTransferEngine[MooncakeTrainerInitInfo]):
    """On every trainer rank. `send_weights` publishes what the ranks hold, lets workers fetch it while vLLM computes on, and then has them take
    it over through the client. Several ranks send at once, each what it owns; nothing is gathered, if `source` is a module or a `Shard`.

    Attributes:
        version: The last that was sent; -1: none.
        report: What the last sync did; None on ranks other than 0.
    """

    init_info_cls = MooncakeTrainerInitInfo

    def __init__(self, init_info: MooncakeTrainerInitInfo, *, client: VLLMWeightSyncClient, source: Shard | WeightSource) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._info = init_info
        self._shard = _shard(source, init_info.rank, init_info.world)
        self._group = WeightSyncGroup(init_info.group, mode=init_info.mode)
        self._member = self._group.trainer(self._shard, init_info.rank, init_info.world, timeout_s=init_info.timeout_s)
        self.version, self.report = -1, None

    @classmethod
    def trainer_init(
        cls, init_info: MooncakeTrainerInitInfo, *, client: VLLMWeightSyncClient, source: Shard | WeightSource | None = None
    ) -> MooncakeTrainerWeightTransferEngine:
        """On every trainer rank. Rank 0 has the engine's workers join.

        Args:
            source: the weights: vLLM's `ModuleSource`, any other `WeightSource` (whose tensors are then copied), or a `Shard`.

        Raises:
            ConfigError: there is no source.
            SyncTimeoutError: not all have joined in time.
        """
        if source is None:
            raise ConfigError("the backend needs a source of weights")
        self = cls(init_info, client=client, source=source)
        if self.is_sender:
            client.init_weight_transfer_engine(
                {
                    "group": init_info.group,
                    "engine": init_info.engine,
                    "address": ray.get_runtime_context().gcs_address,
                    "keep_prefixes": init_info.keep_prefixes,
                    "ignore": list(init_info.ignore),
                    "update_timeout_s": init_info.timeout_s,
                    "timeout_s": init_info.timeout_s,
                }
            )
            if (version := self._group.status().version) >= 0:  # an engine that comes later
                self._deliver(version)
        return self

    def send_weights(self) -> None:
        """On every trainer rank; they may train on when it returns.

        Raises:
            WeightSyncError: as `WeightSyncGroup.sync`; the engine serves what it did before. SyncAbortedError, if it failed while it took over.
            What the client raises.
        """
        if isinstance(self._shard, _Copied):
            self._shard.refresh()
        self.version = self._member.publish(timeout_s=self._info.timeout_s)
        if self.is_sender:
            self._deliver(self.version)

    def _deliver(self, version: int) -> None:
        done = self._group.async_sync(version, timeout_s=self._info.timeout_s)
        if self._until_committing(done, version):
            self.client.start_weight_update()
            label = None
            try:
                self.client.update_weights({"timeout_s": self._info.timeout_s})
                self.report = ray.get(done, timeout=self._info.timeout_s)
                label = None if self._info.engine in self.report.lost else str(version)
            finally:
                self.client.finish_weight_update(label)
        else:
            self.report = ray.get(done, timeout=self._info.timeout_s)
        if why := self.report.lost.get(self._info.engine):
            raise SyncAbortedError(f"version {version}: {why}")

    def _until_committing(self, done: ray.ObjectRef, version: int) -> bool:
        """Whether the engine is to take it over now; False: the sync ended before that."""
        while True:
            ready, _ = ray.wait([done], timeout=_LOOK_S)
            if ready:
                return False
            update = self._group.status().update
            if update is not None and update.phase == "committing" and update.version == version and self._info.engine in update.engines:
                return True

    def shutdown(self) -> None:
        """This rank leaves the group."""
        self._member.close()


class _Copied(StateDictSource):
    """What a `WeightSource` yields. Where all ranks hold all, each keeps its share: iterating it is a collective, so all ranks do."""

    def __init__(self, source: WeightSource, rank: int, world: int) -> None:
        self._source, self._rank, self._world = source, rank, world
        self._kept: dict[str, torch.Tensor] = {}
        self.refresh()
        super().__init__(self._kept)

    def refresh(self) -> None:
        shared = self._source.held_names() is None
        for n, (name, tensor) in enumerate(self._source):
            if shared and n % self._world != self._rank:
                continue
            if name in self._kept:
                self._kept[name].copy_(tensor.detach())
            else:
                self._kept[name] = tensor.detach().clone()


def _shard(source: Any, rank: int, world: int) -> Shard:
    if isinstance(source, Shard):
        return source
    module = getattr(source, "_module", None) if type(source) is VLLMModuleSource else None
    return _Copied(source, rank, world) if module is None else ModuleSource(module)
