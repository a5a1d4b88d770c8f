"""`WeightSyncGroup`: the weight plane as trainers, engines and drivers use it."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import ray

from mooncake_ray.errors import ConfigError, SyncTimeoutError
from mooncake_ray.objects import session
from mooncake_ray.sync.choice import Mode, check
from mooncake_ray.sync.coordinator import Coordinator, Settings
from mooncake_ray.sync.engine import Engine
from mooncake_ray.sync.report import GroupStatus, SyncReport
from mooncake_ray.sync.trainer import Trainer
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.shard import Shard

if TYPE_CHECKING:
    from mooncake_ray.engines.base import EngineAdapter

__all__ = ["WeightSyncGroup"]

_NAMESPACE = "mooncake_ray"
_GRACE_S = 5.0
_JOIN_S = 120.0
_END_S = 15.0
_PROGRESS_S = 1.0


def _actor_name(name: str) -> str:
    return f"weight-sync:{name}"


class WeightSyncGroup:
    """Trainers and engines that share the versions of one model. A handle: cheap, may be pickled and made anew by name anywhere in the cluster.

        group = WeightSyncGroup("policy")                        # anywhere; the first one begins it
        group.trainer(ModuleSource(model), rank, world)          # in each trainer rank's process
        group.engine(adapter, "engine-0", rank, world)           # in each engine rank's process
        group.sync()                                             # in the driver: the engines have what the trainers have

    Every call has a deadline (`timeout_s`, seconds) and raises SyncTimeoutError when it is over; what engines served before, they serve on.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        mode: Mode = "auto",
        bucket_bytes: int = 64 << 20,
        liveness_s: float = 30.0,
        ignore: Collection[str] = (),
        verify: bool = True,
    ) -> None:
        """Begins the group, or finds it if there is one of that name, whose settings then stay as they are. It ends with `shutdown`, or
        with the job.

        Args:
            mode: How versions move unless `sync` says otherwise.
            bucket_bytes: Layers travel together up to so many bytes.
            liveness_s: A member that was not heard of for so long is dead.
            ignore: Names of tensors that trainers have and no engine wants.
            verify: Compare content digests of what arrived with those of what was published, before anything is applied.
        """
        if bucket_bytes < 1 or liveness_s <= 0:
            raise ConfigError(f"bucket_bytes and liveness_s must be positive, got {bucket_bytes} and {liveness_s}")
        self.name = name
        check(mode)
        job = ray.get_runtime_context().get_job_id()
        settings = Settings(name, job, mode, liveness_s, bucket_bytes, tuple(sorted(ignore)), verify)
        self._begin(settings)

    def _begin(self, settings: Settings) -> None:
        actor = ray.remote(Coordinator).options(
            name=_actor_name(self.name),
            namespace=_NAMESPACE,
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=10_000,
            lifetime="detached",
        )
        self._handle = actor.remote(settings)
        session.current()

    def __reduce__(self) -> Any:
        return _found, (self.name,)

    @classmethod
    def find(cls, name: str = "default") -> WeightSyncGroup:
        """The group of that name, which somebody has begun. Raises ValueError."""
        return _found(name)

    def trainer(self, shard: Shard, rank: int, world: int, *, timeout_s: float = _JOIN_S) -> Trainer:
        """Makes this process a rank of the trainers, for as long as the result lives (and is not closed). All `world` ranks do."""
        return Trainer(_finder(self.name), shard, rank, world, timeout_s=timeout_s)

    def engine(self, adapter: EngineAdapter, name: str, rank: int = 0, world: int = 1, *, timeout_s: float = _JOIN_S) -> Engine:
        """Makes this process a rank of the engine `name`. An engine that joins later, or again, is brought to the group's version."""
        return Engine(_finder(self.name), adapter, name, rank, world, timeout_s=timeout_s)

    def publish(self, version: int | None = None, *, timeout_s: float = 300.0) -> int:
        """Has the trainers publish what they hold now, as `version` (by default the next). When it returns they may train on."""
        return self._call("publish", version, f"publish-{uuid.uuid4().hex}", timeout_s, timeout_s=timeout_s)

    def sync(
        self,
        version: int | None = None,
        *,
        mode: Mode | None = None,
        timeout_s: float = 300.0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> SyncReport:
        """Brings every engine to a version: the last one published if engines have not got it yet, else one that is published now.

        Args:
            on_progress: Called about once a second with the bytes that were moved and those that will be.

        Raises:
            SyncAbortedError: it could not be moved; nothing has changed for any engine.
            SyncTimeoutError: not done in time; nothing has changed for any engine, or those that did apply it have it.
            PlanError: layouts of trainers and engines do not fit.
            ChecksumError: bytes that arrived were wrong; nothing has changed for any engine.
        """
        ref = self.async_sync(version, mode=mode, timeout_s=timeout_s)
        end = time.monotonic() + timeout_s + _GRACE_S
        while True:
            left = max(0.001, end - time.monotonic())
            ready, _ = ray.wait([ref], timeout=min(left, _PROGRESS_S) if on_progress is not None else left)
            if ready or time.monotonic() >= end:
                return _result(ref, 0.001, timeout_s, "sync")
            if on_progress is not None:
                now = self.status()
                on_progress(now.moved_bytes, now.total_bytes)

    def async_sync(self, version: int | None = None, *, mode: Mode | None = None, timeout_s: float = 300.0) -> ray.ObjectRef:
        """As `sync`, and does not wait: returns a ref of the report (or the error), for `ray.get`, `ray.wait` or `await`."""
        if mode is not None:
            check(mode)
        return self._handle.sync.remote(version, f"sync-{uuid.uuid4().hex}", mode or "", timeout_s)

    def versions(self) -> Mapping[str, int]:
        """What each engine serves; -1: nothing."""
        return {name: engine.version for name, engine in self.status().engines.items()}

    def wait_for(self, version: int, *, engines: Collection[str] | None = None, timeout_s: float = 300.0) -> int:
        """Waits until those engines (by default all) serve that version or a newer one; returns the oldest that one of them serves."""
        return self._call("wait_for", version, None if engines is None else list(engines), timeout_s, timeout_s=timeout_s)

    def metas(self, *, timeout_s: float = 30.0) -> tuple[ParamMeta, ...]:
        """The tensors of the model, whole, by the names that trainers and engines share; waits until all trainer ranks have joined."""
        return self._call("metas", timeout_s, timeout_s=timeout_s)

    def status(self, *, timeout_s: float = 30.0) -> GroupStatus:
        """How the group is."""
        return self._call("status", timeout_s=timeout_s)

    def shutdown(self) -> None:
        """Ends the group: its members leave, engines serve on what they have, and what was published is gone."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._handle.end.remote(), timeout=_END_S)
        ray.kill(self._handle)

    def _call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        return _result(getattr(self._handle, method).remote(*arguments), timeout_s + _GRACE_S, timeout_s, method)


def _result(ref: ray.ObjectRef, wait_s: float, timeout_s: float, what: str) -> Any:
    try:
        return ray.get(ref, timeout=wait_s)
    except ray.exceptions.GetTimeoutError:
        raise SyncTimeoutError(f"{what}: the coordinator has not answered within {timeout_s:g} s") from None
    except ray.exceptions.RayTaskError as e:
        if isinstance(e.cause, Exception):
            raise e.cause from None
        raise


def _finder(name: str) -> Callable[[], Any]:
    return lambda: ray.get_actor(_actor_name(name), namespace=_NAMESPACE)


def _found(name: str) -> WeightSyncGroup:
    out = WeightSyncGroup.__new__(WeightSyncGroup)
    out.name, out._handle = name, _finder(name)()
    return out
