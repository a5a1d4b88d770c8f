"""`Receiver`: how a rollout worker of verl's gets a version, by itself and together with the others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from mooncake_ray._native import delta as native
from mooncake_ray.errors import ChecksumError, ConfigError, PlanError, StaleVersionError, StoreError, SyncAbortedError, TransportError
from mooncake_ray.integrations.verl_weights.flushes import Flush, dense_flushes, patch_flushes
from mooncake_ray.integrations.verl_weights.messages import Bucket, End
from mooncake_ray.integrations.verl_weights.seat import Seat
from mooncake_ray.integrations.verl_weights.stream import Joiner
from mooncake_ray.objects import blobs
from mooncake_ray.objects.blobs import Blob

__all__ = ["Receiver"]

T = TypeVar("T")
Fetched = tuple[Bucket, np.ndarray]


class Receiver:
    """For one update at a time."""

    def __init__(self, size: int, flush_bytes: int, whole: bool, device: torch.device, keep: bool) -> None:
        """
        Args:
            size: Of buckets, bytes.
            flush_bytes: Of a flush, about.
            whole: Nothing is handed on before all is here, and with every other worker.
            device: Where tensors are handed on.
            keep: The last version is kept, for `again`.
        """
        self._size, self._flush_bytes, self._whole, self._device, self._keep = size, flush_bytes, whole, device, keep
        self.held = -1  # the update whose weights were handed on, all of them, as flushes
        self._kept: list[Fetched] | None = None

    async def again(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The last version once more: copies, a bucket at a time. Raises ConfigError: there is none."""
        if self._kept is None:
            raise ConfigError("there is no version to be had: keep=True keeps the last one, once it came")
        joiner = Joiner(self._size)
        for bucket, data in self._kept:
            for item in joiner.add(bucket.number, bucket.tensors, data.copy()):
                yield item

    async def named(self, seat: Seat, version: int | None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """See the engine's `receive_weights`."""
        with seat.telling():
            await seat.join()
            joiner = Joiner(self._size)
            if self._whole:
                staged = await self._staged(seat, self._come(seat, version))
                if self._keep:
                    self._kept = [(bucket, blobs.view(bucket.blob)) for bucket, _ in staged]
                for name, tensor in _consumed(staged, joiner):
                    yield name, tensor.to(self._device)
            else:
                async for bucket, data in self._come(seat, version):
                    for name, tensor in joiner.add(bucket.number, bucket.tensors, data):
                        yield name, tensor.to(self._device)
                    del data
                    await seat.ask("take", seat.rank, bucket.number + 1)
            await seat.ask("applied", seat.rank)

    def flushes(self, seat: Seat, version: int | None) -> Iterator[Flush]:
        """As `named`, for code that cannot wait otherwise: what changed, or all."""
        with seat.telling():
            patched, staged = _done(self._staged_flushes(seat, version))
            self.held = -1
            if patched:
                flushes = patch_flushes(
                    ((bucket.tensors, bucket.patch.counts, data) for bucket, data in staged if bucket.patch is not None), self._flush_bytes
                )
            else:
                flushes = dense_flushes(_consumed(staged, Joiner(self._size)), self._flush_bytes)
            for named, is_last in flushes:
                yield [(name, tensor.to(self._device)) for name, tensor in named], is_last
            self.held = seat.update.number
            _done(seat.ask("applied", seat.rank))

    async def _staged_flushes(self, seat: Seat, version: int | None) -> tuple[bool, deque[Fetched]]:
        """What changed (True), or all, once every worker has it."""
        await seat.join()
        if 0 <= seat.update.base == self.held:
            listed = [bucket async for found in self._announced(seat, version) for bucket in found]
            patches = [bucket.patch.blob.nbytes for bucket in listed if bucket.patch is not None]
            patched = len(patches) == len(listed) and 2 * sum(patches) <= sum(bucket.blob.nbytes for bucket in listed)
            coming = self._fetched(seat, listed, self.fetch_patch if patched else self.fetch)
        else:
            patched, coming = False, self._come(seat, version)
        return patched, await self._staged(seat, coming)

    async def _staged(self, seat: Seat, coming: AsyncIterator[Fetched]) -> deque[Fetched]:
        """All of them, once every worker has all of its own."""
        staged: deque[Fetched] = deque()
        try:
            async for each in coming:
                staged.append(each)
                del each
            await self._until_all_have(seat)
        except BaseException:
            staged.clear()  # an error keeps this frame until garbage is collected, and others may need the room
            raise
        return staged

    async def _until_all_have(self, seat: Seat) -> None:
        while not await seat.ask("all_staged", seat.rank):
            pass

    async def _announced(self, seat: Seat, version: int | None) -> AsyncIterator[list[Bucket]]:
        """The buckets in their order, as they are written."""
        at = 0
        end: End | None = None
        while end is None or at < end.buckets:
            found, end = await seat.ask("buckets", at)
            if end is not None and version is not None and end.version is not None and version != end.version:
                raise StaleVersionError(f"rollout rank {seat.rank} is to get version {version}; the trainers sent {end.version}")
            at += len(found)
            yield found

    async def _come(self, seat: Seat, version: int | None) -> AsyncIterator[Fetched]:
        """Each bucket in its order, with its bytes."""
        async for found in self._announced(seat, version):
            async for each in self._fetched(seat, found, self.fetch):
                yield each
                del each

    async def _fetched(self, seat: Seat, buckets: Sequence[Bucket], fetch: Callable[[Bucket], np.ndarray]) -> AsyncIterator[Fetched]:
        """The next one comes while one is looked at."""
        tasks = (asyncio.ensure_future(asyncio.to_thread(fetch, bucket)) for bucket in buckets)
        ahead = deque(islice(tasks, 1))
        try:
            for bucket in buckets:
                ahead.extend(islice(tasks, 1))
                yield bucket, await self._arrived(seat, bucket, ahead.popleft())  # which nothing here holds then
        finally:
            for task in ahead:
                task.cancel()

    async def _arrived(self, seat: Seat, bucket: Bucket, coming: asyncio.Future[np.ndarray]) -> np.ndarray:
        try:
            return await seat.within(coming)
        except (StoreError, TransportError) as e:  # as when its trainer gave up: then that is why
            await seat.ask("check")
            raise SyncAbortedError(f"bucket {bucket.number} did not come: {type(e).__name__}: {e}") from e

    def fetch(self, bucket: Bucket) -> np.ndarray:
        return _checked(bucket, bucket.blob, bucket.checksum)

    def fetch_patch(self, bucket: Bucket) -> np.ndarray:
        if bucket.patch is None:
            raise PlanError(f"bucket {bucket.number} has no patch")
        return _checked(bucket, bucket.patch.blob, bucket.patch.checksum)


def _checked(bucket: Bucket, blob: Blob, checksum: int) -> np.ndarray:
    data = blobs.view(blob, writable=True)
    found = native.checksum(data)
    if found != checksum:
        first = bucket.tensors[0].name if bucket.tensors else ""
        raise ChecksumError(f"bucket {bucket.number} (from {first!r} on): checksum {found:016x} instead of {checksum:016x}")
    return data


def _consumed(staged: deque[Fetched], joiner: Joiner) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, letting go of each bucket once it is handed on."""
    while staged:
        bucket, data = staged.popleft()
        yield from joiner.add(bucket.number, bucket.tensors, data)
        del data


def _done(what: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns, in code that must not be one, though it may run in an event loop: from another thread's."""
    with ThreadPoolExecutor(1, "mooncake_ray.verl") as thread:
        return thread.submit(asyncio.run, what).result()
