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

from mooncake_ray._native import pool
from mooncake_ray.engines.packed import PackedPieces
from mooncake_ray.errors import MooncakeRayError, PlanError, StaleVersionError, SyncTimeoutError
from mooncake_ray.objects import blobs
from mooncake_ray.objects.blobs import Blob
from mooncake_ray.sync.changes import Changes, needed
from mooncake_ray.sync.collective import Meeting, Ring, broadcast_order, receive
from mooncake_ray.sync.member import Agent, this_member
from mooncake_ray.sync.messages import Command, Join, Manifest, State
from mooncake_ray.sync.plans import Origin, Route, load
from mooncake_ray.sync.units import Unit, Units
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.weights.digest import content_digest
from mooncake_ray.weights.patch import Patch
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.shard import views

if TYPE_CHECKING:
    from mooncake_ray.engines.base import EngineAdapter, UpdateInfo

__all__ = ["Engine"]

logger = logging.getLogger("mooncake_ray")

_LEADS, _FOLLOWS = 4, 4  # units at once
_PROGRESS_S = 0.5
_LOOK_S = 0.2  # how soon an update that was given up is noticed


@dataclass
class _Staged:
    """A version that is here, or on its way."""

    epoch: int
    version: int
    units: Units
    digests: np.ndarray
    """uint64: of this rank's boxes."""
    nbytes: int = 0
    """Of the units that are here."""
    changes: Changes | None = None
    """Instead of units."""
    made: list[Blob] = field(default_factory=list)
    """That this rank leads, and others read."""
    here: dict[int, np.ndarray] = field(default_factory=dict)
    """Bytes of units, by number."""


