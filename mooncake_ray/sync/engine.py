"""An engine's rank: stages a version beside what it serves, and takes it over when the group says so."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
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
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.weights.digest import content_digest
from mooncake_ray.weights.patch import Patch, Regions
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.plan import Delivery, Publication, Reads, lower
from mooncake_ray.weights.shard import views

if TYPE_CHECKING:
    from mooncake_ray.engines.base import EngineAdapter

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
    route: Route
    boxes: np.ndarray
    """int64: this rank's, rising."""
    digests: np.ndarray
    """uint64: of these."""
    nbytes: int = 0
    """Of the units that are here."""
    changes: Changes | None = None
    """Instead of units."""
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
        self._digests: tuple[int, np.ndarray] | None = None  # a version, and those of this rank's fragments at it
        self._paused = 0.0  # since when; 0: it is not
        self._told = threading.Condition()
        self._progress_told = 0.0
        self._leaders: dict[tuple[int, int], Blob | None] = {}  # by epoch and unit; None: it will not have it
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
                self._leaders[command.epoch, command.arguments["unit"]] = command.arguments["blob"]
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
        boxes = route.boxes(self.member.name)
        staged = self._staged = _Staged(command.epoch, manifest.version, route, boxes, np.zeros(len(boxes), np.uint64))
        if (patches := command.arguments["patches"]) is not None:
            self._fetch(staged, origin, patches, boxes)
        elif (meeting := command.arguments.get("meeting")) is not None:
            self._receive(staged, origin, meeting, command.arguments["seat"], deadline)
        else:
            self._pull(staged, origin, manifest, deadline)
        with self._told:
            self._leaders = {key: blob for key, blob in self._leaders.items() if key[0] > command.epoch}
        return staged.digests

    def _take(self, staged: _Staged, origin: Origin, unit: int, data: np.ndarray) -> None:
        """A unit is here."""
        boxes, delivery = staged.boxes, staged.route.delivery
        of = np.flatnonzero(delivery.unit[boxes] == unit)
        staged.digests[of] = regions_of(origin.publication, delivery, boxes[of]).digests(data)
        with self._told:
            staged.units[unit] = data
            staged.nbytes += len(data)
            last = len(staged.units) == len(np.unique(delivery.unit[boxes]))
            if due := last or time.monotonic() - self._progress_told > _PROGRESS_S:
                self._progress_told = time.monotonic()
        if due:
            self.call("progress", self.member.id, staged.epoch, staged.nbytes)

    def _fetch(self, staged: _Staged, origin: Origin, patches: Mapping[int, Blob], boxes: np.ndarray) -> None:
        """Mode `delta`: gets what changed, and works out what the digests are going to be."""
        delivery = staged.route.delivery
        found: dict[int, Patch] = {}
        for number in needed(origin.publication, delivery, boxes).tolist():
            self.check(staged.epoch)
            found[number] = Patch.parse(blobs.view(patches[number]))
        first, last = staged.route.spans[self.member.name]
        staged.changes = Changes(self._placement, delivery.box_of[first:last], origin.publication, delivery, found)
        targets = list(views(self._placement, self._adapter.shard().buffers()))
        if self._digests is None or self._digests[0] != self.version:
            own = self._placement
            shapes = [own.metas[t].shape for t in own.tensor.tolist()]
            now = [content_digest(target, lo, shape) for target, lo, shape in zip(targets, own.lo.tolist(), shapes, strict=True)]
            self._digests = self.version, np.array(now, np.uint64)
        _, one = np.unique(staged.changes.box_of, return_index=True)  # fragment of each box
        staged.digests = staged.changes.digests(targets, self.version, boxes, self._digests[1][one])

    def _pull(self, staged: _Staged, origin: Origin, manifest: Manifest, deadline: Deadline) -> None:
        """Mode `p2p`: reads its regions from the trainers' nodes, and what others lead from theirs."""
        delivery = staged.route.delivery
        me = delivery.ranks.index(self.member.name)
        pools = [
            concurrent.futures.ThreadPoolExecutor(n, "mooncake_ray.units") for n in (_LEADS, _FOLLOWS)
        ]  # leads must not wait for others
        try:
            doing = []
            for unit in delivery.units_of(self.member.name).tolist():
                leads = delivery.leader[unit] == me
                doing.append(pools[not leads].submit(self._lead if leads else self._follow, staged, origin, manifest, unit, deadline))
            for one in concurrent.futures.as_completed(doing):
                one.result()
        finally:
            for threads in pools:
                threads.shutdown(cancel_futures=True)

    def _receive(self, staged: _Staged, origin: Origin, meeting: Meeting, seat: int, deadline: Deadline) -> None:
        """Mode `nccl`: takes what it wants of everything that is broadcast."""
        publication, delivery = origin.publication, staged.route.delivery
        units: dict[int, np.ndarray] = {}
        wanted: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}  # by object: where to, and the runs
        for unit in delivery.units_of(self.member.name).tolist():
            reads = lower(publication, delivery, unit)
            units[unit] = np.empty(int(delivery.unit_nbytes[unit]), np.uint8)
            for number, runs in by_object(reads):
                wanted.setdefault(number, []).append((units[unit], runs))
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
        for unit, data in units.items():
            self._take(staged, origin, unit, data)

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
            self._pause()
            if staged.changes is not None:
                self._adapter.update_weights({"apply": staged.changes.apply})
            else:
                self._adapter.update_weights({"pieces": self._pieces(staged)})
            self._adapter.finish_weight_update(staged.version)
        except BaseException:
            self._adapter.abort_weight_update()
            self._digests = None
            raise
        first, last = staged.route.spans[self.member.name]
        own = np.searchsorted(staged.boxes, staged.route.delivery.box_of[first:last])
        self._digests = staged.version, staged.digests[own]
        return time.monotonic() - self._paused

    def _pause(self) -> None:
        begin = time.monotonic()
        self._adapter.pause()
        self._paused = self._paused or begin

    def do_resume(self, command: Command) -> float:
        """The other ranks of this engine have it, too. Returns for how many seconds it was paused."""
        self._adapter.resume()
        self._forget()
        paused, self._paused = time.monotonic() - self._paused, 0.0
        return paused

    # ---- units

    def _lead(self, staged: _Staged, origin: Origin, manifest: Manifest, unit: int, deadline: Deadline) -> None:
        """Gathers a unit, and tells the others that want it."""
        blob = self._gathered(staged, origin, manifest, unit, deadline)
        if len(staged.route.delivery.members(unit)) > 1:
            self.call("staged", self.member.id, staged.epoch, unit, blob)
        self._take(staged, origin, unit, blobs.view(blob))

    def _gathered(self, staged: _Staged, origin: Origin, manifest: Manifest, unit: int, deadline: Deadline) -> Blob:
        self.check(staged.epoch)
        reads = lower(origin.publication, staged.route.delivery, unit)
        parts = [manifest.blobs[number].part(runs) for number, runs in by_object(reads)]
        nbytes = int(staged.route.delivery.unit_nbytes[unit])
        blob = blobs.gather(parts, nbytes, timeout_s=deadline.left(f"unit {unit}"))
        staged.made.append(blob)
        return blob

    def _follow(self, staged: _Staged, origin: Origin, manifest: Manifest, unit: int, deadline: Deadline) -> None:
        """Gets a unit from the rank that leads it; from the trainers, if that cannot be."""
        why: object = "it died"
        if (blob := self._led(staged.epoch, unit, deadline)) is not None:
            try:
                self._take(staged, origin, unit, blobs.view(blob))
                return
            except MooncakeRayError as e:
                why = e
        logger.warning("mooncake_ray: %s gets unit %d from the trainers, not from its leader: %s", self.member, unit, why)
        self._take(staged, origin, unit, blobs.view(self._gathered(staged, origin, manifest, unit, deadline)))

    def _led(self, epoch: int, unit: int, deadline: Deadline) -> Blob | None:
        """Where the leader of a unit has it. None: it will not."""
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
        delivery = staged.route.delivery
        box = delivery.box_of[slice(*staged.route.spans[self.member.name])]
        units = sorted(staged.units)
        array = np.searchsorted(np.array(units, np.int64), delivery.unit[box])
        return PackedPieces(self._placement, [staged.units[unit] for unit in units], array, delivery.offset[box])

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


def regions_of(publication: Publication, delivery: Delivery, boxes: np.ndarray) -> Regions:
    """Boxes of one unit, as they lie in its object."""
    tensor, lo, hi = delivery.tensor[boxes], delivery.lo[boxes], delivery.hi[boxes]
    shapes = np.pad(publication.shapes, ((0, 0), (lo.shape[1] - publication.shapes.shape[1], 0)), constant_values=1)
    return Regions(lo, hi, shapes[tensor], publication.itemsize[tensor].astype(np.int32), delivery.offset[boxes])


def by_object(reads: Reads) -> Iterator[tuple[int, np.ndarray]]:
    """The number of each object, and the runs of it as `Part` has them."""
    ends = np.searchsorted(reads.runs[:, 0], np.arange(len(reads.objects) + 1))
    for i, number in enumerate(reads.objects.tolist()):
        yield number, np.ascontiguousarray(reads.runs[ends[i] : ends[i + 1], 1:])
