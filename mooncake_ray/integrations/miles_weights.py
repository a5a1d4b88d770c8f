"""Miles' and slime's weight update over the pools: no gathering, no conversion, and engines pause only to take over what they have already.

    --custom-megatron-init-path mooncake_ray.integrations.miles_weights.install
    --sglang-custom-weight-loader mooncake_ray.engines.sglang.load

The first is a hook of theirs that runs in each trainer rank before the trainer makes its weight updater. Here it puts `PoolWeightUpdater` in
the place of the updater that broadcasts, which is what `--update-weight-transfer-mode broadcast`, the default, asks for. The ranks of the
trainers and of the servers are those of one `WeightSyncGroup`; what each rank holds goes from its node's pool to who wants it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import ray
import torch

from mooncake_ray.errors import ConfigError, WeightSyncError
from mooncake_ray.sync.group import WeightSyncGroup
from mooncake_ray.sync.trainer import Trainer
from mooncake_ray.weights.shard import Shard

__all__ = ["Attachable", "PoolWeightUpdater", "install"]

_FRAMEWORKS = ("miles", "slime")
_BROADCASTS = "UpdateWeightFromDistributed"
_PAUSES = ("retract", "in_place", "abort")


class Attachable(Protocol):
    """A handle of a server, as `engines.sglang.SGLangEngine` is one."""

    def attach(self, group: WeightSyncGroup, name: str, *, pause: Any, keep: Any, flush: bool, timeout_s: float) -> None:
        """Makes the server's ranks those of the engine `name` in the group."""


class PoolWeightUpdater:
    """One trainer rank's end of an update, with the methods that the trainers call. Every rank makes one, and calls each method."""

    def __init__(
        self,
        args: Any,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        weights_getter: Callable[[], Mapping[str, torch.Tensor]] | None = None,
        *,
        model_name: str = "",
        quantization_config: Mapping[str, Any] | None = None,
        is_lora: bool = False,
        shard: Shard | None = None,
        engine_of: Callable[[str], Attachable] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """
        Args:
            args: theirs; what is read is `pause_generation_mode`, `hf_checkpoint` and `sglang_api_key`.
            model: the rank's chunks. They are read in place during `update_weights`.
            weights_getter, model_name: not used.
            shard: what this rank holds; by default the chunks' parameters, as boxes of Hugging Face's tensors.
            engine_of: makes a handle of a server's URL; by default an `SGLangEngine`.
            timeout_s: of an update, and of each engine's joining.

        Raises:
            ConfigError: adapters (LoRA) or quantized engines are asked for, or a pause that there is not.
            PlanError: a parameter has no counterpart in the Hugging Face model.
        """
        if is_lora:
            raise ConfigError("weights through the pools are whole models: adapters (LoRA) need the updater of the framework")
        if quantization_config:
            raise ConfigError(f"engines that quantize ({quantization_config.get('quant_method')}) need the updater of the framework")
        self._mode = getattr(args, "pause_generation_mode", "retract")
        if self._mode not in _PAUSES:
            raise ConfigError(f"pause_generation_mode is {self._mode!r}, expected one of {', '.join(_PAUSES)}")
        self.args = args
        self.weight_version = 0
        self.multi_lora_adapters = None
        self._timeout_s = timeout_s
        self._shard = shard if shard is not None else _megatron(args, model)
        self._engine_of = engine_of or self._sglang
        self._joined: tuple[WeightSyncGroup, Trainer] | None = None
        self._attached: set[str] = set()  # actors, by ID
        self._fresh = False
        self._metrics: dict[str, float] = {}

    def is_rollout_engines_fresh(self) -> bool:
        return self._fresh

    def mark_engine_connection_stale(self) -> None:
        self._fresh = False

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any = None,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        all_engine_actors: Sequence[Any] | None = None,
    ) -> None:
        """Joins the group, and has the engines that are new join it. They are brought to the group's version by themselves. Nothing is locked:
        updates of the group are one at a time.

        Args:
            rollout_engines: the actors that started the servers.
            engine_gpu_counts, engine_gpu_offsets, all_engine_actors: not used: each rank of a server says what it wants.

        Raises:
            WeightSyncError: an engine could not join; on every rank.
        """
        self._fresh = False
        group = self._join()
        self.weight_version = self._together(lambda: self._attach(group, rollout_engines))
        self._fresh = True

    def update_weights(self) -> None:
        """Publishes what this rank holds, and returns when every engine serves it.

        Raises:
            WeightSyncError: it did not come to that, on every rank; engines serve what they served, or all but those that were lost serve it.
                The next update may be tried.
        """
        if self._joined is None:
            raise ConfigError("update_weights before connect_rollout_engines")
        (group, member), version = self._joined, self.weight_version + 1
        member.publish(version, timeout_s=self._timeout_s)
        self.weight_version = version
        self._together(lambda: self._sync(group, version))

    def pop_metrics(self) -> dict[str, float]:
        """Those of the last update (of rank 0), once: seconds and bytes."""
        out, self._metrics = self._metrics, {}
        return out

    def close(self) -> None:
        """Leaves the group; what this rank has published is gone."""
        if self._joined is not None:
            self._joined[1].close()
            self._joined = None

    def _join(self) -> WeightSyncGroup:
        if self._joined is None:
            group = WeightSyncGroup(f"trainers-of-{ray.get_runtime_context().get_job_id()}")
            self._joined = group, group.trainer(self._shard, *_place(), timeout_s=self._timeout_s)
        return self._joined[0]

    def _attach(self, group: WeightSyncGroup, engines: Sequence[Any]) -> int:
        """Returns the newest version that anybody has, as engines may that outlived other trainers: the next is newer."""
        pause, keep = ("abort", "retract") if self._mode == "abort" else ("keep", self._mode)
        here = {actor._actor_id.hex(): actor for actor in engines}
        self._attached &= here.keys()
        for id, actor in here.items():
            if id in self._attached:
                continue
            engine = self._engine_of(ray.get(actor.__ray_call__.remote(_url), timeout=self._timeout_s))
            engine.attach(group, _name(id), pause=pause, keep=keep, flush=keep != "in_place", timeout_s=self._timeout_s)
            self._attached.add(id)
        status = group.status()
        return max(self.weight_version, status.published, status.version, *(engine.version for engine in status.engines.values()))

    def _sync(self, group: WeightSyncGroup, version: int) -> None:
        report = group.sync(version, timeout_s=self._timeout_s)
        if report.lost:
            why = "; ".join(f"{name}: {reason}" for name, reason in report.lost.items())
            raise WeightSyncError(f"version {version} is not served by {len(report.lost)} engines: {why}")
        seconds = {name: getattr(report, f"{name}_s") for name in ("publish", "plan", "stage", "commit", "pause")}
        self._metrics = {f"perf/update_weights_{name}_s": value for name, value in seconds.items()}
        self._metrics["perf/update_weights_wire_bytes"] = float(report.nbytes)

    def _together(self, what: Callable[[], Any]) -> Any:
        """Rank 0 does it, and every rank hears how it ended: none goes on, or waits, alone. Returns what it returned."""
        rank, world = _place()
        error: Exception | None = None
        said: list[Any] = [None, ""]  # the result, and the error
        if rank == 0:
            try:
                said[0] = what()
            except Exception as e:
                error = e
                said[1] = f"{type(e).__name__}: {e}"
        if world > 1:
            torch.distributed.broadcast_object_list(said, src=0, group=_gloo(), device=torch.device("cpu"))
        if error is not None:
            raise error
        if said[1]:
            raise WeightSyncError(f"rank 0: {said[1]}")
        return said[0]

    def _sglang(self, url: str) -> Attachable:
        from mooncake_ray.engines.sglang import SGLangEngine

        return SGLangEngine(url, api_key=getattr(self.args, "sglang_api_key", None) or "")


