"""`RolloutBuffer`: a bounded queue of samples between rollout workers and learners, all of them anywhere in the cluster.

    buffer = mooncake_ray.RolloutBuffer.create("policy", group_size=8, max_staleness=2, capacity_groups=96)

    with buffer.reserve(uids) as ticket:                     # a rollout worker: waits while enough are on their way
        ticket.put(batch, uids=uids_of_rows, version=7)

    share = buffer.take(step, version, groups=32, rank=rank, world=world)            # each learner rank
    train(share.ref.get())
    buffer.commit(share)                                                             # one of them, when all have learned

Batches stay where they were stored; what goes through the buffer are refs.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from mooncake_ray.errors import ConfigError, GetTimeoutError, SchemaError, StoreFullError
from mooncake_ray.objects.answers import answer
from mooncake_ray.objects.batch_ref import BatchRef
from mooncake_ray.objects.batches import put_batch
from mooncake_ray.objects.processes import this_process
from mooncake_ray.objects.renewals import keep
from mooncake_ray.rollout.buffer_actor import LONGEST_WAIT_S
from mooncake_ray.rollout.group import Parcel
from mooncake_ray.rollout.lent import Share, Ticket
from mooncake_ray.rollout.records import Brought, NoRoom, Want
from mooncake_ray.rollout.replay import Draw
from mooncake_ray.rollout.saving import Saved, save
from mooncake_ray.rollout.settings import BufferSettings
from mooncake_ray.rollout.snapshots import BufferSnapshots
from mooncake_ray.rollout.spans import NO_VERSION, VersionSpans
from mooncake_ray.rollout.starting import start

__all__ = ["RolloutBuffer"]

Version = int | Sequence[int] | np.ndarray | VersionSpans

_ANSWER_S = 60.0  # beside what is waited for


class RolloutBuffer:
    """A handle. Thread-safe; pickles through any Ray call.

    The buffer owns what is put: samples survive the death of their producer, and what a dead producer was at is for others. The actor that
    decides may die at any time; it begins again from what another one, its vault, remembers. That one's death, or that of the node that the
    buffer was created on, is the end of the buffer.

    Raises, in every method:
        StoreError: the buffer is gone.
        GetTimeoutError: it did not answer for a minute.
    """

    def __init__(self, actor: ray.actor.ActorHandle, vault: ray.actor.ActorHandle, name: str, lease_s: float) -> None:
        """Use `create` or `connect`."""
        self.name, self.lease_s = name, lease_s
        self._actor, self._vault = actor, vault

    @classmethod
    def create(
        cls,
        name: str,
        *,
        namespace: str | None = None,
        detached: bool = False,
        restore: str | os.PathLike[str] | None = None,
        restore_version: int | None = None,
        **settings: Any,
    ) -> RolloutBuffer:
        """Starts a buffer on this node. It lives as long as a handle of it, or with `detached` until `shutdown`.

        Args:
            name: By which others connect to it.
            namespace: Ray's.
            restore: The folder of a snapshot (see `save`) that it goes on from, on this node or shared. Samples are bit for bit what they were.
            restore_version: Of the snapshot. Default: the newest.
            settings: See `BufferSettings`. Of a snapshot's, `group_size` has to be the same; the others hold from now on.

        Raises:
            ConfigError: the name is taken, a setting is wrong, or the snapshot's groups are of another size.
            SnapshotNotFoundError: there is no such snapshot.
            SnapshotError, CorruptBlockError, ChecksumError: it is of another format, or damaged. Says what, and where.
            StoreFullError: its samples do not fit into the pool.
        """
        try:
            chosen = BufferSettings(**settings)
        except TypeError as e:
            raise ConfigError(f"a buffer has no such setting: {e}") from None
        actor, vault = start(name, namespace, detached, chosen, restore, restore_version)
        return cls(actor, vault, name, chosen.lease_s)

    @classmethod
    def connect(cls, name: str, *, namespace: str | None = None) -> RolloutBuffer:
        """The buffer of that name.

        Raises:
            ConfigError: there is none.
        """
        try:
            actor, vault = (ray.get_actor(n, namespace=namespace) for n in (name, f"{name}:vault"))
        except ValueError as e:
            raise ConfigError(f"there is no buffer {name!r}: {e}") from e
        out = cls(actor, vault, name, 0.0)
        out.lease_s = out.settings.lease_s
        return out

    def __reduce__(self) -> Any:
        return RolloutBuffer, (self._actor, self._vault, self.name, self.lease_s)

    def __repr__(self) -> str:
        return f"RolloutBuffer({self.name!r})"

    # ---- producers

    def reserve(self, uids: Sequence[str], *, timeout_s: float | None = None) -> Ticket:
        """Waits until so many more groups may be on their way, and says that this process makes them.

        If it dies, or the ticket is given back, they are for whoever calls `resume`. The ticket is renewed while this process refers to it.

        Args:
            uids: Of the groups. Different from those of all groups that are on their way.

        Raises:
            StoreFullError: no room within the time, or ever.
            StoreError: the buffer is closed.
            SchemaError: a group is on its way already.
        """
        arguments = (_operation(), this_process(), list(uids))
        answer = self._wait("reserve", arguments, timeout_s, lambda answer: not isinstance(answer, NoRoom))
        if isinstance(answer, NoRoom):
            raise StoreFullError(f"buffer {self.name!r} had no room within {timeout_s} s: {answer}")
        return self._kept(Ticket(self, answer, tuple(uids), ()))

    def resume(self, most: int = 1, *, timeout_s: float | None = 0.0) -> Ticket | None:
        """Groups that are to be made again, or further, if there are any: see `Ticket.works`.

        Args:
            most: At most so many, and as there is room.
            timeout_s: Seconds to wait for one. None: no limit.
        """
        if most < 1:
            raise ValueError(f"most must be positive, got {most}")
        found = self._wait("resume", (_operation(), this_process(), most), timeout_s, lambda answer: answer is not None)
        if found is None:
            return None
        ticket, works = found
        return self._kept(Ticket(self, ticket, tuple(work.uid for work in works), tuple(works)))

    def work(self, uids: Sequence[str], *, timeout_s: float | None = None) -> Ticket:
        """As `resume` if there is anything to be made again, or further, at most as many groups as there are uids; or else as `reserve`."""
        found = self._wait("work", (_operation(), this_process(), list(uids)), timeout_s, lambda answer: not isinstance(answer, NoRoom))
        if isinstance(found, NoRoom):
            raise StoreFullError(f"buffer {self.name!r} had no room within {timeout_s} s: {found}")
        ticket, works = found
        return self._kept(Ticket(self, ticket, tuple(work.uid for work in works) or tuple(uids), tuple(works)))

    def put(
        self,
        batch: Any,
        *,
        uids: Sequence[str],
        version: Version,
        tokens: Sequence[int] | np.ndarray | None = None,
        priority: Sequence[float] | np.ndarray | None = None,
        tags: Mapping[str, Any] | None = None,
        operation_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Brought:
        """Adds whole groups without a ticket: all of their samples, or nothing. When it has answered, this process may die.

        Args:
            batch: What `put_batch` takes, or the `BatchRef` of what is stored already: a row for each sample.
            uids: Of the group of each sample.
            version: Of the weights that made the oldest token of each, or of all; or the spans that `attach` has put into the batch, by which
                it is known of each token.
            tokens: What each costs to learn from: learner ranks get about as many. Default: 1.
            priority: Of each sample; a group has the highest.
            tags: Arrays with an element for each sample, for filters: rewards, say.
            operation_id: A second put of that name changes nothing and is answered as the first one was. Default: a new name.
            timeout_s: Seconds to wait for room. Default: no limit.

        Raises:
            StoreFullError: no room within the time, or ever.
            StoreError: the buffer is closed.
            SchemaError: columns are of wrong lengths or types, a group is not whole or is on its way already.
        """
        arguments = self._parcel(batch, uids, version, tokens, priority, tags, operation_id)
        return self._put(arguments, None, timeout_s)

    def close(self) -> None:
        """No new groups come. Learners get what is left, and then nothing."""
        self._call("do", "ledger", "close")

    # ---- learners

    def advance(self, version: int) -> None:
        """Weights of that version are trained from now on. What is too old for it goes."""
        self._call("do", "ledger", "advance", version)

    def take(
        self,
        step: int,
        version: int,
        groups: int,
        *,
        rank: int = 0,
        world: int = 1,
        tokens: int | None = None,
        replay: int = 0,
        draw: Draw = "uniform",
        replay_staleness: int | None = None,
        timeout_s: float | None = None,
    ) -> Share:
        """This rank's share of what a step learns from; waits for it. The shares of all ranks are of one batch, and have about as many tokens.

        Asked again it is the same, also by another process, until the step is committed or given up.

        Args:
            step: A number that grows.
            version: Of the weights that the step changes.
            groups: How many whole groups, of all ranks together.
            tokens: At most so many in all of them.
            replay: So many groups more, drawn from what was learned from before.
            draw, replay_staleness: See `Want`.
            timeout_s: Seconds to wait. Default: no limit.

        Returns:
            A share without samples (`len` is 0) if the buffer is closed and there are no more.

        Raises:
            GetTimeoutError: not enough groups within the time.
            StaleVersionError: the step is committed, or newer weights are trained already.
            ConfigError: the step was asked for otherwise before, or has fewer samples than there are ranks.
        """
        want = Want(groups, tokens, replay, draw, replay_staleness)
        arguments = (step, version, want, this_process(), rank, world)
        given = self._wait("take", arguments, timeout_s, lambda answer: answer is not None)
        if given is None:
            raise GetTimeoutError(
                f"buffer {self.name!r} had fewer than {groups} groups for step {step} within {timeout_s} s: {self.stats()}"
            )
        return self._kept(Share(self, given))

    def commit(self, share: Share, *, priorities: Mapping[int, float] | None = None) -> int:
        """The step has learned, all ranks of it. Returns how many samples. Idempotent, and for one rank to call.

        Args:
            priorities: That groups have from now on in the replay, by their numbers (`Share.groups`).

        Raises:
            LeaseLostError: what it had may have been given to others.
        """
        count = self._call("do", "consumption", "commit", share.step, share.attempt, dict(priorities or {}))
        share.over = True
        return count

    def give_up(self, share: Share) -> None:
        """The step has not learned, and will not: its groups are for another one. Nothing happens if it has not got them any more.

        Raises:
            StaleVersionError: it is committed.
        """
        self._call("do", "consumption", "give_up", share.step, share.attempt)
        share.over = True

    def rewind(self, step: int) -> int:
        """The learner begins again with that step, from weights that it had before: see `Consumption.rewind`."""
        return self._call("do", "consumption", "rewind", step)

    # ---- disk

    def save(self, folder: str | os.PathLike[str], version: int, *, keep: int = 2, fsync: bool = True, timeout_s: float = 3600.0) -> Saved:
        """Writes all of it as it is at one moment into a folder, from which `create(…, restore=folder)` goes on. The buffer goes on meanwhile.

        Kept are the groups that are queued, parked or in the replay, which steps were committed, and all numbers. For groups that somebody has,
        the snapshot is as if they were given back: what is being made waits for whoever resumes it, with the samples that have come; a step
        that is not committed may be asked for again. Filters and other settings are not kept. A death at any time leaves the snapshots of
        before whole, and this one whole or not there.

        Args:
            folder: On the buffer's node, or shared. Several versions are in it, each in a folder of its own: see `BufferSnapshots`.
            version: Larger than those that are there: that of the model's checkpoint that it belongs to, say.
            keep: So many of the newest versions stay.
            fsync: It outlives a crash of the machine, too.
            timeout_s: Seconds for all of it.

        Raises:
            StaleVersionError: this version, or a newer one, is there already.
            SnapshotError: samples or tags have what cannot be kept, Ray's handles say.
            ObjectLostError: samples were lost meanwhile. It may be tried again.
            OSError: the disk is full, or fails.
        """
        snapshots = BufferSnapshots(os.path.abspath(folder), keep=keep, fsync=fsync)
        return save(self._call("moment"), snapshots, version, timeout_s)

    # ---- looking

    @property
    def settings(self) -> BufferSettings:
        """What it was created with. Asks for it."""
        return self._call("settings")

    def stats(self) -> dict[str, Any]:
        """Numbers of now (`groups_queued`, `bytes`, …), totals, and `staleness`: how many groups were learned from by their age in versions."""
        return self._call("stats")

    def shutdown(self) -> None:
        """Ends the buffer, with all that it owns. Idempotent."""
        for actor in (self._actor, self._vault):
            ray.kill(actor)

    # ---- within

    @property
    def identity(self) -> str:
        return self._actor._actor_id.hex()

    def renew(self, leases: Sequence[tuple[str, int, int]]) -> Sequence[tuple[str, int, int]]:
        """For what this process has, which is done in the background. Returns those that have ended."""
        tickets = [number for kind, number, _ in leases if kind == "ticket"]
        steps = {number: attempt for kind, number, attempt in leases if kind == "step"}
        ended = self._call("renew", tickets, steps)
        return [lease for lease in leases if lease[1] in ended[lease[0] == "step"]]

    def _kept(self, lent: Any) -> Any:
        keep(lent)
        return lent

    def _parcel(
        self,
        batch: Any,
        uids: Sequence[str],
        version: Any,
        tokens: Any,
        priority: Any,
        tags: Mapping[str, Any] | None,
        operation: str | None,
    ) -> tuple[str, Parcel, BatchRef]:
        ref = batch if isinstance(batch, BatchRef) else put_batch(batch)
        if len(ref) != len(uids):
            raise SchemaError(f"there are {len(uids)} uids and {len(ref)} rows")
        count = len(uids)
        parcel = Parcel(
            uuid.uuid4().hex,
            list(uids),
            np.ones(count, np.int64) if tokens is None else np.asarray(tokens),
            _oldest(version, count),
            ref.nbytes,
            None if priority is None else np.asarray(priority, np.float64),
            {name: np.asarray(column) for name, column in (tags or {}).items()},
        )
        return operation or parcel.id, parcel, ref

    def _put(self, arguments: tuple[str, Parcel, BatchRef], ticket: int | None, timeout_s: float | None) -> Brought:
        answer = self._wait("put", (*arguments, ticket), timeout_s, lambda answer: not isinstance(answer, NoRoom))
        if isinstance(answer, NoRoom):
            raise StoreFullError(f"buffer {self.name!r} had no room within {timeout_s} s: {answer}")
        return answer

    def _wait(self, method: str, arguments: tuple, timeout_s: float | None, is_done: Callable[[Any], bool]) -> Any:
        """Asks until it is done, or the time is over."""
        if timeout_s is not None and timeout_s < 0:
            raise ValueError(f"timeout_s must not be negative, got {timeout_s}")
        end = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = max(0.0, end - time.monotonic())
            answer = self._call(method, *arguments, min(left, LONGEST_WAIT_S))
            if is_done(answer) or time.monotonic() >= end:
                return answer

    def _call(self, method: str, *arguments: Any) -> Any:
        within_s = LONGEST_WAIT_S + _ANSWER_S
        return answer(f"buffer {self.name!r}", lambda: getattr(self._actor, method).remote(*arguments), within_s)


def _oldest(version: Version, samples: int) -> np.ndarray:
    """Of each sample."""
    if not isinstance(version, VersionSpans):
        return np.broadcast_to(np.asarray(version), samples).copy()
    oldest = version.oldest()
    return np.where(oldest == NO_VERSION, oldest.max(initial=0), oldest)  # a sample without tokens makes no group old


def _operation() -> str:
    return uuid.uuid4().hex
