"""A trainer's rank: publishes what it owns of each version, and keeps it until the next is everywhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from mooncake_ray.errors import DeltaBaseError, PlanError, SyncAbortedError
from mooncake_ray.objects import blobs
from mooncake_ray.objects.blobs import Blob
from mooncake_ray.sync.collective import Host, Meeting, Ring, broadcast, broadcast_order
from mooncake_ray.sync.history import History
from mooncake_ray.sync.member import Agent, this_member
from mooncake_ray.sync.messages import Command, Join, Published
from mooncake_ray.sync.plans import Origin, load
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.weights.laid import Sources
from mooncake_ray.weights.patch import Regions
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.publication import Publication
from mooncake_ray.weights.shard import Shard

__all__ = ["Trainer"]

logger = logging.getLogger("mooncake_ray")

TRAINER = "trainer"


class Trainer(Agent):
    """Lives in the trainer rank's process for as long as that trains. Its weights are read while `publish` (or the group's `publish` or
    `sync`) is under way, and at no other time."""

    def __init__(self, find: Callable[[], Any], shard: Shard, rank: int, world: int, *, timeout_s: float) -> None:
        super().__init__(find, this_member(TRAINER, TRAINER, rank, world))
        self._shard = shard
        self._placement = Placement.of(self.member.name, shard.fragments())
        self._plan: tuple[Origin, np.ndarray] | None = None
        self._kept: dict[int, Published] = {}
        self._history: History | None = None
        self._patches: dict[tuple[int, int], dict[int, Blob]] = {}  # by versions: from, to
        self._host: Host | None = None
        self.start(timeout_s)

    def describe(self) -> Join:
        newest = self._kept[max(self._kept)] if self._kept else None
        return Join(self.member, self._placement, newest, aliases=frozenset(getattr(self._shard, "aliases", ())))

    def publish(self, version: int | None = None, *, timeout_s: float = 300.0) -> int:
        """Publishes this rank's weights; every rank of the trainers calls it. Returns the version, when the copy of all ranks is made:
        training may go on while engines still receive.

        Raises:
            StaleVersionError: `version` is not newer than the last.
            SyncTimeoutError: another rank has not called it in time.
            StoreFullError: the pool has no room for the copy.
        """
        return self.call("offer", self.member.id, version, timeout_s, timeout_s=timeout_s + 5.0)

    def close(self) -> None:
        super().close()
        for version in list(self._kept):
            self._drop(version)

    def do_publish(self, command: Command) -> Published:
        """Makes room for a version, tells where it is going to be, and writes it there."""
        version, operation = command.arguments["version"], command.arguments["operation"]
        if version in self._kept:
            kept = self._kept[version]
            if (kept.operation, kept.plan) == (operation, command.arguments["digest"]):
                self._tell_rooms(command.epoch, kept.blobs)
                return kept  # asked for again, by a coordinator that was restarted
            self.do_withdraw(command)
        begin = time.monotonic()
        origin, mine = self._origin(command.arguments["plan"], command.arguments["digest"])
        publication = origin.publication
        sources = Sources(self._own(origin, mine), self._shard.buffers())
        rooms: dict[int, blobs.Reserved] = {}
        made: dict[int, Blob] = {}
        try:
            for number in np.unique(publication.object_of[mine]).tolist():
                self.check(command.epoch)
                nbytes = int(publication.object_nbytes[number])
                rooms[number] = blobs.Reserved(nbytes, timeout_s=command.timeout_s, note=f"weights, version {version}")
            self._tell_rooms(command.epoch, {number: room.blob for number, room in rooms.items()})
            for number, room in rooms.items():
                self.check(command.epoch)
                of = np.flatnonzero(publication.object_of[mine] == number)

                def fill(out: np.ndarray, of: np.ndarray = of) -> None:
                    sources.pack(of, out, publication.offset[mine[of]])

                made[number] = room.write(fill)
        except BaseException:
            rooms.clear()
            blobs.drop(made.values())
            raise
        digests, patched = self._digests(publication, version, command, made)
        published = Published(version, operation, publication.digest, made, digests, patched, time.monotonic() - begin)
        self._kept[version] = published
        return published

    def _tell_rooms(self, epoch: int, rooms: Mapping[int, Blob]) -> None:
        """Does not wait: a coordinator that does not hear it asks for all of it again."""
        self.tell("reserved", self.member.id, epoch, rooms)

    def _digests(self, publication: Publication, version: int, command: Command, made: Mapping[int, Blob]) -> tuple[np.ndarray, int]:
        """Of this rank's regions. Where deltas are wanted, and there is a version before, its patches are made on the way.

        Returns them, and the bytes of the patches; -1: there are none."""
        if self._history is None or self._history.plan != publication.digest:
            regions = {number: Regions.of(publication, number) for number in made}
            self._history = History(publication.digest, regions, sum(blob.nbytes for blob in made.values()))
        base = max((v for v, kept in self._kept.items() if v < version and kept.plan == publication.digest), default=None)
        if command.arguments["delta"] and base is not None:
            before = self._kept[base]
            digests = self._history.add(
                base, version, command.epoch, lambda n: blobs.view(before.blobs[n]), lambda n: blobs.view(made[n]), before.digests
            )
            return digests, sum(p.nbytes for p in self._history.patches(base, version).values())
        found = [self._history.regions[number].digests(blobs.view(blob)) for number, blob in made.items()]
        return np.concatenate(found) if found else np.zeros(0, np.uint64), -1

    def do_patch(self, command: Command) -> dict[int, Blob]:
        """Makes blobs of what changed since a version, until another one is published."""
        base, version = command.arguments["base"], command.arguments["version"]
        if self._history is None:
            raise DeltaBaseError(f"{self.member} has not published version {base}")
        if (base, version) not in self._patches:
            made: dict[int, Blob] = {}
            for number, patch in self._history.patches(base, version).items():
                data = patch.data

                def fill(out: np.ndarray, data: np.ndarray = data) -> None:
                    out[:] = data

                made[number] = blobs.write(len(data), fill, timeout_s=command.timeout_s, note=f"weights, {base} to {version}")
            self._patches[base, version] = made
        return self._patches[base, version]

    def do_meet(self, command: Command) -> Meeting:
        """Opens the place where the ranks of a broadcast find each other, until the next."""
        self._host = Host(self.member.host, f"{self.member.id}/{command.epoch}", command.timeout_s)
        return self._host.meeting

    def do_broadcast(self, command: Command) -> None:
        """Sends what it has published to all ranks of the engines."""
        if self._plan is None or (kept := self._kept.get(command.arguments["version"])) is None:
            raise SyncAbortedError(f"{self.member} has not published version {command.arguments['version']}")
        if not kept.blobs:
            return
        publication, deadline = self._plan[0].publication, Deadline(command.timeout_s)
        me = publication.ranks.index(self.member.name)
        device = next((t.device for t in self._shard.buffers().values()), torch.device("cpu"))
        ring = Ring(
            command.arguments["meeting"],
            me,
            0,
            1 + command.arguments["receivers"],
            self.member.host,
            device,
            deadline,
            lambda: self.check(command.epoch),
        )
        try:
            mine = [n for n in broadcast_order(publication) if n in kept.blobs]
            objects = [blobs.view(kept.blobs[n]) for n in mine]
            broadcast(ring, objects, device, deadline, lambda: self.check(command.epoch))
        finally:
            ring.close()

    def do_forget(self, command: Command) -> None:
        for version in [v for v in self._kept if v < command.arguments["before"]]:
            self._drop(version)

    def do_withdraw(self, command: Command) -> None:
        """Another rank could not publish that version, so there is none."""
        self._drop(command.arguments["version"])
        if self._history is not None:
            self._history.withdraw(command.arguments["version"])

    def _drop(self, version: int) -> None:
        if (kept := self._kept.pop(version, None)) is not None:
            blobs.drop(kept.blobs.values())
        for key in [key for key in self._patches if key[1] == version]:
            blobs.drop(self._patches.pop(key).values())

    def _origin(self, blob: Blob, digest: str) -> tuple[Origin, np.ndarray]:
        """The plan, and which of its regions this rank owns."""
        if self._plan is None or self._plan[0].publication.digest != digest:
            origin = load(blob)
            if not isinstance(origin, Origin) or origin.publication.digest != digest:
                raise PlanError(f"{self.member} got a plan with another digest than the coordinator's {digest[:16]}")
            self._plan = origin, np.flatnonzero(origin.publication.owner == origin.publication.ranks.index(self.member.name))
        return self._plan

    def _own(self, origin: Origin, mine: np.ndarray) -> Placement:
        """The regions that this rank owns, in their order, where they lie in its buffers."""
        p, plan = self._placement, origin.publication
        at = plan.fragment[mine] - origin.spans[self.member.name][0]
        if len(at) and not (at.min() >= 0 and at.max() < len(p)):
            raise SyncAbortedError(f"{self.member}: the plan was made for another placement")
        pad = plan.lo.shape[1] - p.lo.shape[1]  # this rank's tensors may have fewer dimensions
        lo, hi = plan.lo[mine, pad:], plan.hi[mine, pad:]
        offset = p.offset[at] + ((lo - p.lo[at]) * p.strides[at]).sum(axis=1)
        return Placement(p.metas, p.ranks, p.buffers, p.tensor[at], p.rank[at], lo, hi, p.buffer[at], offset, p.strides[at])
