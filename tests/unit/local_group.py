"""A group without Ray: coordinator, trainers and engines as they are, in threads of this process. Only what carries is replaced: calls of the
coordinator go to its loop, pickled as Ray would; the pool is a dict; a broadcast is a list."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import pickle
import threading
import time
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from mooncake_ray.engines.torch_module import TorchModuleEngine
from mooncake_ray.errors import ObjectNotFoundError, SyncTimeoutError
from mooncake_ray.objects import blobs
from mooncake_ray.objects.blobs import Blob
from mooncake_ray.sync import engine, lives, trainer, versions
from mooncake_ray.sync.collective import Meeting
from mooncake_ray.sync.coordinator import Coordinator, Settings
from mooncake_ray.sync.member import MEMBER_CALL_S, Agent
from mooncake_ray.sync.messages import Member
from mooncake_ray.sync.report import GroupStatus, SyncReport
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.weights.shard import Shard

S = 100.0
_LOOK_S = 0.002
_DIRT = 0xA5  # what is in memory before anybody writes there


class Memory:
    """In place of the pool."""

    def __init__(self) -> None:
        self.there: dict[bytes, np.ndarray] = {}
        self.most = 0
        """Bytes that were there at one time."""
        self.spoil: Callable[[str, np.ndarray], None] = lambda note, data: None
        """Gets what comes in, before anybody reads it: "weights, version 3", "weights, 2 to 3", "unit"; and "received" for each
        receiver of a broadcast."""
        self._numbers = itertools.count()
        self.unwritten: weakref.WeakValueDictionary[bytes, _Reserved] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def Reserved(self, nbytes: int, *, timeout_s: float, note: str = "") -> _Reserved:
        out = _Reserved(self, self._blob(nbytes), note)
        self.unwritten[out.blob.id] = out
        return out

    def write(self, nbytes: int, fill: Callable[[np.ndarray], None], *, timeout_s: float, note: str = "") -> Blob:
        return self.Reserved(nbytes, timeout_s=timeout_s, note=note).write(fill)

    def gather(self, parts: Sequence[Any], nbytes: int, *, timeout_s: float) -> Blob:
        data = np.full(nbytes, _DIRT, np.uint8)
        for part in parts:
            source = self.view(Blob(b"", part.id, 0))
            for begin, to, n in part.runs.astype(np.int64).tolist():
                data[to : to + n] = source[begin : begin + n]
        return self.keep(self._blob(nbytes), data, "unit")

    def is_here(self, blob: Blob) -> bool:
        return False

    def view(self, blob: Blob) -> np.ndarray:
        while blob.id in self.unwritten:
            time.sleep(_LOOK_S)
        try:
            out = self.there[blob.id][:]
        except KeyError:
            raise ObjectNotFoundError(f"{blob.id!r} was dropped") from None
        out.flags.writeable = False
        return out

    def drop(self, what: Iterable[Blob]) -> None:
        for blob in what:
            self.there.pop(blob.id, None)

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for data in list(self.there.values()))

    def _blob(self, nbytes: int) -> Blob:
        with self._lock:
            return Blob(b"", b"%d" % next(self._numbers), nbytes)

    def keep(self, blob: Blob, data: np.ndarray, note: str) -> Blob:
        self.spoil(note, data)
        with self._lock:
            self.there[blob.id] = data
            self.unwritten.pop(blob.id, None)
            self.most = max(self.most, self.nbytes)
        return blob


class _Reserved:
    def __init__(self, memory: Memory, blob: Blob, note: str) -> None:
        self.blob, self._memory, self._note = blob, memory, note

    def write(self, fill: Callable[[np.ndarray], None]) -> Blob:
        data = np.full(self.blob.nbytes, _DIRT, np.uint8)
        fill(data)
        return self._memory.keep(self.blob, data, self._note)


class _Work:
    def __init__(self, sent: list[torch.Tensor], number: int, tensor: torch.Tensor, memory: Memory) -> None:
        self._sent, self._number, self._tensor, self._memory = sent, number, tensor, memory

    def is_completed(self) -> bool:
        return len(self._sent) > self._number

    def wait(self) -> None:
        self._tensor.copy_(self._sent[self._number])
        self._memory.spoil("received", self._tensor.numpy())


class _Rings:
    """In place of Gloo."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.sent: dict[tuple[str, int], list[torch.Tensor]] = {}
        self._here: dict[tuple[str, int], set[int]] = {}
        self._lock = threading.Lock()

    def __call__(
        self, meeting: Meeting, owner: int, rank: int, size: int, host: str, device: Any, deadline: Deadline, check: Callable[[], None]
    ) -> _Ring:
        with self._lock:
            here = self._here.setdefault((meeting.tag, owner), set())
            here.add(rank)
        while len(here) < size:
            check()
            if deadline.over:
                raise SyncTimeoutError(f"{size} ranks have not met")
            time.sleep(_LOOK_S)
        with self._lock:
            return _Ring(self.sent.setdefault((meeting.tag, owner), []), rank, self.memory)


class _Ring:
    def __init__(self, sent: list[torch.Tensor], rank: int, memory: Memory) -> None:
        self._sent, self._rank, self._memory, self._number = sent, rank, memory, 0

    def start(self, tensor: torch.Tensor) -> _Work:
        work = _Work(self._sent, self._number, tensor, self._memory)
        if self._rank == 0:
            self._sent.append(tensor.clone())
        self._number += 1
        return work

    def close(self) -> None:
        pass