def install(args: Any) -> None:
    """Puts the updater in its place, in this process. Idempotent.

    Raises:
        ConfigError: the arguments ask for another way of updating, or no trainer of Miles or slime is loaded.
    """
    if getattr(args, "colocate", False):
        raise ConfigError("--colocate updates engines that share the trainers' devices; weights through the pools are for others")
    mode = getattr(args, "update_weight_transfer_mode", None) or getattr(args, "update_weight_transport", "broadcast")
    if mode not in ("broadcast", "nccl"):
        raise ConfigError(f"weights are asked to go by {mode!r}; through the pools they go in place of the broadcast, which is the default")
    found = [sys.modules[name] for f in _FRAMEWORKS if (name := f"{f}.backends.megatron_utils.actor") in sys.modules]
    found = [module for module in found if hasattr(module, _BROADCASTS)]
    if not found:
        raise ConfigError(
            f"no trainer is loaded that has {_BROADCASTS}, of {' or '.join(_FRAMEWORKS)}: this belongs in a trainer's process"
        )
    for module in found:
        setattr(module, _BROADCASTS, PoolWeightUpdater)


def _name(actor: str) -> str:
    """Of an actor's engine, and of no other's, wherever it is among them: two of one name would take each other's place again and again."""
    return f"engine-{actor[:12]}"


def _url(actor: Any) -> str:
    """In the process of an engine's actor: where its server is."""
    return f"http://{actor.server_host}:{actor.server_port}"


def _megatron(args: Any, model: torch.nn.Module | Sequence[torch.nn.Module]) -> Shard:
    from transformers import AutoConfig

    from mooncake_ray.weights.layouts.megatron import MegatronSource

    return MegatronSource(model, AutoConfig.from_pretrained(args.hf_checkpoint, trust_remote_code=True))


def _place() -> tuple[int, int]:
    dist = torch.distributed
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _gloo() -> Any:
    """The group of all ranks over Gloo that the trainers have; that of everything where there are none."""
    for framework in _FRAMEWORKS:
        module = sys.modules.get(f"{framework}.utils.distributed_utils")
        if module is not None:
            return module.get_gloo_group()
    return None
