"""`Sender`: how a trainer's rank writes its share of a version, and what it keeps of it."""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mooncake_ray._native import delta as native
from mooncake_ray.errors import PlanError
from mooncake_ray.integrations.verl_weights.changes import Changes, changes_of
from mooncake_ray.integrations.verl_weights.flushes import summable
from mooncake_ray.integrations.verl_weights.messages import Bucket, End, Patch
from mooncake_ray.integrations.verl_weights.seat import Seat
from mooncake_ray.integrations.verl_weights.stream import Cut, Cutter
from mooncake_ray.objects import blobs
from mooncake_ray.objects.blobs import Blob

__all__ = ["Sender"]


class Sender:
    """For one update at a time."""

    def __init__(self, size: int, window: int | None, dtype: torch.dtype | None, delta: bool) -> None:
        """
        Args:
            size: Of buckets, bytes.
            window: So many of this rank's buckets are in its pool at most; None: all of them.
            dtype: Floating-point tensors are cast to it.
            delta: What changed since the version before is told, too, and versions are kept for that.
        """
        self._size, self._window, self._dtype, self._delta = size, window, dtype, delta
        self.held = -1  # the update whose buckets are kept, to compare with
        self._sent = -1  # the last that all of was sent
        self._published: dict[int, Bucket] = {}
        self._kept: dict[int, Bucket] = {}
        weakref.finalize(self, _drop, self._published)
        weakref.finalize(self, _drop, self._kept)

    async def send(self, seat: Seat, weights: AsyncIterator[tuple[str, torch.Tensor]], version: int | None) -> dict[str, float]:
        """See the engine's `send_weights`."""
        begin, world = time.monotonic(), len(seat.update.senders)
        cutter = Cutter(self._size, seat.rank, world)
        posted: list[tuple[int, Any]] = []  # bytes, and what the board will answer

        async def write(cuts: Iterable[Cut]) -> None:
            for cut in cuts:
                if self._window is not None:
                    await self._until_taken(seat, cut.number + 1 - self._window * world)
                bucket = self._published[cut.number] = await asyncio.to_thread(self._write, seat, cut)
                posted.append((cut.nbytes, seat.tell("post", bucket)))

        try:
            with seat.telling():
                await seat.join()
                async for name, tensor in weights:
                    await write(cutter.add(name, self._cast(name, tensor)))
                await write(cutter.finish())
                for _, ref in posted:
                    await seat.answer(ref)
                await seat.ask("finish", seat.rank, End(version, cutter.digest, cutter.buckets, cutter.nbytes))
                if self._window is not None:
                    await self._until_taken(seat, cutter.buckets)
                self._sent = seat.update.number
        except BaseException as e:
            self.forget()
            if isinstance(e, Exception):  # ranks make tensors whole together: without this one, the others would wait for ever
                async for _ in weights:
                    pass
            raise
        payload = sum(nbytes for nbytes, _ in posted)
        return {"checkpoint_engine/payload_mbytes": payload / (1 << 20), "checkpoint_engine/send_s": time.monotonic() - begin}

    def forget(self) -> None:
        """What was published may go."""
        _drop(self._published)

    def settle(self, number: int) -> None:
        """Everybody has that update's version: if this rank has sent it, that is what the next is compared with; or it may go."""
        if self._delta and self._sent == number:
            _drop(self._kept)
            for bucket in self._published.values():
                blobs.drop(_patches(bucket))
                self._kept[bucket.number] = replace(bucket, patch=None)
            self._published.clear()
            self.held = number
        self.forget()

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.detach().to(self._dtype)
        if self._delta and not summable(tensor.dtype):
            raise PlanError(f"tensor {name!r} is {tensor.dtype}, of which verl's delta format has no checksum; see rollout_dtype")
        return tensor

    def _write(self, seat: Seat, cut: Cut) -> Bucket:
        note = f"weights, update {seat.update.number}"
        blob, checksum = _stored(cut.nbytes, cut.write, seat, note)
        bucket = Bucket(cut.number, blob, checksum, tuple(cut.tensors))
        try:
            changes = self._changes(seat, bucket)
            if changes is None:
                return bucket
            return replace(bucket, patch=Patch(*_stored(changes.nbytes, changes.write, seat, f"{note}, what changed"), changes.counts))
        except BaseException:
            blobs.drop([blob])
            raise

    def _changes(self, seat: Seat, bucket: Bucket) -> Changes | None:
        """Since the version that all have; None: it has to be sent whole."""
        before = self._kept.get(bucket.number) if seat.update.base == self.held else None
        if before is None or (before.tensors, before.blob.nbytes) != (bucket.tensors, bucket.blob.nbytes):
            return None
        return changes_of(bucket.tensors, bucket.number * self._size, self._size, blobs.view(before.blob), blobs.view(bucket.blob))

    async def _until_taken(self, seat: Seat, buckets: int) -> None:
        """Waits until every worker has done with the first so many, and lets go of those of this rank."""
        taken = 0
        while taken < buckets:
            taken = await seat.ask("taken", buckets)
        _drop(self._published, before=taken)


def _stored(nbytes: int, fill: Callable[[np.ndarray], None], seat: Seat, note: str) -> tuple[Blob, int]:
    """A blob, and its checksum. `fill` writes it."""
    checksum = 0

    def filled(out: np.ndarray) -> None:
        nonlocal checksum
        fill(out)
        checksum = native.checksum(out)

    return blobs.write(nbytes, filled, timeout_s=seat.left(), note=note), checksum


def _patches(bucket: Bucket) -> list[Blob]:
    return [] if bucket.patch is None else [bucket.patch.blob]


def _drop(buckets: dict[int, Bucket], before: float = math.inf) -> None:
    for number in [number for number in buckets if number < before]:
        bucket = buckets.pop(number)
        blobs.drop([bucket.blob, *_patches(bucket)])