class Group:
    """With the methods of `WeightSyncGroup`. To be used in a `with`, one at a time."""

    def __init__(
        self,
        *,
        mode: str = "auto",
        bucket_bytes: int = 64 << 20,
        liveness_s: float = 60.0,
        ignore: tuple[str, ...] = (),
        verify: bool = True,
    ) -> None:
        self.memory = Memory()
        self.members: list[Agent] = []
        self.engines: dict[str, list[TorchModuleEngine]] = {}
        self._settings = Settings("local", "job", mode, liveness_s, bucket_bytes, ignore, verify)
        self._kept: dict[bytes, bytes] = {}
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._coordinator: Coordinator | None = None
        self._stack = contextlib.ExitStack()
        self.leave = types.SimpleNamespace(remote=self._leave)  # as members find it at a Ray actor

    def __enter__(self) -> Group:
        keep = types.SimpleNamespace(
            _internal_kv_get=lambda key, namespace: self._kept.get(key),
            _internal_kv_put=lambda key, value, overwrite, namespace: self._kept.update({key: value}),
        )
        rings = _Rings(self.memory)
        for patch in (
            *(
                mock.patch.object(blobs, name, getattr(self.memory, name))
                for name in ("Reserved", "write", "gather", "is_here", "view", "drop")
            ),
            mock.patch.object(versions, "internal_kv", keep),
            mock.patch.object(lives, "is_over", return_value=False),
            mock.patch.object(Agent, "call", _call),
            mock.patch.object(Agent, "tell", lambda member, method, *arguments: self.tell(method, *arguments)),
            *(mock.patch.object(module, "this_member", _this_member) for module in (trainer, engine)),
            *(mock.patch.object(module, "Ring", rings) for module in (trainer, engine)),
            mock.patch.object(trainer, "Host", lambda host, tag, timeout_s: types.SimpleNamespace(meeting=Meeting(host, 0, tag))),
        ):
            self._stack.enter_context(patch)
        self._thread = threading.Thread(target=self._loop.run_forever, name="mooncake_ray.local", daemon=True)
        self._thread.start()
        self.start_coordinator()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.close()
        self.kill_coordinator()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(S)
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._stack.close()

    # ---- the coordinator

    def start_coordinator(self) -> None:
        async def begin() -> None:
            self._coordinator = Coordinator(self._settings)

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result(S)

    def kill_coordinator(self) -> None:
        """What it was asked is asked again, of the next one."""

        async def end() -> None:
            self._coordinator = None
            for task in asyncio.all_tasks():
                if task is not asyncio.current_task():
                    task.cancel()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(S)

    def _leave(self, id: str) -> None:
        if self._coordinator is not None:
            self.ask("leave", id)

    def ask(self, method: str, *arguments: Any, timeout_s: float = S, given_up: Callable[[], bool] = lambda: False) -> Any:
        end = time.monotonic() + timeout_s
        said = pickle.dumps(arguments)
        while time.monotonic() < end and not given_up():
            if (there := self._coordinator) is None:
                time.sleep(_LOOK_S)
                continue
            future = asyncio.run_coroutine_threadsafe(getattr(there, method)(*pickle.loads(said)), self._loop)
            try:
                return pickle.loads(pickle.dumps(future.result(max(0.001, end - time.monotonic()))))
            except concurrent.futures.CancelledError:
                continue
            except TimeoutError:
                if future.done() and not future.cancelled():
                    raise
                future.cancel()
        raise SyncTimeoutError(f"the coordinator has not answered {method!r} within {timeout_s:g} s")

    def tell(self, method: str, *arguments: Any) -> None:
        if (there := self._coordinator) is not None:
            said = pickle.loads(pickle.dumps(arguments))
            asyncio.run_coroutine_threadsafe(getattr(there, method)(*said), self._loop)

    # ---- members

    def trainer(self, shard: Shard, rank: int, world: int) -> trainer.Trainer:
        member = trainer.Trainer(lambda: self, shard, rank, world, timeout_s=S)
        self.members.append(member)
        return member

    def engine(self, shard: Shard | TorchModuleEngine, name: str, rank: int = 0, world: int = 1) -> engine.Engine:
        """With a `TorchModuleEngine` of its own, unless there is one."""
        adapter = shard if isinstance(shard, TorchModuleEngine) else TorchModuleEngine(torch.nn.Module(), shard=shard)
        member = engine.Engine(lambda: self, adapter, name, rank, world, timeout_s=S)
        self.members.append(member)
        self.engines.setdefault(name, []).append(adapter)
        return member

    def drop(self, member: Agent) -> None:
        """As if its process had ended: it says nothing any more, and what it had is gone."""
        self.members.remove(member)
        member.close()

    # ---- versions

    def publish(self, version: int | None = None, *, timeout_s: float = S) -> int:
        return self.ask("publish", version, f"publish-{uuid.uuid4().hex}", timeout_s, timeout_s=timeout_s + 5)

    def sync(self, version: int | None = None, *, mode: str = "", timeout_s: float = S) -> SyncReport:
        return self.ask("sync", version, f"sync-{uuid.uuid4().hex}", mode, timeout_s, timeout_s=timeout_s + 5)

    def wait_for(self, version: int, engines: list[str] | None = None, timeout_s: float = S) -> int:
        return self.ask("wait_for", version, engines, timeout_s, timeout_s=timeout_s + 5)

    def status(self) -> GroupStatus:
        return self.ask("status")

    def versions(self) -> dict[str, int]:
        return {name: e.version for name, e in self.status().engines.items()}


def _call(self: Agent, method: str, *arguments: Any, timeout_s: float = MEMBER_CALL_S) -> Any:
    try:
        return self._find().ask(method, *arguments, timeout_s=timeout_s, given_up=self._closed.is_set)
    except SyncTimeoutError:
        if not self._closed.is_set():
            raise


def _this_member(role: Any, unit: str, rank: int, world: int) -> Member:
    return Member(uuid.uuid4().hex, role, unit, rank, world, "127.0.0.1", "")
