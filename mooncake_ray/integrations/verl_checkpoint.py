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
- `keep` (false): workers keep the last version, for `get_weights`.
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch

from mooncake_ray._native import delta as native
from mooncake_ray.errors import (
    ConfigError,
    PlanError,
)
from mooncake_ray.integrations.verl_board import Bucket, End, Patch, Update
from mooncake_ray.integrations.verl_calls import Topology, answer, each_of, live_board
from mooncake_ray.integrations.verl_delta import Changes, Flush, changes_of, summable
from mooncake_ray.integrations.verl_receiving import Receiver
from mooncake_ray.integrations.verl_stream import ALIGNMENT, Cut, Cutter, dtype_of
from mooncake_ray.objects import blobs
from mooncake_ray.transfer.deadline import Deadline

try:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache
except ImportError as e:
    raise ImportError(f"the checkpoint engine for verl needs verl 0.9, and what its checkpoint_engine imports: {e}") from e

__all__ = ["BACKEND", "MooncakeRayCheckpointEngine", "Topology"]

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
        if (keep or delta) and staging != "version":
            raise ConfigError("keep and delta need staging='version': by buckets there is never a whole version")
        if keep and delta:
            raise ConfigError("keep and delta exclude each other: of what changed there is no whole version to keep")
        self.bucket_size = int(min(bucket_size, chunk_megabytes * (1 << 20))) // ALIGNMENT * ALIGNMENT
        if self.bucket_size < ALIGNMENT:
            raise ConfigError(f"buckets of {bucket_size} bytes, at most {chunk_megabytes} MiB, are too small")
        self.is_master = is_master
        self.timeout_s, self.staging, self.window, self.keep = timeout_s, staging, window, keep
        self.rollout_dtype = dtype_of(rollout_dtype.removeprefix("torch.")) if isinstance(rollout_dtype, str) else rollout_dtype
        self.delta = delta
        self.wire_format = "delta_flush" if delta else "named_tensors"
        self._receiver = Receiver(self.bucket_size, bucket_size, staging == "version", timeout_s, torch.device(device), keep)
        self.rank = -1
        self._number = 0  # of the last update that this rank knows of
        self._topology: Topology | None = None
        self._published: dict[int, Bucket] = {}
        self._base: dict[int, Bucket] = {}  # of the version before, where deltas are wanted
        self._sent = -1  # the last update that this rank has sent all of
        self._held = -1  # the update whose weights this rank has, to compare with
        weakref.finalize(self, _drop, self._published)
        weakref.finalize(self, _drop, self._base)

    # ---- verl's manager calls these, in this order

    def prepare(self) -> dict[str, Any]:
        """Lets go of what an update that failed has left. Returns what `build_topology` needs to know of this rank."""
        self._drop_published()
        context = ray.get_runtime_context()
        board = None if self._topology is None else self._topology.board
        return {"actor": context.get_actor_id() or "", "number": self._number, "board": board, "held": max(self._held, self._receiver.held)}

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
        self.rank, self._topology, self._number = rank, topology, topology.update.number
        self._receiver.rank, self._receiver.topology = rank, topology

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Writes this rank's share. When it returns the weights may change: what rollout workers still read is a copy.

        Args:
            weights: All of the model's tensors with their names, the same on each rank, in the same order; iterated once, on this thread.
            global_steps: The version.

        Returns metrics: `checkpoint_engine/payload_mbytes` (this rank's) and seconds.

        Raises:
            PlanError: a name came twice, or ranks were given different tensors; no rollout worker has changed.
            StoreFullError: the pool had no room in time.
            SyncTimeoutError, SyncAbortedError: others did not come along, or died.
        """
        topology, deadline, begin = self._joined(), Deadline(self.timeout_s), time.monotonic()
        update, board = topology.update, topology.board
        cutter = Cutter(self.bucket_size, self.rank, len(update.senders))
        posted: list[Any] = []
        sent = 0
        try:
            await self._ask(board.open.remote(update), deadline)
            async for name, tensor in each_of(weights):
                for cut in cutter.add(name, self._cast(name, tensor)):
                    posted.append(await self._write(cut, deadline))
                    sent += cut.nbytes
            for cut in cutter.finish():
                posted.append(await self._write(cut, deadline))
                sent += cut.nbytes
            for ref in posted:
                await self._ask(ref, deadline)
            end = End(global_steps, cutter.digest, cutter.buckets, cutter.nbytes)
            await self._ask(board.finish.remote(update.number, self.rank, end), deadline)
            if self.staging == "buckets":
                await self._until_taken(cutter.buckets, deadline)
            self._sent = update.number
        except BaseException as e:
            board.fail.remote(update.number, f"trainer rank {self.rank} could not send its weights: {type(e).__name__}: {e}")
            self._drop_published()
            raise
        return {"checkpoint_engine/payload_mbytes": sent / (1 << 20), "checkpoint_engine/send_s": time.monotonic() - begin}

    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]] | Iterator[Flush]:
        """Yields all tensors in the order in which they were sent. A tensor is private (copy-on-write) memory that stays valid as long as it
        lives; a bucket's memory is free again when none of its tensors does. With `delta`, an iterator, not asynchronous, of verl's flushes.

        Raises:
            StaleVersionError: what was sent is another version than `global_steps`.
            SyncAbortedError: somebody died, or could not go on, before anything was yielded.
            SyncTimeoutError: not done in time.
            ChecksumError: bytes that arrived are not the ones that were sent.
        """
        self._joined()
        return self._receiver.flushes(global_steps) if self.delta else self._receiver.named(global_steps)

    def get_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The last version once more, from this node's pool, as it came; copies, a bucket at a time.

        Raises:
            ConfigError: the engine does not keep versions (`keep`), or there is none yet.
        """
        return self._receiver.again()

    def finalize(self) -> None:
        """Everybody has the version: what this rank wrote of it may go, or is what the next is compared with."""
        if self.delta and self._sent == self._number:
            _drop(self._base)
            for number, bucket in self._published.items():
                blobs.drop([] if bucket.patch is None else [bucket.patch.blob])
                self._base[number] = replace(bucket, patch=None)
            self._published.clear()
            self._held = self._number
        self._drop_published()

    # ---- sending

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        cast = self.rollout_dtype is not None and tensor.is_floating_point()
        tensor = tensor.detach().to(self.rollout_dtype) if cast else tensor
        if self.delta and not summable(tensor.dtype):
            raise PlanError(f"tensor {name!r} is {tensor.dtype}, of which verl's delta format has no checksum; see rollout_dtype")
        return tensor

    async def _write(self, cut: Cut, deadline: Deadline) -> Any:
        """Returns the ref of its announcement."""
        topology = self._joined()
        if self.staging == "buckets":
            await self._until_taken(cut.number + 1 - self.window * len(topology.update.senders), deadline)
        note = f"weights, update {topology.update.number}"
        base, checksum = self._base.get(cut.number), 0
        old = None
        if base is not None and topology.update.base == self._held and (base.tensors, base.blob.nbytes) == (tuple(cut.tensors), cut.nbytes):
            old = blobs.view(base.blob)
        changes: Changes | None = None

        def fill(out: np.ndarray) -> None:
            nonlocal checksum, changes
            cut.write(out)
            checksum = native.checksum(out)
            if old is not None:
                changes = changes_of(cut.tensors, cut.number * self.bucket_size, self.bucket_size, old, out)

        blob = await asyncio.to_thread(blobs.write, cut.nbytes, fill, timeout_s=deadline.left(note), note=note)
        bucket = self._published[cut.number] = Bucket(cut.number, blob, checksum, tuple(cut.tensors))
        if changes is not None:
            patch = await asyncio.to_thread(_patch, changes, deadline.left(note), note)
            bucket = self._published[cut.number] = replace(bucket, patch=patch)
        return topology.board.post.remote(topology.update.number, bucket)

    async def _until_taken(self, buckets: int, deadline: Deadline) -> None:
        """Waits until every rollout worker has done with the first so many, and lets go of those of this rank."""
        topology, taken = self._joined(), 0
        while taken < buckets:
            taken = await self._ask(topology.board.taken.remote(topology.update.number, buckets - 1), deadline)
        self._drop_published(before=taken)

    def _drop_published(self, before: float = math.inf) -> None:
        _drop(self._published, before)

    # ---- both

    def _joined(self) -> Topology:
        if self._topology is None:
            raise ConfigError("this rank takes part in no update: init_process_group was not called")
        return self._topology

    async def _ask(self, ref: Any, deadline: Deadline) -> Any:
        return await answer(ref, deadline, f"update {self._number}: rank {self.rank}")


def _patch(changes: Changes, timeout_s: float, note: str) -> Patch:
    checksum = 0

    def fill(out: np.ndarray) -> None:
        nonlocal checksum
        changes.write(out)
        checksum = native.checksum(out)

    blob = blobs.write(changes.nbytes, fill, timeout_s=timeout_s, note=f"{note}, what changed")
    return Patch(blob, checksum, changes.counts, changes.values_at)


def _drop(published: dict[int, Bucket], before: float = math.inf) -> None:
    for number in [number for number in published if number < before]:
        bucket = published.pop(number)
        blobs.drop([bucket.blob] if bucket.patch is None else [bucket.blob, bucket.patch.blob])
