"""verl's trainers give their weights to verl's rollout workers through the pools: a checkpoint engine named `mooncake_ray`.

    actor_rollout_ref.rollout.checkpoint_engine.backend=mooncake_ray
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=mooncake_ray.integrations.verl_checkpoint

Every trainer rank sees the whole model pass, as verl has it, and writes its share of the buckets into the pool of its node: each byte is
written once, whatever the number of ranks. Rollout workers read them from there; those on one node share a copy.

Keys of `engine_kwargs.mooncake_ray`:

- `timeout_s` (600): of one update.
- `staging`: "version" (the default): a worker has the whole version on its node, with right checksums, and knows that all others do, before it
  hands on the first tensor; so if anybody dies before that, everybody serves on what it has. "buckets": tensors are handed on as they come, and
  at most `window` (4) buckets of each trainer are in the pools.
- `chunk_megabytes` (16): bytes of a bucket, at most verl's own.
- `rollout_dtype` (null): floating-point tensors are cast to it. By default they go as they are.
- `delta` (false): verl's `delta_flush` format, for what takes it (see verl's `delta_sharded`): all of each tensor at first, and what changed
  from then on, while every worker has the version before. Trainers keep a version in their pools to compare with.
- `device` ("cpu"): where tensors are handed on.
- `keep` (false): workers keep the last version, for `get_weights`, until all have the next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray
import torch

from mooncake_ray.data.bits import named_dtype
from mooncake_ray.errors import ConfigError, PlanError
from mooncake_ray.integrations.verl_weights.board import live_board
from mooncake_ray.integrations.verl_weights.flushes import Flush
from mooncake_ray.integrations.verl_weights.messages import Topology, Update
from mooncake_ray.integrations.verl_weights.receiver import Receiver
from mooncake_ray.integrations.verl_weights.seat import Seat
from mooncake_ray.integrations.verl_weights.sender import Sender
from mooncake_ray.integrations.verl_weights.stream import ALIGNMENT

try:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache
    from verl.workers.rollout.utils import ensure_async_iterator
except ImportError as e:
    raise ImportError(f"the checkpoint engine for verl needs verl 0.9, and what its checkpoint_engine imports: {e}") from e

__all__ = ["BACKEND", "MooncakeRayCheckpointEngine"]

BACKEND = "mooncake_ray"
_STAGING = ("version", "buckets")


@CheckpointEngineRegistry.register(BACKEND)
class MooncakeRayCheckpointEngine(CheckpointEngineWithCache):
    """One rank's end: of a trainer, or of a rollout worker. For one update at a time, and verl's one event loop."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        timeout_s: float = 600.0,
        staging: str = "version",
        window: int = 4,
        chunk_megabytes: float = 16,
        rollout_dtype: str | torch.dtype | None = None,
        keep: bool = False,
        delta: bool = False,
        device: str = "cpu",
    ) -> None:
        """Takes what verl passes to its engines, and the keys above. Raises ConfigError."""
        if staging not in _STAGING:
            raise ConfigError(f"staging is {staging!r}, expected one of {', '.join(_STAGING)}")
        if timeout_s <= 0 or window < 1:
            raise ConfigError(f"timeout_s and window must be positive, got {timeout_s} and {window}")
        whole = staging == "version"
        if (keep or delta) and not whole:
            raise ConfigError("keep and delta need staging='version': by buckets there is never a whole version")
        if keep and delta:
            raise ConfigError("keep and delta exclude each other: of what changed there is no whole version to keep")
        size = int(min(bucket_size, chunk_megabytes * (1 << 20))) // ALIGNMENT * ALIGNMENT
        if size < ALIGNMENT:
            raise ConfigError(f"buckets of {bucket_size} bytes, at most {chunk_megabytes} MiB, are too small")
        self.wire_format = "delta_flush" if delta else "named_tensors"  # verl reads it
        self._timeout_s, self._delta = timeout_s, delta
        self._sender = Sender(size, None if whole else window, _dtype(rollout_dtype), delta)
        self._receiver = Receiver(size, bucket_size, whole, torch.device(device), keep)
        self._rank = -1
        self._topology: Topology | None = None

    # ---- verl's manager calls these, in this order

    def prepare(self) -> dict[str, Any]:
        """Lets go of what an update that failed has left. Returns what `build_topology` needs to know of this rank."""
        self._sender.forget()
        before = self._topology
        return {
            "actor": ray.get_runtime_context().get_actor_id() or "",
            "number": 0 if before is None else before.update.number,
            "board": None if before is None else before.board,
            "held": max(self._sender.held, self._receiver.held),
        }

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Numbers the update, and finds or starts the actor through which its ranks hear of each other.

        Raises:
            PlanError: there are no trainers, no rollout workers, or not as much metadata as there are of both.
        """
        if min(actor_wg_world_size, rollout_world_size) < 1 or len(metadata) != actor_wg_world_size + rollout_world_size:
            raise PlanError(
                f"metadata of {len(metadata)} ranks for {actor_wg_world_size} trainers and {rollout_world_size} rollout workers"
            )
        actors = tuple(m["actor"] for m in metadata)
        number = 1 + max(m["number"] for m in metadata)
        held = {m["held"] for m in metadata}
        base = held.pop() if len(held) == 1 else -1
        update = Update(number, actors[:actor_wg_world_size], actors[actor_wg_world_size:], base)
        topology = Topology(update, live_board([m["board"] for m in metadata]))

        def of(world: int) -> dict[str, list[Any]]:
            return {"rank": list(range(world)), "topology": [topology] * world}

        return of(actor_wg_world_size), of(rollout_world_size)

    def init_process_group(self, rank: int, topology: Topology) -> None:
        """Takes part in the next update, as that rank of the trainers or of the rollout workers. There is no group to be made: nobody waits."""
        self._rank, self._topology = rank, topology

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Writes this rank's share. When it returns the weights may change: what rollout workers still read is a copy.

        Args:
            weights: All of the model's tensors with their names, the same on each rank, in the same order; iterated once, on this thread, and
                to its end, whatever becomes of the update.
            global_steps: The version.

        Returns metrics: `checkpoint_engine/payload_mbytes` (this rank's) and seconds.

        Raises:
            PlanError: a name came twice, or ranks were given different tensors; no rollout worker has changed.
            StoreFullError: the pool had no room in time.
            SyncTimeoutError, SyncAbortedError: others did not come along, or died.
        """
        seat = Seat(self._joined(), "trainer", self._rank, self._timeout_s)
        return await self._sender.send(seat, ensure_async_iterator(weights), global_steps)

    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]] | Iterator[Flush]:
        """Yields all tensors in the order in which they were sent. A tensor is private (copy-on-write) memory that stays valid as long as it
        lives; a bucket's memory is free again when none of its tensors does. With `delta`, an iterator, not asynchronous, of verl's flushes.

        Raises:
            StaleVersionError: what was sent is another version than `global_steps`.
            SyncAbortedError: somebody died, or could not go on, before anything was yielded.
            SyncTimeoutError: not done in time.
            ChecksumError: bytes that arrived are not the ones that were sent.
        """
        seat = Seat(self._joined(), "rollout", self._rank, self._timeout_s)
        return self._receiver.flushes(seat, global_steps) if self._delta else self._receiver.named(seat, global_steps)

    def get_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The last version once more, from this node's pool, as it came; copies, a bucket at a time.

        Raises:
            ConfigError: the engine does not keep versions (`keep`), or there is none yet.
        """
        return self._receiver.again()

    def finalize(self) -> None:
        """Everybody has the version: what this rank wrote of it may go, or is what the next is compared with."""
        if self._topology is not None:
            self._sender.settle(self._topology.update.number)

    def _joined(self) -> Topology:
        if self._topology is None:
            raise ConfigError("this rank takes part in no update: init_process_group was not called")
        return self._topology


def _dtype(named: str | torch.dtype | None) -> torch.dtype | None:
    if not isinstance(named, str):
        return named
    dtype = named_dtype(named.removeprefix("torch."))
    if dtype is None:
        raise ConfigError(f"rollout_dtype is {named!r}, and torch has no dtype of that name")
    return dtype
