"""verl's fully asynchronous policy, whose samples go from rollouter to trainer in the pool instead of through the heap of its queue's actor.

    mooncake_ray.install()                                   # in the driver, before Ray starts
    … +async_training.message_queue=mooncake_ray             # among verl's settings; without it, the queue is verl's own

The queue has verl's methods and does what verl's does: a sample that finds it full takes the place of the oldest one, `None` ends it. What a
sample's batch holds is stored typed and without padding, by a `RolloutBuffer`; the trainer reads it when it unpickles the sample.
"""

from __future__ import annotations

import asyncio
import pickle
import uuid
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import ray

from mooncake_ray.errors import GetTimeoutError, StoreFullError
from mooncake_ray.objects.batch_ref import BatchRef
from mooncake_ray.objects.batches import put_batch
from mooncake_ray.rollout.buffer import RolloutBuffer

__all__ = ["Client", "Queue", "register"]

_REST = "__rest__"  # the column of what a sample has besides its batch, in its first row
_POLL_S = 600.0
_NO_MORE = object()


def register(module: ModuleType) -> None:
    """Has verl's `message_queue` module make this queue where its settings ask for it."""
    if not isinstance(module.MessageQueue, _Choice):
        module.MessageQueue, module.MessageQueueClient = _Choice(module.MessageQueue), _client(module.MessageQueueClient)


class _Choice:
    """In the place of verl's queue actor class."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def remote(self, config: Any, max_queue_size: int = 1000) -> Any:
        settings = config.get("async_training") or {}
        chosen = settings.get("message_queue", "verl")
        if chosen == "verl":
            return self._original.remote(config, max_queue_size)
        if chosen != "mooncake_ray":
            raise ValueError(f"async_training.message_queue must be verl or mooncake_ray, got {chosen!r}")
        return Queue(config.actor_rollout_ref.rollout.n, max_queue_size)


def _client(original: type) -> Callable[[Any], Any]:
    def client(queue: Any) -> Any:
        return Client(queue) if isinstance(queue, Queue) else original(queue)

    return client


class Queue:
    """Samples on their way, each all responses of a prompt. A handle: may be pickled. Ends with the driver, or `shutdown`."""

    def __init__(self, responses: int, max_queue_size: int) -> None:
        """
        Args:
            responses: Of a prompt: rows of a sample's batch.
            max_queue_size: Samples.
        """
        self.max_queue_size = int(max_queue_size)
        name = f"verl-{uuid.uuid4().hex[:12]}"
        self.buffer = RolloutBuffer.create(name, group_size=int(responses), capacity_groups=self.max_queue_size)


class Client:
    """What verl calls, but for the validation queue, which verl does not use. Of any process; one of them, the trainer's, gets samples."""

    def __init__(self, queue: Queue) -> None:
        self.queue_actor = queue
        self._buffer = queue.buffer
        self._dropped = 0

    # ---- the rollouter's

    async def put_sample(self, sample: bytes | None) -> bool:
        """A pickled `RolloutSample`. Whether no other one was dropped for it. None: no more come.

        Raises:
            SchemaError: its batch has another number of rows than a prompt has responses.
        """
        return await asyncio.to_thread(self._put, sample)

    def _put(self, pickled: bytes | None) -> bool:
        if pickled is None:
            self._buffer.close()
            return True
        sample = pickle.loads(pickled)
        batch, sample.full_batch = sample.full_batch, None
        rest = np.full(len(batch), None, object)
        rest[0] = ray.cloudpickle.dumps((sample, batch.meta_info))
        batch.non_tensor_batch[_REST] = rest
        ref, uid, dropped = put_batch(batch), uuid.uuid4().hex, 0
        while True:
            try:
                self._buffer.put(ref, uids=[uid] * len(ref), version=0, timeout_s=0)
            except StoreFullError:
                dropped += self._take(0.0) is not None
            else:
                self._dropped += dropped
                return not dropped

    async def get_statistics(self) -> dict[str, Any]:
        """As verl's. What was dropped, by this client."""
        return await asyncio.to_thread(self.get_statistics_sync)

    def get_statistics_sync(self) -> dict[str, Any]:
        found = self._buffer.stats()
        return {
            "queue_size": found["groups_queued"],
            "total_produced": found["groups_whole"],
            "total_consumed": found["groups_trained"] - self._dropped,
            "dropped_samples": self._dropped,
            "max_queue_size": self.queue_actor.max_queue_size,
        }

    # ---- the trainer's

    async def get_sample(self) -> tuple[bytes | None, int]:
        """The oldest sample, for `pickle.loads` in this process, once, and how many are left. Waits; None in its place when no more come."""
        return await asyncio.to_thread(self.get_sample_sync)

    def get_sample_sync(self) -> tuple[bytes | None, int]:
        while (ref := self._take(_POLL_S)) is None:
            pass
        return (None if ref is _NO_MORE else pickle.dumps(_Sample(ref))), self.get_queue_size_sync()

    async def clear_queue(self) -> None:
        await asyncio.to_thread(self._clear)

    def _clear(self) -> None:
        while self._take(0.0) not in (None, _NO_MORE):
            pass

    def _take(self, timeout_s: float) -> BatchRef | object | None:
        """The oldest sample, which nobody else gets any more. None: there is none within the time."""
        try:
            share = self._buffer.take(uuid.uuid4().int >> 66, 0, 1, timeout_s=timeout_s)
        except GetTimeoutError:
            return None
        if not len(share):
            return _NO_MORE
        self._buffer.commit(share)
        return share.ref

    # ---- anybody's

    async def get_queue_size(self) -> int:
        return await asyncio.to_thread(self.get_queue_size_sync)

    def get_queue_size_sync(self) -> int:
        return self._buffer.stats()["groups_queued"]

    async def get_memory_usage(self) -> dict[str, float]:
        """Of what is stored."""
        found = await asyncio.to_thread(self._buffer.stats)
        nbytes = found["bytes"]
        return {"queue_samples": found["groups_queued"], "estimated_memory_bytes": nbytes, "estimated_memory_mb": nbytes / (1 << 20)}

    async def shutdown(self) -> None:
        """No more come; who waits gets what is left, and then None."""
        await asyncio.to_thread(self._buffer.close)


class _Sample:
    """Unpickles to the sample whose batch is stored. Refs do not leave the process in bytes of which Ray knows nothing."""

    _refs: ClassVar[dict[int, BatchRef]] = {}

    def __init__(self, ref: BatchRef) -> None:
        self._refs[id(ref)] = ref
        self._number = id(ref)

    def __reduce__(self) -> Any:
        return _loaded, (self._number,)


def _loaded(number: int) -> Any:
    batch = _Sample._refs.pop(number).get()
    sample, meta_info = pickle.loads(batch.non_tensor_batch.pop(_REST)[0])
    batch.meta_info.update(meta_info)
    sample.full_batch = batch
    return sample