class Engine(Agent):
    """Lives in the process of an engine's rank. What the adapter serves changes only while the group commits."""

    def __init__(self, find: Callable[[], Any], adapter: EngineAdapter, name: str, rank: int, world: int, *, timeout_s: float) -> None:
        super().__init__(find, this_member("engine", name, rank, world))
        self._adapter = adapter
        self._placement = Placement.of(self.member.name, adapter.shard().fragments())
        self._plans: dict[str, Origin | Route] = {}
        self._units: Units | None = None
        self._staged: _Staged | None = None
        self._digests: tuple[int, np.ndarray] | None = None  # a version, and those of this rank's fragments at it
        self._paused = 0.0  # since when; 0: it is not
        self._was_paused_s = 0.0  # if it goes on already, although nobody has told it to
        self._told = threading.Condition()
        self._progress_told = 0.0
        self._leaders: dict[tuple[int, int], tuple[Blob | None, bool]] = {}  # by epoch and unit; see `_led`
        self.start(timeout_s)

    @property
    def version(self) -> int:
        """Of the weights that it has; -1: of none."""
        version = self._adapter.weight_version
        return -1 if version is None else version

    def describe(self) -> Join:
        if self._adapter.poisoned:
            state: State = "poisoned"
        elif self.version < 0:
            state = "joined"
        else:
            state = "paused" if self._paused else "serving"
        return Join(self.member, self._placement, None, self.version, state)

    def close(self) -> None:
        super().close()
        self._forget()

    def let_go(self, epoch: int) -> None:
        if self._staged is not None and self._staged.epoch <= epoch and not self._paused:
            self._forget()

    def hear(self, command: Command) -> None:
        with self._told:
            if command.what == "unit":
                said = command.arguments
                self._leaders[command.epoch, said["unit"]] = said["blob"], said["shared"]
            self._told.notify_all()

    # ---- commands

    def do_stage(self, command: Command) -> np.ndarray:
        """Has every box of the version here. Returns the digests of this rank's boxes."""
        manifest: Manifest = command.arguments["manifest"]
        if manifest.version < self.version:
            raise StaleVersionError(f"{self.member} serves version {self.version}, and is asked to stage {manifest.version}")
        self._forget()
        deadline = Deadline(command.timeout_s)
        origin = self._plan(command.arguments["origin"], manifest.plan, Origin)
        route = self._plan(command.arguments["route"], command.arguments["digest"], Route)
        if self._units is None or self._units.publication is not origin.publication or self._units.delivery is not route.delivery:
            self._units = Units(origin, route, self.member.name)
        staged = self._staged = _Staged(command.epoch, manifest.version, self._units, np.zeros(len(self._units.boxes), np.uint64))
        if (patches := command.arguments["patches"]) is not None:
            self._fetch(staged, patches)
        elif (meeting := command.arguments.get("meeting")) is not None:
            self._receive(staged, meeting, command.arguments["seat"], deadline)
        else:
            self._pull(staged, manifest, deadline)
        with self._told:
            self._leaders = {key: blob for key, blob in self._leaders.items() if key[0] > command.epoch}
        return staged.digests

    def _take(self, staged: _Staged, unit: Unit, data: np.ndarray) -> None:
        """A unit is here."""
        staged.digests[unit.boxes] = unit.regions.digests(data)
        with self._told:
            staged.here[unit.number] = data
            staged.nbytes += len(data)
            last = len(staged.here) == len(staged.units.order)
            if due := last or time.monotonic() - self._progress_told > _PROGRESS_S:
                self._progress_told = time.monotonic()
        if due:
            self.call("progress", self.member.id, staged.epoch, staged.nbytes)

    def _fetch(self, staged: _Staged, patches: Mapping[int, Blob]) -> None:
        """Mode `delta`: gets what changed, and works out what the digests are going to be."""
        publication, delivery, boxes = staged.units.publication, staged.units.delivery, staged.units.boxes
        found: dict[int, Patch] = {}
        for number in needed(publication, delivery, boxes).tolist():
            self.check(staged.epoch)
            found[number] = Patch.parse(blobs.view(patches[number]))
        staged.changes = Changes(self._placement, delivery.box_of[slice(*staged.units.span)], publication, delivery, found)
        targets = list(views(self._placement, self._adapter.shard().buffers()))
        if self._digests is None or self._digests[0] != self.version:
            own = self._placement
            shapes = [own.metas[t].shape for t in own.tensor.tolist()]
            now = [content_digest(target, lo, shape) for target, lo, shape in zip(targets, own.lo.tolist(), shapes, strict=True)]
            self._digests = self.version, np.array(now, np.uint64)
        _, one = np.unique(staged.changes.box_of, return_index=True)  # fragment of each box
        staged.digests = staged.changes.digests(targets, self.version, boxes, self._digests[1][one])

    def _pull(self, staged: _Staged, manifest: Manifest, deadline: Deadline) -> None:
        """Mode `p2p`: reads its regions from the trainers' nodes, and what others lead from theirs."""
        pools = [
            concurrent.futures.ThreadPoolExecutor(n, "mooncake_ray.units") for n in (_LEADS, _FOLLOWS)
        ]  # leads must not wait for others
        try:
            doing = []
            for number in staged.units.order:
                unit = staged.units[number]
                doing.append(pools[not unit.leads].submit(self._lead if unit.leads else self._follow, staged, manifest, unit, deadline))
            for one in concurrent.futures.as_completed(doing):
                one.result()
        finally:
            for threads in pools:
                threads.shutdown(cancel_futures=True)

    def _receive(self, staged: _Staged, meeting: Meeting, seat: int, deadline: Deadline) -> None:
        """Mode `nccl`: takes what it wants of everything that is broadcast."""
        publication, delivery = staged.units.publication, staged.units.delivery
        room = {unit: np.empty(staged.units[unit].nbytes, np.uint8) for unit in staged.units.order}
        wanted: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}  # by object: where to, and the runs
        for unit, out in room.items():
            for number, runs in staged.units[unit].reads:
                wanted.setdefault(number, []).append((out, runs))
        order = broadcast_order(publication)
        owners = sorted(set(publication.objects[:, 0].tolist()))
        device = self._device
        rings: list[Ring] = []
        try:
            for owner in owners:
                size, host = 1 + len(delivery.ranks), self.member.host
                rings.append(Ring(meeting, owner, 1 + seat, size, host, device, deadline, lambda: self.check(staged.epoch)))
            objects = [(owners.index(int(publication.objects[n, 0])), int(publication.object_nbytes[n])) for n in order]
            for number, data in zip(order, receive(rings, objects, device, deadline, lambda: self.check(staged.epoch)), strict=True):
                for out, runs in wanted.get(number, ()):
                    to, from_ = np.uint64(out.ctypes.data), np.uint64(data.ctypes.data)
                    pool.copy(np.stack((runs[:, 1] + to, runs[:, 0] + from_, runs[:, 2]), axis=1))
        finally:
            for ring in rings:
                ring.close()
        for unit, data in room.items():
            self._take(staged, staged.units[unit], data)

    @property
    def _device(self) -> torch.device:
        """Whose collective moves the bytes: that of the engine's own tensors."""
        for tensor in self._adapter.shard().buffers().values():
            return tensor.device
        return torch.device("cpu")

    def do_commit(self, command: Command) -> float:
        """Takes over what is staged. Returns for how many seconds it was paused, up to now."""
        staged = self._staged
        if staged is None or staged.epoch != command.epoch or staged.version != command.arguments["version"]:
            raise StaleVersionError(f"{self.member} has not staged version {command.arguments['version']} in epoch {command.epoch}")
        if self.version == staged.version:  # another rank of this engine could not take it over, and does now
            self._pause()
            return 0.0
        try:
            self._adapter.start_weight_update()
            new: UpdateInfo = {"pieces": self._pieces(staged)} if staged.changes is None else {"apply": staged.changes.apply}
            self._adapter.prepare_weights(new)
            self._pause()
            self._adapter.update_weights(new)
            self._adapter.finish_weight_update(staged.version)
        except BaseException:
            self._adapter.abort_weight_update()
            self._digests = None
            raise
        own = np.searchsorted(staged.units.boxes, staged.units.delivery.box_of[slice(*staged.units.span)])
        self._digests = staged.version, staged.digests[own]
        paused = time.monotonic() - self._paused
        self._was_paused_s = 0.0 if getattr(self._adapter, "is_paused", True) else paused
        return paused

    def _pause(self) -> None:
        begin = time.monotonic()
        self._adapter.pause()
        self._paused = self._paused or begin

    def do_resume(self, command: Command) -> float:
        """The other ranks of this engine have it, too. Returns for how many seconds it was paused."""
        self._adapter.resume()
        self._forget()
        paused = self._was_paused_s or time.monotonic() - self._paused
        self._paused = self._was_paused_s = 0.0
        return paused

    # ---- units

    def _lead(self, staged: _Staged, manifest: Manifest, unit: Unit, deadline: Deadline) -> None:
        """Gathers a unit, and tells the others that want it."""
        blob = self._gathered(staged, manifest, unit, deadline)
        if not unit.alone:
            self.call("staged", self.member.id, staged.epoch, unit.number, blob)
        self._take(staged, unit, blobs.view(blob))

    def _gathered(self, staged: _Staged, manifest: Manifest, unit: Unit, deadline: Deadline) -> Blob:
        self.check(staged.epoch)
        parts = [manifest.blobs[number].part(runs) for number, runs in unit.reads]
        blob = blobs.gather(parts, unit.nbytes, timeout_s=deadline.left(f"unit {unit.number}"))
        staged.made.append(blob)
        return blob

    def _follow(self, staged: _Staged, manifest: Manifest, unit: Unit, deadline: Deadline) -> None:
        """Gets a unit from the rank that leads it; from the trainers, if that cannot be."""
        why: object = "it died"
        blob, shared = self._led(staged.epoch, unit.number, deadline)
        if blob is not None:
            try:
                if not shared and not blobs.is_here(blob):  # whoever leads has to serve no more than it gets: nobody need pass it on
                    blob = blobs.gather([blob.whole()], unit.nbytes, timeout_s=deadline.left(f"unit {unit.number}"))
                    staged.made.append(blob)
                self._take(staged, unit, blobs.view(blob))
                return
            except MooncakeRayError as e:
                why = e
        logger.warning("mooncake_ray: %s gets unit %d from the trainers, not from its leader: %s", self.member, unit.number, why)
        self._take(staged, unit, blobs.view(self._gathered(staged, manifest, unit, deadline)))

    def _led(self, epoch: int, unit: int, deadline: Deadline) -> tuple[Blob | None, bool]:
        """Where the leader of a unit has it (None: it will not), and whether others of this node get it too."""
        with self._told:
            while (epoch, unit) not in self._leaders:
                self.check(epoch)
                left = deadline.at - time.monotonic()
                if left <= 0:
                    raise SyncTimeoutError(f"{self.member}: the leader of unit {unit} has not got it within {deadline.timeout_s:g} s")
                self._told.wait(min(left, _LOOK_S))
            return self._leaders[epoch, unit]

    def _pieces(self, staged: _Staged) -> PackedPieces:
        """For each of this rank's fragments what belongs there."""
        delivery = staged.units.delivery
        box = delivery.box_of[slice(*staged.units.span)]
        here = sorted(staged.here)
        array = np.searchsorted(np.array(here, np.int64), delivery.unit[box])
        return PackedPieces(self._placement, [staged.here[unit] for unit in here], array, delivery.offset[box])

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
            staged.here.clear()
            blobs.drop(staged.made)
