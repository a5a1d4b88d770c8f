"""`MooncakeWeightTransferEngine`: what vLLM has in each of its workers for the backend `mooncake_ray`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from mooncake_ray.engines.joining import Joining
from mooncake_ray.engines.membership import Membership
from mooncake_ray.engines.vllm.control import control
from mooncake_ray.engines.vllm.rank import VLLMRank
from mooncake_ray.engines.vllm.raw import RawWeights
from mooncake_ray.engines.vllm.renewal import Renewal
from mooncake_ray.errors import ConfigError, MooncakeRayError, WeightSyncError
from mooncake_ray.weights.meta import ParamMeta

__all__ = ["InitInfo", "MooncakeWeightTransferEngine", "UpdateInfo"]

logger = logging.getLogger("mooncake_ray")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How the engine joins its group."""

    group: str = "default"
    engine: str = "vllm"
    """Its name there."""
    address: str = "auto"
    """Of the Ray cluster, for workers that Ray has not started."""
    control: dict[str, str] = field(default_factory=dict)
    """How a worker reaches its own engine: {"url": ..., "key": ...} or {"actor": name, "namespace": ...}. If empty, whoever calls `sync` must
    call `update_weights` as well, as vLLM's trainer engine does."""
    keep_prefixes: bool = False
    """Whether keys and values that old weights made may be used with new ones."""
    ignore: list[str] = field(default_factory=list)
    """Parameters that the model's loader leaves as they are."""
    update_timeout_s: float = 60.0
    """Seconds, of each step of an update."""
    timeout_s: float = 120.0
    """Seconds, until the group is there, its trainers have joined, and this worker has."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing need be sent: workers have the new weights already."""

    timeout_s: float = 60.0
    """How long a worker waits for its part to be ready."""


class MooncakeWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Joins a `WeightSyncGroup`. From then on the group brings new versions here while vLLM computes, and `update_weights` takes over what is
    ready. An error there does not end vLLM's update session: the group knows of it, and its `sync` raises it."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._rank: VLLMRank | None = None
        self._membership = Membership(self._forget)

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo | Exception:
        """An error is returned, for `init_transfer_engine` to raise."""
        try:
            return super().parse_init_info(init_dict)
        except ValueError as e:
            return e

    def init_transfer_engine(self, init_info: InitInfo | Exception) -> None:
        """Waits until trainers have joined the group. Again, with others, is allowed.

        Raises:
            WeightSyncError: what is wrong, on one of the workers only. Where several raise, vLLM takes the errors of the others for answers to
                what it asks next.
        """
        self.shutdown()
        error = init_info if isinstance(init_info, Exception) else None
        if error is None:
            try:
                self._join(init_info)
            except Exception as e:  # of Ray and of the model's own loader, too
                logger.exception("mooncake_ray: this worker could not join")
                error = e
        world = get_world_group()
        errors: list[str] = [""] * world.world_size
        torch.distributed.all_gather_object(errors, "" if error is None else f"{type(error).__name__}: {error}", group=world.cpu_group)
        if any(errors):
            self.shutdown()
        if any(errors) and world.rank_in_group == world.world_size - 1:
            raise WeightSyncError("; ".join(f"worker {rank}: {e}" for rank, e in enumerate(errors) if e))

    def _join(self, init_info: InitInfo) -> None:
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + get_world_group().rank_in_group

        def adapter(metas: Sequence[ParamMeta]) -> VLLMRank:
            raw = RawWeights(self.model, metas, ignore=init_info.ignore)
            renewal = Renewal(self.model, self.model_config, raw)
            if renewal.layerwise:
                logger.info("mooncake_ray: %d layers of vLLM's model are made anew while it is paused", renewal.layerwise)
            leads = control(init_info.control) if rank == 0 else None
            how = {"keep_prefixes": init_info.keep_prefixes, "timeout_s": init_info.update_timeout_s}
            self._rank = VLLMRank(raw, renewal, leads, alone=parallel.world_size_across_dp == 1, **how)
            return self._rank

        joining = Joining(init_info.group, init_info.engine, init_info.address, init_info.timeout_s)
        self._membership.join(joining, rank, parallel.world_size_across_dp, adapter)

    def start_weight_update(self) -> None:
        """Nothing happens before `update_weights`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        try:
            if self._rank is None:
                raise ConfigError("init_weight_transfer_engine comes first")
            self._rank.handover.take(update_info.timeout_s)
        except MooncakeRayError as e:
            logger.error("mooncake_ray: no new weights: %s", e)
        except Exception:  # of vLLM's own code: its update session must be able to end, and the group is told
            logger.exception("mooncake_ray: new weights could not be taken over")

    def finish_weight_update(self) -> None:
        """All was done by `update_weights`."""

    def shutdown(self) -> None:
        """Leaves the group."""
        self._membership.leave()

    def _forget(self) -> None:
        self._rank = None
