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
- `keep` (false): workers keep the last version, for `get_weights`.
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from mooncake_ray._native import delta as native
from mooncake_ray.errors import (
    ChecksumError,
    ConfigError,
    MooncakeRayError,
    PlanError,
    StaleVersionError,
    StoreError,
    SyncAbortedError,
    SyncTimeoutError,
    TransportError,
)
from mooncake_ray.integrations.verl_board import Bucket, End, Update, new_board
from mooncake_ray.integrations.verl_stream import ALIGNMENT, Cut, Cutter, Joiner, dtype_of
from mooncake_ray.objects import blobs
from mooncake_ray.objects.blobs import Blob
from mooncake_ray.transfer.deadline import Deadline

try:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache
except ImportError as e:
    raise ImportError(f"the checkpoint engine for verl needs verl 0.9, and what its checkpoint_engine imports: {e}") from e

__all__ = ["BACKEND", "MooncakeRayCheckpointEngine", "Topology"]

BACKEND = "mooncake_ray"
_STAGING = ("version", "buckets")
_ANSWER_S = 30.0
_CALL_S = 30.0  # of one call to the board: longer than it takes to say that there is no news


@dataclass(frozen=True, slots=True)
class Topology:
    """What `build_topology` tells every rank."""

    update: Update
    board: Any


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
    ) -> None:
        """Takes what verl passes to its engines, and the keys above. Raises ConfigError."""
        if staging not in _STAGING:
            raise ConfigError(f"staging is {staging!r}, expected one of {', '.join(_STAGING)}")
        if timeout_s <= 0 or window < 1:
            raise ConfigError(f"timeout_s and window must be positive, got {timeout_s} and {window}")
        if keep and staging != "version":
            raise ConfigError("keep=True needs staging='version': by buckets there is never a whole version")
        self.bucket_size = int(min(bucket_size, chunk_megabytes * (1 << 20))) // ALIGNMENT * ALIGNMENT
        if self.bucket_size < ALIGNMENT:
            raise ConfigError(f"buckets of {bucket_size} bytes, at most {chunk_megabytes} MiB, are too small")
        self.is_master = is_master
        self.timeout_s, self.staging, self.window, self.keep = timeout_s, staging, window, keep
        self.rollout_dtype = dtype_of(rollout_dtype.removeprefix("torch.")) if isinstance(rollout_dtype, str) else rollout_dtype
        self.rank = -1
        self._number = 0  # of the last update that this rank knows of
        self._topology: Topology | None = None
        self._published: dict[int, Blob] = {}  # by number of the bucket
        weakref.finalize(self, _drop, self._published)
        self._kept: list[tuple[Bucket, np.ndarray]] | None = None

    # ---- verl's manager calls these, in this order

    def prepare(self) -> dict[str, Any]:
        """Lets go of what an update that failed has left. Returns what `build_topology` needs to know of this rank."""
        self._drop_published()
        context = ray.get_runtime_context()
        board = None if self._topology is None else self._topology.board
        return {"actor": context.get_actor_id() or "", "number": self._number, "board": board}

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
        update = Update(number, actors[:actor_wg_world_size], actors[actor_wg_world_size:])
        topology = Topology(update, _board([m["board"] for m in metadata]))

        def of(world: int) -> dict[str, list[Any]]:
            return {"rank": list(range(world)), "topology": [topology] * world}

        return of(actor_wg_world_size), of(rollout_world_size)

    def init_process_group(self, rank: int, topology: Topology) -> None:
        """Takes part in the next update, as that rank of the trainers or of the rollout workers. There is no group to be made: nobody waits."""
        self.rank, self._topology, self._number = rank, topology, topology.update.number

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
            async for name, tensor in _each(weights):
                for cut in cutter.add(name, self._cast(tensor)):
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
        except BaseException as e:
            board.fail.remote(update.number, f"trainer rank {self.rank} could not send its weights: {type(e).__name__}: {e}")
            self._drop_published()
            raise
        return {"checkpoint_engine/payload_mbytes": sent / (1 << 20), "checkpoint_engine/send_s": time.monotonic() - begin}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields all tensors in the order in which they were sent. A tensor is private (copy-on-write) memory on the CPU that stays valid as
        long as it lives; a bucket's memory is free again when none of its tensors does.

        Raises:
            StaleVersionError: what was sent is another version than `global_steps`.
            SyncAbortedError: somebody died, or could not go on, before anything was yielded.
            SyncTimeoutError: not done in time.
            ChecksumError: bytes that arrived are not the ones that were sent.
        """
        topology, deadline = self._joined(), Deadline(self.timeout_s)
        update, board = topology.update, topology.board
        self._kept = None
        try:
            await self._ask(board.open.remote(update), deadline)
            joiner = Joiner(self.bucket_size)
            if self.staging == "version":
                staged = await self._stage(global_steps, deadline)
                self._kept = [(bucket, blobs.view(bucket.blob)) for bucket, _ in staged] if self.keep else None
                while staged:
                    bucket, data = staged.pop(0)
                    for item in joiner.add(bucket.number, bucket.tensors, data):
                        yield item
                    del data
            else:
                async for bucket, data in self._as_they_come(global_steps, deadline):
                    for item in joiner.add(bucket.number, bucket.tensors, data):
                        yield item
                    del data
            await self._ask(board.applied.remote(update.number, self.rank), deadline)
        except GeneratorExit:
            board.fail.remote(update.number, f"rollout rank {self.rank} took only a part of its weights")
            raise
        except BaseException as e:
            board.fail.remote(update.number, f"rollout rank {self.rank} could not get its weights: {type(e).__name__}: {e}")
            raise

    async def get_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The last version once more, from this node's pool, as it came; copies, a bucket at a time.

        Raises:
            ConfigError: the engine does not keep versions (`keep`), or there is none yet.
        """
        if self._kept is None:
            raise ConfigError("there is no version to be had: keep=True keeps the last one, once it came")
        joiner = Joiner(self.bucket_size)
        for bucket, data in self._kept:
            for item in joiner.add(bucket.number, bucket.tensors, data.copy()):
                yield item

    def finalize(self) -> None:
        """Everybody has the version: what this rank wrote of it may go."""
        self._drop_published()

    # ---- sending

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        cast = self.rollout_dtype is not None and tensor.is_floating_point()
        return tensor.detach().to(self.rollout_dtype) if cast else tensor

    async def _write(self, cut: Cut, deadline: Deadline) -> Any:
        """Returns the ref of its announcement."""
        topology = self._joined()
        if self.staging == "buckets":
            await self._until_taken(cut.number + 1 - self.window * len(topology.update.senders), deadline)
        checksum = 0

        def fill(out: np.ndarray) -> None:
            nonlocal checksum
            cut.write(out)
            checksum = native.checksum(out)

        note = f"weights, update {topology.update.number}"
        blob = await asyncio.to_thread(blobs.write, cut.nbytes, fill, timeout_s=deadline.left(note), note=note)
        self._published[cut.number] = blob
        return topology.board.post.remote(topology.update.number, Bucket(cut.number, blob, checksum, tuple(cut.tensors)))

    async def _until_taken(self, buckets: int, deadline: Deadline) -> None:
        """Waits until every rollout worker has done with the first so many, and lets go of those of this rank."""
        topology, taken = self._joined(), 0
        while taken < buckets:
            taken = await self._ask(topology.board.taken.remote(topology.update.number, buckets - 1), deadline)
        self._drop_published(before=taken)

    def _drop_published(self, before: float = math.inf) -> None:
        _drop(self._published, before)

    # ---- receiving

    async def _stage(self, version: int | None, deadline: Deadline) -> list[tuple[Bucket, np.ndarray]]:
        """All of it, once every worker has it."""
        topology = self._joined()
        staged = [each async for each in self._come(version, deadline)]
        while not await self._ask(topology.board.all_staged.remote(topology.update.number, self.rank), deadline):
            pass
        return staged

    async def _as_they_come(self, version: int | None, deadline: Deadline) -> AsyncIterator[tuple[Bucket, np.ndarray]]:
        topology = self._joined()
        async for bucket, data in self._come(version, deadline):
            yield bucket, data
            del data
            await self._ask(topology.board.take.remote(topology.update.number, self.rank, bucket.number + 1), deadline)

    async def _come(self, version: int | None, deadline: Deadline) -> AsyncIterator[tuple[Bucket, np.ndarray]]:
        """Each bucket in its order, with its bytes; the next one comes while one is looked at."""
        topology, at = self._joined(), 0
        end: End | None = None
        while end is None or at < end.buckets:
            found, end = await self._ask(topology.board.buckets.remote(topology.update.number, at), deadline)
            if end is not None and version is not None and end.version is not None and version != end.version:
                raise StaleVersionError(f"rollout rank {self.rank} is to get version {version}; the trainers sent {end.version}")
            at += len(found)
            coming = [asyncio.ensure_future(asyncio.to_thread(self._fetch, bucket)) for bucket in found[:1]]
            try:
                for i, bucket in enumerate(found):
                    if i + 1 < len(found):
                        coming.append(asyncio.ensure_future(asyncio.to_thread(self._fetch, found[i + 1])))
                    yield bucket, await self._arrived(bucket, coming.pop(0), deadline)
            finally:
                for task in coming:
                    task.cancel()

    async def _arrived(self, bucket: Bucket, coming: asyncio.Future[np.ndarray], deadline: Deadline) -> np.ndarray:
        try:
            return await coming
        except (StoreError, TransportError) as e:  # as when its trainer gave up: then that is why
            await self._ask(self._joined().board.check.remote(self._number), deadline)
            raise SyncAbortedError(f"bucket {bucket.number} did not come: {type(e).__name__}: {e}") from e

    def _fetch(self, bucket: Bucket) -> np.ndarray:
        data = blobs.view(bucket.blob, writable=True)
        found = native.checksum(data)
        if found != bucket.checksum:
            first = bucket.tensors[0].name if bucket.tensors else ""
            raise ChecksumError(f"bucket {bucket.number} (from {first!r} on): checksum {found:016x} instead of {bucket.checksum:016x}")
        return data

    # ---- both

    def _joined(self) -> Topology:
        if self._topology is None:
            raise ConfigError("this rank takes part in no update: init_process_group was not called")
        return self._topology

    async def _ask(self, ref: Any, deadline: Deadline) -> Any:
        """What the board answers. Raises what it raises, SyncTimeoutError, or SyncAbortedError: it is gone."""
        try:
            left = deadline.left(f"update {self._number}")
            return await asyncio.wait_for(asyncio.wrap_future(ref.future()), min(left, _CALL_S))
        except TimeoutError:
            raise SyncTimeoutError(f"update {self._number}: rank {self.rank} has not got on within {deadline.timeout_s:g} s") from None
        except ray.exceptions.RayTaskError as e:
            raise (e.cause if isinstance(e.cause, MooncakeRayError) else e) from None
        except ray.exceptions.RayActorError as e:
            raise SyncAbortedError(f"update {self._number}: the actor through which its ranks hear of each other is gone: {e}") from None


def _drop(published: dict[int, Blob], before: float = math.inf) -> None:
    blobs.drop([published.pop(number) for number in list(published) if number < before])


def _board(known: Iterable[Any]) -> Any:
    """One that lives, or a new one."""
    for board in {b._actor_id.hex(): b for b in known if b is not None}.values():
        try:
            if ray.get(board.is_there.remote(), timeout=_ANSWER_S):
                return board
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            continue
    return new_board()


async def _each(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if hasattr(weights, "__aiter__"):
        async for item in weights:
            yield item
        return
    items: Iterator[tuple[str, torch.Tensor]] = iter(weights)
    for item in items:
        yield item
