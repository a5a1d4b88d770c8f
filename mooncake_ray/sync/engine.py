"""An engine's rank: stages a version beside what it serves, and takes it over when the group says so."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mooncake_ray.errors import MooncakeRayError, PlanError, StaleVersionError, SyncTimeoutError
from mooncake_ray.objects import blobs
from mooncake_ray.objects.blobs import Blob
from mooncake_ray.sync.member import Agent, this_member
from mooncake_ray.sync.messages import Command, Join, Manifest
from mooncake_ray.sync.plans import Origin, Route, load
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.plan import lower

if TYPE_CHECKING:
    from mooncake_ray.engines.base import EngineAdapter

__all__ = ["Engine"]

logger = logging.getLogger("mooncake_ray")

_UNITS_AT_ONCE = 4
_LOOK_S = 0.2  # how soon an update that was given up is noticed


@dataclass
class _Staged:
    """A version that is here, or on its way."""

    epoch: int
    version: int
    route: Route
    made: list[Blob] = field(default_factory=list)
    """That this rank leads, and others read."""
    units: dict[int, np.ndarray] = field(default_factory=dict)


class Engine(Agent):
    """Lives in the process of an engine's rank. What the adapter serves changes only while the group commits."""

    def __init__(self, find: Callable[[], Any], adapter: EngineAdapter, name: str, rank: int, world: int, *, timeout_s: float) -> None:
        super().__init__(find, this_member("engine", name, rank, world))
        self._adapter = adapter
        self._placement = Placement.of(self.member.name, adapter.shard().fragments())
        self._plans: dict[str, Origin | Route] = {}
        self._staged: _Staged | None = None
        self._version, self._poisoned = -1, False
        self._told = threading.Condition()
        self._leaders: dict[tuple[int, int], Blob] = {}  # epoch and unit
        self.start(timeout_s)

    @property
    def version(self) -> int:
        """What it serves; -1: nothing that came from the group."""
        return self._version

    def describe(self) -> Join:
        state = "poisoned" if self._poisoned else "serving" if self._version >= 0 else "joined"
        return Join(self.member, self._placement, None, self._version, state)

    def close(self) -> None:
        super().close()
        self._forget()

    def hear(self, command: Command) -> None:
        with self._told:
            if command.what == "unit":
                self._leaders[command.epoch, command.arguments["unit"]] = command.arguments["blob"]
            self._told.notify_all()

    # ---- commands

    def do_stage(self, command: Command) -> np.ndarray:
        """Has every box of the version here. Returns the digests of this rank's boxes."""
        manifest: Manifest = command.arguments["manifest"]
        if manifest.version < self._version:
            raise StaleVersionError(f"{self.member} serves version {self._version}, and is asked to stage {manifest.version}")
        self._forget()
        deadline = Deadline(command.timeout_s)
        origin = self._plan(command.arguments["origin"], manifest.plan, Origin)
        route = self._plan(command.arguments["route"], command.arguments["digest"], Route)
        staged = self._staged = _Staged(command.epoch, manifest.version, route)
        delivery = route.delivery
        me = delivery.ranks.index(self.member.name)
        units = delivery.units_of(self.member.name).tolist()
        led = [u for u in units if delivery.leader[u] == me]
        with concurrent.futures.ThreadPoolExecutor(_UNITS_AT_ONCE, "mooncake_ray.units") as threads:
            leading = [threads.submit(self._lead, staged, origin, manifest, unit, deadline) for unit in led]
            try:
                for unit in units:
                    if delivery.leader[unit] != me:
                        self._follow(staged, origin, manifest, unit, deadline)
                for lead in leading:
                    lead.result()
            except BaseException:
                for lead in leading:
                    lead.cancel()
                raise
        with self._told:
            self._leaders = {key: blob for key, blob in self._leaders.items() if key[0] > command.epoch}
        return np.zeros(len(route.boxes(self.member.name)), np.uint64)

    def do_commit(self, command: Command) -> float:
        """Takes over what is staged. Returns for how many seconds it was paused, up to now."""
        staged = self._staged
        if staged is None or staged.epoch != command.epoch or staged.version != command.arguments["version"]:
            raise StaleVersionError(f"{self.member} has not staged version {command.arguments['version']} in epoch {command.epoch}")
        begin = time.monotonic()
        self._adapter.pause()
        try:
            self._adapter.start_weight_update()
            self._poisoned = True  # until all of it is there
            self._adapter.update_weights({"slots": self._slots(staged)})
            self._adapter.finish_weight_update(str(staged.version))
        except BaseException:
            self._adapter.abort_weight_update()
            raise
        self._version, self._poisoned = staged.version, False
        return time.monotonic() - begin

    def do_resume(self, command: Command) -> None:
        """The other ranks of this engine have it, too."""
        self._adapter.resume()
        self._forget()

    # ---- units

    def _lead(self, staged: _Staged, origin: Origin, manifest: Manifest, unit: int, deadline: Deadline) -> None:
        """Gathers a unit, and tells the others that want it."""
        blob = self._gathered(staged, origin, manifest, unit, deadline)
        if len(staged.route.delivery.members(unit)) > 1:
            self.call("staged", self.member.id, staged.epoch, unit, blob)

    def _gathered(self, staged: _Staged, origin: Origin, manifest: Manifest, unit: int, deadline: Deadline) -> Blob:
        self.check(staged.epoch)
        reads = lower(origin.publication, staged.route.delivery, unit)
        parts = []
        ends = np.searchsorted(reads.runs[:, 0], np.arange(len(reads.objects) + 1))
        for i, number in enumerate(reads.objects.tolist()):
            parts.append(manifest.blobs[number].part(np.ascontiguousarray(reads.runs[ends[i] : ends[i + 1], 1:])))
        nbytes = int(staged.route.delivery.unit_nbytes[unit])
        blob = blobs.gather(parts, nbytes, timeout_s=deadline.left(f"unit {unit}"))
        staged.made.append(blob)
        staged.units[unit] = blobs.view(blob)
        return blob

    def _follow(self, staged: _Staged, origin: Origin, manifest: Manifest, unit: int, deadline: Deadline) -> None:
        """Gets a unit from the rank that leads it; from the trainers, if that cannot be."""
        blob = self._led(staged.epoch, unit, deadline)
        try:
            staged.units[unit] = blobs.view(blob)
        except MooncakeRayError as e:
            logger.warning("mooncake_ray: %s gets unit %d from the trainers, not from its leader: %s", self.member, unit, e)
            self._gathered(staged, origin, manifest, unit, deadline)

    def _led(self, epoch: int, unit: int, deadline: Deadline) -> Blob:
        with self._told:
            while (blob := self._leaders.get((epoch, unit))) is None:
                self.check(epoch)
                left = deadline.at - time.monotonic()
                if left <= 0:
                    raise SyncTimeoutError(f"{self.member}: the leader of unit {unit} has not got it within {deadline.timeout_s:g} s")
                self._told.wait(min(left, _LOOK_S))
            return blob

    def _slots(self, staged: _Staged) -> list[torch.Tensor]:
        """For each of this rank's fragments what belongs there, in a packed tensor of the box's shape."""
        delivery, p = staged.route.delivery, self._placement
        first, _ = staged.route.spans[self.member.name]
        units = {unit: torch.from_numpy(_writable(array)) for unit, array in staged.units.items()}
        out = []
        for i in range(len(p)):
            box = int(delivery.box_of[first + i])
            offset, nbytes = int(delivery.offset[box]), int(delivery.nbytes[box])
            dtype = getattr(torch, p.metas[p.tensor[i]].dtype)
            slot = units[int(delivery.unit[box])][offset : offset + nbytes].view(dtype)
            out.append(slot.view((p.hi[i] - p.lo[i]).tolist()))
        return out

    def _plan(self, blob: Blob, digest: str, kind: type[Any]) -> Any:
        """A plan, by the digest that it must have."""
        if digest not in self._plans:
            plan = load(blob)
            found = plan.publication.digest if isinstance(plan, Origin) else plan.delivery.digest
            if not isinstance(plan, kind) or found != digest:
                raise PlanError(f"{self.member} got a plan with digest {found[:16]} instead of the coordinator's {digest[:16]}")
            kept: Mapping[str, Origin | Route] = {d: p for d, p in self._plans.items() if not isinstance(p, kind)}
            self._plans = dict(kept) | {digest: plan}
        return self._plans[digest]

    def _forget(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.units.clear()
            blobs.drop(staged.made)


def _writable(array: np.ndarray) -> np.ndarray:
    """The same bytes, for torch, which wants to be able to write; nobody does."""
    return np.asarray(memoryview(array).cast("B")) if array.flags.writeable else _as_writable(array)


def _as_writable(array: np.ndarray) -> np.ndarray:
    out: np.ndarray = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data))
    return out
