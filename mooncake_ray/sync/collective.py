"""Mode `nccl`: published objects are broadcast, each from its owner to all ranks of all engines. NCCL between GPUs, Gloo between CPUs.

Each owner has a group of its own with the engines' ranks, so trainers get nothing of each other's. Groups are stateless: no global process
group is touched, and none is needed. Everybody goes through the objects in the same order; memory is bounded by two of them.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mooncake_ray.errors import GetTimeoutError, SyncAbortedError, SyncTimeoutError
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.weights.laid import tensor_over
from mooncake_ray.weights.publication import Publication

__all__ = ["Host", "Meeting", "Ring", "broadcast", "broadcast_order", "receive"]

_LOOK_S = 0.001
_CONNECT_S = 20.0


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a broadcast find each other."""

    host: str
    port: int
    tag: str
    """Of this update."""


class Host:
    """Keeps a meeting open."""

    def __init__(self, host: str, tag: str, timeout_s: float) -> None:
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=timeout_s))
        self.meeting = Meeting(host, self.store.port, tag)


class Ring:
    """One owner's group: rank 0 sends, the others receive."""

    def __init__(
        self,
        meeting: Meeting,
        owner: int,
        rank: int,
        size: int,
        host: str,
        device: torch.device,
        deadline: Deadline,
        check: Callable[[], None],
    ) -> None:
        """Waits for the others. `host`: this process's own address, from which it is to be reached. `check` raises if it was given up.

        Raises SyncTimeoutError.
        """
        what = f"the {size} ranks of a broadcast"
        try:
            timeout = datetime.timedelta(seconds=deadline.left(what))
            store = dist.PrefixStore(f"{meeting.tag}/{owner}", dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout))
            store.set(f"here/{rank}", "")
            everybody = [f"here/{n}" for n in range(size)]
            while not store.check(everybody):  # what comes next cannot be ended, so nobody must be missing by then
                check()
                deadline.left(what)
                time.sleep(_LOOK_S)
            self._group: Any
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)
            else:
                gloo = dist.ProcessGroupGloo._Options()
                gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
                gloo._timeout = min(timeout, datetime.timedelta(seconds=_CONNECT_S))
                self._group = dist.ProcessGroupGloo(store, rank, size, gloo)
                self._group.set_timeout(timeout)
        except (RuntimeError, dist.DistError, GetTimeoutError) as e:
            check()
            raise SyncTimeoutError(f"{what} have not met within {deadline.timeout_s:g} s: {e}") from e

    def start(self, tensor: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._group.broadcast([tensor], options)

    def close(self) -> None:
        """What is still under way is given up. Gloo's own end would wait for it: a thread does."""
        group, self._group = self._group, None
        threading.Thread(target=_end, args=[group], name="mooncake_ray.gloo", daemon=True).start()


def _end(group: Any) -> None:
    group.abort()


def broadcast_order(publication: Publication) -> list[int]:
    """The objects of a publication as everybody goes through them: by bucket, so that owners send side by side."""
    return np.lexsort((publication.objects[:, 0], publication.objects[:, 1])).tolist()


def _finish(work: Any, deadline: Deadline, check: Callable[[], None]) -> None:
    """Waits for a broadcast, and looks meanwhile whether it was given up: Gloo's own wait cannot be ended."""
    while not work.is_completed():
        check()
        if deadline.over:
            raise SyncTimeoutError(f"a broadcast was not done within {deadline.timeout_s:g} s")
        time.sleep(_LOOK_S)
    try:
        work.wait()
    except RuntimeError as e:
        check()
        raise SyncAbortedError(f"a broadcast failed: {e}") from e


def broadcast(ring: Ring, objects: Sequence[np.ndarray], device: torch.device, deadline: Deadline, check: Callable[[], None]) -> None:
    """The owner's side: sends its objects, in order. At most two are under way."""
    before: Any = None
    for data in objects:
        now = ring.start(tensor_over(data).to(device))
        if before is not None:
            _finish(before, deadline, check)
        before = now
    if before is not None:
        _finish(before, deadline, check)


def receive(
    rings: Sequence[Ring], objects: Sequence[tuple[int, int]], device: torch.device, deadline: Deadline, check: Callable[[], None]
) -> Iterator[np.ndarray]:
    """The engines' side: each object's bytes, in order; valid until the next.

    Args:
        objects: `(index of the owner's ring, nbytes)`.
    """
    most = max((n for _, n in objects), default=0)
    buffers = [torch.empty(most, dtype=torch.uint8, device=device) for _ in range(2)]

    def start(i: int) -> Any:
        owner, nbytes = objects[i]
        return rings[owner].start(buffers[i % 2][:nbytes])

    work = start(0) if objects else None
    for i, (_, nbytes) in enumerate(objects):
        _finish(work, deadline, check)
        got = buffers[i % 2][:nbytes].cpu().numpy()
        if i + 1 < len(objects):
            work = start(i + 1)
        yield got
