"""`Receiver`: how a rollout worker of verl's gets a version, by itself and together with the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import torch

from mooncake_ray._native import delta as native
from mooncake_ray.errors import ChecksumError, ConfigError, PlanError, StaleVersionError, StoreError, SyncAbortedError, TransportError
from mooncake_ray.integrations.verl_board import Bucket, End
from mooncake_ray.integrations.verl_calls import Topology, answer
from mooncake_ray.integrations.verl_delta import Flush, blocking, dense_flushes, patch_flushes, worth_it
from mooncake_ray.integrations.verl_stream import Joiner
from mooncake_ray.objects import blobs
from mooncake_ray.transfer.deadline import Deadline

__all__ = ["Receiver"]


class Receiver:
    """For one update at a time."""

    def __init__(self, size: int, flush_bytes: int, whole: bool, timeout_s: float, device: torch.device, keep: bool) -> None:
        """
        Args:
            size: Of buckets, bytes.
            flush_bytes: Of a flush, about.
            whole: Nothing is handed on before all is here, and with every other worker.
        """
        self._size, self._flush_bytes, self._whole, self._timeout_s, self._device, self._keep = (
            size,
            flush_bytes,
            whole,
            timeout_s,
            device,
            keep,
        )
        self.rank = -1
        self.topology: Topology | None = None
        self.held = -1  # the update whose weights were handed on, all of them
        self._kept: list[tuple[Bucket, np.ndarray]] | None = None

    @property
    def _joined(self) -> Topology:
        if self.topology is None:
            raise ConfigError("this rank takes part in no update: init_process_group was not called")
        return self.topology

    async def _ask(self, ref: Any, deadline: Deadline) -> Any:
        return await answer(ref, deadline, f"update {self._joined.update.number}: rollout rank {self.rank}")

    async def again(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The last version once more: copies, a bucket at a time. Raises ConfigError: there is none."""
        if self._kept is None:
            raise ConfigError("there is no version to be had: keep=True keeps the last one, once it came")
        joiner = Joiner(self._size)
        for bucket, data in self._kept:
            for item in joiner.add(bucket.number, bucket.tensors, data.copy()):
                yield item

    @contextlib.contextmanager
    def _telling(self, topology: Topology) -> Iterator[None]:
        """Tells the others if this rank does not get on."""
        try:
            yield
        except BaseException as e:
            why = (
                "took only a part of its weights" if isinstance(e, GeneratorExit) else f"could not get its weights: {type(e).__name__}: {e}"
            )
            topology.board.fail.remote(topology.update.number, f"rollout rank {self.rank} {why}")
            raise

    async def named(self, version: int | None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        topology, deadline = self._joined, Deadline(self._timeout_s)
        update, board = topology.update, topology.board
        self._kept = None
        with self._telling(topology):
            await self._ask(board.open.remote(update), deadline)
            joiner = Joiner(self._size)
            if self._whole:
                staged = await self._stage(version, deadline)
                self._kept = [(bucket, blobs.view(bucket.blob)) for bucket, _ in staged] if self._keep else None
                for name, tensor in _consumed(staged, joiner):
                    yield name, tensor.to(self._device)
            else:
                async for bucket, data in self._as_they_come(version, deadline):
                    for name, tensor in joiner.add(bucket.number, bucket.tensors, data):
                        yield name, tensor.to(self._device)
                    del data
            await self._ask(board.applied.remote(update.number, self.rank), deadline)

    def flushes(self, version: int | None) -> Iterator[Flush]:
        topology, deadline = self._joined, Deadline(self._timeout_s)
        update, board = topology.update, topology.board
        with self._telling(topology), blocking() as run:
            run(self._ask(board.open.remote(update), deadline))
            patched, staged = run(self._stage_changes(version, deadline))
            self.held = -1
            if patched:
                parts = ((b.tensors, b.patch.counts, b.patch.values_at, data) for b, data in staged if b.patch is not None)
                flushes = patch_flushes(parts, self._flush_bytes)
            else:
                flushes = dense_flushes(_consumed(staged, Joiner(self._size)), self._flush_bytes)
            for named, is_last in flushes:
                yield [(name, tensor.to(self._device)) for name, tensor in named], is_last
            self.held = update.number
            run(self._ask(board.applied.remote(update.number, self.rank), deadline))

    async def _stage(self, version: int | None, deadline: Deadline) -> list[tuple[Bucket, np.ndarray]]:
        """All of it, once every worker has it."""
        staged = [each async for each in self._come(version, deadline)]
        await self._until_all_have(deadline)
        return staged

    async def _stage_changes(self, version: int | None, deadline: Deadline) -> tuple[bool, list[tuple[Bucket, np.ndarray]]]:
        """What changed (True), or all, once every worker has it."""
        update = self._joined.update
        listed = [bucket async for found in self._announced(version, deadline) for bucket in found]
        patches = [b.patch.blob.nbytes for b in listed if b.patch is not None]
        patched = (
            0 <= update.base == self.held and len(patches) == len(listed) and worth_it(sum(patches), sum(b.blob.nbytes for b in listed))
        )
        fetch = self.fetch_patch if patched else self.fetch
        staged = [(b, await self._arrived(b, asyncio.ensure_future(asyncio.to_thread(fetch, b)), deadline)) for b in listed]
        await self._until_all_have(deadline)
        return patched, staged

    async def _until_all_have(self, deadline: Deadline) -> None:
        topology = self._joined
        while not await self._ask(topology.board.all_staged.remote(topology.update.number, self.rank), deadline):
            pass

    async def _announced(self, version: int | None, deadline: Deadline) -> AsyncIterator[list[Bucket]]:
        """The buckets in their order, as they are written."""
        topology, at = self._joined, 0
        end: End | None = None
        while end is None or at < end.buckets:
            found, end = await self._ask(topology.board.buckets.remote(topology.update.number, at), deadline)
            if end is not None and version is not None and end.version is not None and version != end.version:
                raise StaleVersionError(f"rollout rank {self.rank} is to get version {version}; the trainers sent {end.version}")
            at += len(found)
            yield found

    async def _as_they_come(self, version: int | None, deadline: Deadline) -> AsyncIterator[tuple[Bucket, np.ndarray]]:
        topology = self._joined
        async for bucket, data in self._come(version, deadline):
            yield bucket, data
            del data
            await self._ask(topology.board.take.remote(topology.update.number, self.rank, bucket.number + 1), deadline)

    async def _come(self, version: int | None, deadline: Deadline) -> AsyncIterator[tuple[Bucket, np.ndarray]]:
        """Each bucket in its order, with its bytes; the next one comes while one is looked at."""
        async for found in self._announced(version, deadline):
            coming = [asyncio.ensure_future(asyncio.to_thread(self.fetch, bucket)) for bucket in found[:1]]
            try:
                for i, bucket in enumerate(found):
                    if i + 1 < len(found):
                        coming.append(asyncio.ensure_future(asyncio.to_thread(self.fetch, found[i + 1])))
                    yield bucket, await self._arrived(bucket, coming.pop(0), deadline)
            finally:
                for task in coming:
                    task.cancel()

    async def _arrived(self, bucket: Bucket, coming: asyncio.Future[np.ndarray], deadline: Deadline) -> np.ndarray:
        try:
            return await coming
        except (StoreError, TransportError) as e:  # as when its trainer gave up: then that is why
            await self._ask(self._joined.board.check.remote(self._joined.update.number), deadline)
            raise SyncAbortedError(f"bucket {bucket.number} did not come: {type(e).__name__}: {e}") from e

    def fetch(self, bucket: Bucket) -> np.ndarray:
        return _checked(blobs.view(bucket.blob, writable=True), bucket.checksum, bucket)

    def fetch_patch(self, bucket: Bucket) -> np.ndarray:
        if bucket.patch is None:
            raise PlanError(f"bucket {bucket.number} has no patch")
        return _checked(blobs.view(bucket.patch.blob, writable=True), bucket.patch.checksum, bucket)


def _checked(data: np.ndarray, expected: int, bucket: Bucket) -> np.ndarray:
    found = native.checksum(data)
    if found != expected:
        first = bucket.tensors[0].name if bucket.tensors else ""
        raise ChecksumError(f"bucket {bucket.number} (from {first!r} on): checksum {found:016x} instead of {expected:016x}")
    return data


def _consumed(staged: list[tuple[Bucket, np.ndarray]], joiner: Joiner) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, letting go of each bucket once it is handed on."""
    while staged:
        bucket, data = staged.pop(0)
        yield from joiner.add(bucket.number, bucket.tensors, data)
        del data
