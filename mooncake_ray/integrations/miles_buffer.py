"""Miles' buffer between rollouts and training, whose finished groups lie in the pool instead of in the rollout manager's heap.

    train_async.py --fully-async --custom-async-data-buffer-path mooncake_ray.integrations.miles_buffer.DataBuffer …

It reads the settings that Miles' own buffer reads, and decides as that does: what was aborted, or became too old, goes to
`--async-unused-samples-handler`; what the dynamic filter refuses is dropped; a full buffer makes its producer wait. Samples are stored typed
(a token in 4 bytes, routed experts in one each), may be spilled, and come back as they were. Groups whose trajectories are of several samples
are refused.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_ray.errors import ConfigError, GetTimeoutError, SchemaError
from mooncake_ray.integrations.samples import batch_to_samples, samples_to_batch
from mooncake_ray.objects.batch_ref import BatchRef
from mooncake_ray.rollout.buffer import RolloutBuffer
from mooncake_ray.rollout.lent import Share

__all__ = ["DataBuffer"]

_PREFIX = "rollout/fully_async/"
_POLL_S = 1.0
_MOST = 64  # groups that are found too old at once
_NUMBERS = ("rollout_routed_experts", "rollout_indexer_topk")
_UNKNOWN = 1 << 62  # the version of samples that do not say theirs: they never become too old


class DataBuffer:
    """Miles' `DataBuffer`. Of the rollout manager's event loop; ends with its process."""

    def __init__(self, input: Any) -> None:
        """Takes Miles' `DataBufferConstructorInput`.

        Raises:
            ConfigError: there is no room for a group.
        """
        from miles.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter
        from miles.utils.misc import load_function

        args = input.args
        capacity = int(args.async_data_buffer_capacity_factor * args.rollout_batch_size)
        if capacity < 1:
            raise ConfigError(f"async_data_buffer_capacity_factor * rollout_batch_size must be at least 1, got {capacity}")
        self._unused, self._retries = input.unused_handler_fn, args.async_unused_samples_handler == "retry"
        self._filter, self._gatherer = load_function(args.dynamic_sampling_filter_path), MetricGatherer
        self._passes = lambda group: call_dynamic_filter(self._filter, args, group)
        self._buffer = RolloutBuffer.create(
            f"miles-{uuid.uuid4().hex[:12]}",
            group_size=args.n_samples_per_prompt,
            max_staleness=args.max_weight_staleness,
            stale="return",
            capacity_groups=capacity,
        )
        self._entries: dict[str, tuple[Any, type]] = {}  # of groups that are stored: Miles' inputs, without them, and the class of samples
        self._version, self._steps = 0, itertools.count()
        self._begin_metrics()

    def _begin_metrics(self) -> None:
        self._drops, self._aborted, self._stale, self._ages = self._gatherer(), 0, 0, []

    async def put(self, input: Any) -> None:
        """Stores a finished group (Miles' `DataBufferInput`), once there is room.

        Raises:
            SchemaError: a trajectory is of several samples, or there are more or fewer than `n_samples_per_prompt`.
        """
        group = input.group
        if nested := [item for item in group if isinstance(item, list)]:
            raise SchemaError(f"{len(nested)} trajectories of the group are of several samples; this buffer has one for each")
        if any(sample.status.value == "aborted" for sample in group):
            self._aborted += 1
            self._unused(input.prompt_group)
            return
        verdict = self._passes(group)
        if not verdict.keep:
            self._drops.on_dynamic_filter_drop(reason=verdict.reason)
            return
        uid = uuid.uuid4().hex
        self._entries[uid] = input, type(group[0])
        try:
            await asyncio.to_thread(self._store, uid, group)
        except BaseException:
            del self._entries[uid]
            raise
        if {id(sample) for sample in group} & {id(sample) for sample in input.prompt_group}:
            input.prompt_group = None  # the same objects: what is stored has all that is needed
        input.group = None

    def _store(self, uid: str, group: Sequence[Any]) -> None:
        versions = [_UNKNOWN if sample.oldest_weight_version is None else sample.oldest_weight_version for sample in group]
        tokens = [len(sample.tokens) for sample in group]
        self._buffer.put(_narrowed(samples_to_batch(group)), uids=[uid] * len(group), version=versions, tokens=tokens)

    async def get(self, current_version: int | None = None, **_: Any) -> Any:
        """A group to learn from, the one that came first; waits for it."""
        if current_version is not None:
            self._version = max(self._version, current_version)
        while True:
            taking = asyncio.ensure_future(asyncio.to_thread(self._take))
            try:
                share = await asyncio.shield(taking)
            except asyncio.CancelledError:
                taking.add_done_callback(self._give_up)
                raise
            for prompt_group in await asyncio.to_thread(self._too_old):
                self._unused(prompt_group)
            if share is not None:
                break
        if current_version is not None and share.ages[0] > -_UNKNOWN // 2:
            self._ages.append(int(share.ages[0]))
        entry, kind = self._entries.pop(share.uids[0])
        entry.group = await asyncio.to_thread(self._samples, share, kind)
        entry.prompt_group = entry.prompt_group or entry.group
        return entry

    def _take(self) -> Share | None:
        """None: there is none yet."""
        try:
            return self._buffer.take(next(self._steps), self._version, 1, timeout_s=_POLL_S)
        except GetTimeoutError:
            return None

    def _give_up(self, taking: asyncio.Future[Share | None]) -> None:
        if not taking.cancelled() and taking.exception() is None and (share := taking.result()) is not None:
            self._buffer.give_up(share)

    def _samples(self, share: Share, kind: type) -> list[Any]:
        samples = _samples_of(share.ref, kind)
        self._buffer.commit(share)
        return samples

    def _too_old(self) -> list[Any]:
        """Prompts of what has become too old, if they are to be tried again."""
        if (ticket := self._buffer.resume(_MOST)) is None:
            return []
        out = []
        for work in ticket.works:
            entry, kind = self._entries.pop(work.uid)
            if self._retries:
                out.append(entry.prompt_group or _samples_of(work.ref, kind))
        self._stale += len(ticket.works)
        ticket.cancel()
        return out

    def get_metrics(self) -> dict[str, float]:
        """Those of Miles' own buffer, since the last call; and how many bytes are stored."""
        found = self._buffer.stats()
        metrics = {
            f"{_PREFIX}queue_size": found["groups_queued"],
            f"{_PREFIX}stored_bytes": found["bytes"],
            f"{_PREFIX}aborted_groups_filtered": self._aborted,
            f"{_PREFIX}stale_groups_filtered": self._stale,
            **self._drops.collect(),
        }
        if self._ages:
            metrics[f"{_PREFIX}avg_staleness"] = sum(self._ages) / len(self._ages)
            metrics[f"{_PREFIX}max_staleness"] = max(self._ages)
        self._begin_metrics()
        return metrics


def _narrowed(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Numbers of experts, which are int32 in Miles, in as few bytes as they need."""
    for name in _NUMBERS:
        arrays = [array for array in columns.get(name, ()) if isinstance(array, np.ndarray)]
        if arrays and all(array.dtype == np.int32 and array.min(initial=0) >= 0 for array in arrays):
            narrow = np.min_scalar_type(max(int(array.max(initial=0)) for array in arrays))
            columns[name] = [array.astype(narrow) if isinstance(array, np.ndarray) else array for array in columns[name]]
    return columns


def _samples_of(ref: BatchRef, kind: type) -> list[Any]:
    samples = batch_to_samples(ref.get(), kind)
    for sample in samples:
        for name in _NUMBERS:
            if isinstance(array := getattr(sample, name, None), np.ndarray):
                setattr(sample, name, array.astype(np.int32))
    return samples
